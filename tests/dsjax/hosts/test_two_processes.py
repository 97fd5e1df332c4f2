"""Two processes of two devices each compute what one process does, and end together."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from engine_process import GREEDY, PROMPTS, SAMPLED, SIZES, continuations
from layouts import write_checkpoint
from processes import Group

from dsjax import LLM

LAYOUTS = [("dp=4", "padded", True), ("dp=2,tp=2", "gather", False), ("dp=4,ep=2", "ragged", False)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def alone(checkpoint):
    llm = LLM(str(checkpoint), **SIZES)
    yield [continuations(llm.engine, PROMPTS, GREEDY), continuations(llm.engine, PROMPTS[:2], SAMPLED)]
    llm.shutdown()


def test_every_layout_and_dispatch_makes_the_tokens_of_one_process(checkpoint, alone):
    command = ["tests/dsjax/hosts/engine_process.py", "--model", str(checkpoint), "--layouts", json.dumps(LAYOUTS)]
    group = Group(command, 2)
    try:
        assert group.codes(240) == [0, 0], group.output
    finally:
        group.end()
    line = next(line for line in group.output[0].splitlines() if line.startswith("found "))
    for layout, found in zip(LAYOUTS, json.loads(line.removeprefix("found ")), strict=True):
        assert found["greedy"] == alone[0], layout
        if layout[2]:
            assert found["sampled"] == alone[1], layout
