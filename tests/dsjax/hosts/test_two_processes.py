"""Two processes of two devices each compute what one process does, and end together."""

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from engine_process import GREEDY, PROMPTS, SAMPLED, SIZES, continuations
from layouts import write_checkpoint
from processes import Group

from dsjax import LLM
from dsjax.checkpoint.shards import SafetensorsFolder

LAYOUTS = [("dp=4", "padded", True, {}), ("dp=2,tp=2", "gather", False, {}), ("dp=4,ep=2", "ragged", False, {})]
ALL_AT_ONCE = {
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
    "enable_eplb": True,
    "eplb_config": {"num_redundant_experts": 4, "window_size": 4, "step_interval": 4, "payback": 0},
    "cache_tokens": 32,
    "host_cache_bytes": 400_000,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def alone(checkpoint):
    llm = LLM(str(checkpoint), **SIZES)
    yield [continuations(llm.engine, PROMPTS, GREEDY), continuations(llm.engine, PROMPTS[:2], SAMPLED)]
    llm.shutdown()


@pytest.fixture(scope="module")
def outputs(checkpoint):
    """What each process printed."""
    command = ["tests/dsjax/hosts/engine_process.py", "--model", str(checkpoint), "--layouts", json.dumps(LAYOUTS)]
    group = Group(command, 2)
    try:
        assert group.codes(240) == [0, 0], group.last_words()
    finally:
        group.end()
    return group.output


def test_every_layout_and_dispatch_makes_the_tokens_of_one_process(outputs, alone):
    line = next(line for line in outputs[0].splitlines() if line.startswith("found "))
    for layout, found in zip(LAYOUTS, json.loads(line.removeprefix("found ")), strict=True):
        assert found["greedy"] == [alone[0]], layout
        if layout[2]:
            assert found["sampled"] == alone[1], layout


def test_each_process_reads_what_its_own_devices_hold_and_nothing_else(outputs, checkpoint):
    sizes = {name: spec.nbytes for name, spec in SafetensorsFolder(checkpoint).specs.items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    rest = sum(sizes.values()) - experts
    # With four EP ranks a process has half of the experts, with two it has all of them, and everything else in any case.
    expected = [rest + experts // 2, rest + experts // 2, rest + experts]
    for text in outputs:
        found = re.findall(r"Read ([\d,]+) of the checkpoint's ([\d,]+) bytes", text)
        assert [int(read.replace(",", "")) for read, _ in found] == expected
        assert {int(whole.replace(",", "")) for _, whole in found} == {experts + rest}


def test_drafts_balanced_experts_and_pages_in_host_memory_are_over_two_processes_what_they_are_in_one(tmp_path, alone):
    checkpoint = write_checkpoint(tmp_path, mtp=True)
    layouts = json.dumps([("dp=4", "padded", False, ALL_AT_ONCE)])
    group = Group(["tests/dsjax/hosts/engine_process.py", "--model", str(checkpoint), "--layouts", layouts], 2)
    try:
        assert group.codes(240) == [0, 0], group.last_words()
    finally:
        group.end()
    line = next(line for line in group.output[0].splitlines() if line.startswith("found "))
    (found,) = json.loads(line.removeprefix("found "))
    assert [found["greedy"][0], found["greedy"][2]] == [alone[0], alone[0]]
    assert found["rebalances"] > 0
    assert sum(found["fetched"]) > 0
