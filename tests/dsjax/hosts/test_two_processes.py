"""Two processes of two devices each compute what one process does, and end together."""

import functools
import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

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
LAYOUTS = [
    ("dp=4", "padded", True, ALL_AT_ONCE),
    ("dp=2,tp=2", "ragged", True, {"model": "v3.2"}),
]


def model_of(layout) -> str:
    return layout[3].get("model", "v3")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The checkpoint of each model, written when it is first asked for."""
    return functools.cache(
        lambda model: write_checkpoint(
            tmp_path_factory.mktemp("tiny"), mtp=True, first_k_dense_replace=0, **MODELS[model]
        )
    )


@pytest.fixture(scope="module")
def checkpoint(checkpoints):
    return checkpoints("v3")


@pytest.fixture(scope="module")
def alone_of(checkpoints):
    """What one process makes of each model, greedily and drawn, when it is first asked for."""

    def made(model):
        llm = LLM(str(checkpoints(model)), **FEW_SHAPES)
        try:
            return [continuations(llm.engine, PROMPTS, GREEDY), continuations(llm.engine, PROMPTS[:2], SAMPLED)]
        finally:
            llm.shutdown()

    return functools.cache(made)


@pytest.fixture(scope="module")
def alone(alone_of):
    return alone_of("v3")


@pytest.fixture(scope="module")
def outputs(checkpoint, checkpoints):
    """What each process printed."""
    layouts = [
        (*layout[:3], layout[3] | ({"model": str(checkpoints(layout[3]["model"]))} if "model" in layout[3] else {}))
        for layout in LAYOUTS
    ]
    command = ["tests/dsjax/hosts/engine_process.py", "--model", str(checkpoint), "--layouts", json.dumps(layouts)]
    group = Group(command, 2)
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


def test_every_layout_makes_the_tokens_of_one_process(found, alone_of):
    for layout, one in zip(LAYOUTS, found, strict=True):
        alone = alone_of(model_of(layout))
        assert one["greedy"][-1] == one["greedy"][0] == alone[0], layout
        if layout[2]:
            assert one["sampled"] == alone[1], layout


def test_drafts_balanced_experts_and_pages_in_host_memory_are_over_two_processes_what_they_are_in_one(found, alone):
    assert found[0]["greedy"][2] == alone[0]
    assert found[0]["rebalances"] > 0
    assert sum(found[0]["fetched"]) > 0


def test_each_process_reads_what_its_own_devices_hold_and_nothing_else(outputs, checkpoints):
    every = [
        {name: spec.nbytes for name, spec in SafetensorsFolder(checkpoints(model_of(layout))).specs.items()}
        for layout in LAYOUTS
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
