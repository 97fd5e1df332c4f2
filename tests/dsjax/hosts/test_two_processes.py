"""Two processes of two devices each compute what one process does, and end together."""

import json
import re

import pytest
from engine_process import GREEDY, PROMPTS, SAMPLED, continuations
from layouts import MODELS, write_checkpoint
from processes import Group
from quick_compilation import FEW_SHAPES

from dsjax import LLM
from dsjax.checkpoint.shards import SafetensorsFolder

pytestmark = pytest.mark.slow

ALL_AT_ONCE = {
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
    "enable_eplb": True,
    "eplb_config": {"num_redundant_experts": 4, "window_size": 4, "step_interval": 4, "payback": 0},
    "cache_tokens": 32,
    "host_cache_bytes": 400_000,
}
# Without any of it, and with gather, a server over two processes makes the tokens of one on dp=4: test_two_process_server.py.
LAYOUTS = [("v3", "dp=4", "padded", ALL_AT_ONCE), ("v3.2", "dp=2,tp=2", "ragged", {})]
"""(model, mesh, dispatch, further options)."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The checkpoint of each layout's model."""
    return [str(write_checkpoint(tmp_path_factory.mktemp("tiny"), mtp=True, **MODELS[model])) for model, *_ in LAYOUTS]


@pytest.fixture(scope="module")
def alone(checkpoints):
    """What one process makes of each model, greedily and drawn."""

    def made(checkpoint):
        llm = LLM(checkpoint, **FEW_SHAPES)
        try:
            return [continuations(llm.engine, PROMPTS, GREEDY), continuations(llm.engine, PROMPTS[:2], SAMPLED)]
        finally:
            llm.shutdown()

    return [made(checkpoint) for checkpoint in checkpoints]


@pytest.fixture(scope="module")
def outputs(checkpoints):
    """What each process printed."""
    layouts = [
        {"model": checkpoint, "mesh": mesh, "dispatch": dispatch, **options}
        for checkpoint, (_, mesh, dispatch, options) in zip(checkpoints, LAYOUTS, strict=True)
    ]
    group = Group(["tests/dsjax/hosts/engine_process.py", "--layouts", json.dumps(layouts)], 2)
    try:
        assert group.codes(480) == [0, 0], group.last_words()
    finally:
        group.end()
    return group.output


@pytest.fixture(scope="module")
def found(outputs):
    """What the first process says of each layout."""
    line = next(line for line in outputs[0].splitlines() if line.startswith("found "))
    return json.loads(line.removeprefix("found "))


def test_every_layout_makes_the_tokens_of_one_process(found, alone):
    for layout, one, (greedy, sampled) in zip(LAYOUTS, found, alone, strict=True):
        assert one["greedy"][-1] == one["greedy"][0] == greedy, layout
        assert one["sampled"] == sampled, layout


def test_drafts_balanced_experts_and_pages_in_host_memory_are_over_two_processes_what_they_are_in_one(found):
    assert len(found[0]["greedy"]) == 3, "the prompts, others that push out their pages, and the prompts again"
    assert found[0]["rebalances"] > 0
    assert sum(found[0]["fetched"]) > 0


def test_each_process_reads_what_its_own_devices_hold_and_nothing_else(outputs, checkpoints):
    every = [
        {name: spec.nbytes for name, spec in SafetensorsFolder(checkpoint).specs.items()} for checkpoint in checkpoints
    ]
    sizes = every[1]
    layers = {name: size for name, size in sizes.items() if not name.startswith("model.layers.3.")}  # the MTP module's
    experts = sum(size for name, size in layers.items() if ".experts." in name)
    rest = sum(layers.values()) - experts
    for text in outputs:
        told = re.findall(r"Read ([\d,]+) of the checkpoint's ([\d,]+) bytes", text)
        read, whole = zip(*[[int(number.replace(",", "")) for number in pair] for pair in told], strict=True)
        # Without copies of experts a process of two has half of them, and all else.
        assert read[1] == rest + experts // 2
        assert list(whole) == [sum(one.values()) for one in every]
