"""Two processes of two devices each compute what one process does, and end together."""

import json
import re

import pytest
from layouts import MODELS, write_checkpoint
from llm_process import generate, generate_alone, sample
from processes import outputs_of
from quick_compilation import FEW_SHAPES

from dsjax.checkpoint.shards import SafetensorsFolder

pytestmark = pytest.mark.slow

MODEL = MODELS["v3.2"]
MESH = {"mesh": "dp=2,tp=2", "dispatch": "ragged"}
# Without any of these, and with gather, a server over two processes makes the tokens of one on dp=4: test_two_process_server.py.
ALL_AT_ONCE = {
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
    "enable_eplb": True,
    "eplb_config": {"num_redundant_experts": 4, "window_size": 4, "step_interval": 4, "payback": 0},
    "cache_tokens": 32,
    "host_cache_bytes": 400_000,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("tiny"), mtp=True, **MODEL))


@pytest.fixture(scope="module")
def outputs(checkpoint):
    return outputs_of({"model": checkpoint, **FEW_SHAPES, **MESH, **ALL_AT_ONCE}, "go", "others", "go", "sampled")


@pytest.fixture(scope="module")
def found(outputs):
    """What the first process found: of the prompts, of others that push out their pages, of the prompts again, and with samples."""
    return [json.loads(line) for line in outputs[0].splitlines() if line.startswith("{")]


def test_two_processes_make_the_tokens_of_one_device(found, checkpoint):
    greedy, sampled = generate_alone(checkpoint, lambda llm: (generate(llm), sample(llm)), **FEW_SHAPES)
    assert [one["tokens"] for one in (found[0], *found[2:])] == [greedy, greedy, sampled]


def test_drafts_balanced_experts_and_pages_in_host_memory_are_over_two_processes_what_they_are_in_one(found):
    assert found[-1]["rebalances"] > 0
    assert found[2]["fetched"] > found[0]["fetched"]


def test_each_process_reads_what_its_own_devices_hold_and_nothing_else(outputs, checkpoint):
    sizes = {name: spec.nbytes for name, spec in SafetensorsFolder(checkpoint).specs.items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    for text in outputs:
        [(read, whole)] = re.findall(r"Read ([\d,]+) of the checkpoint's ([\d,]+) bytes", text)
        assert int(whole.replace(",", "")) == sum(sizes.values())
        # 36 slots for 32 experts: a process has half of the slots, and everything but experts.
        assert int(read.replace(",", "")) == sum(sizes.values()) - experts + experts * 18 // 32
