"""A process of a group behind `LLM` that leaves in order and comes back: process 0 generates what it would have generated."""

import json
import signal
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from layouts import write_checkpoint
from llm_process import generate
from processes import Group
from quick_compilation import FEW_SHAPES

from dsjax import LLM

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(
        write_checkpoint(tmp_path_factory.mktemp("tiny"), first_k_dense_replace=0)
    )  # one kind of layer less to compile


def test_a_follower_of_llm_leaves_in_order_and_comes_back_and_no_prompt_is_lost(checkpoint):
    alone = LLM(checkpoint, **FEW_SHAPES)
    expected = generate(alone)
    alone.shutdown()
    options = {"model": checkpoint, "mesh": "dp=4", "compile_ahead": 0, **FEW_SHAPES}
    group = Group(["tests/dsjax/hosts/llm_process.py", "--options", json.dumps(options)], 2, timeout=120)
    follower, deadline = group.processes[1], time.monotonic() + 400
    rounds = 0

    def next_round():
        nonlocal rounds
        rounds += 1
        group.write(0, "again\n")
        group.wait_for(0, '"changes"', times=rounds)
        answer = json.loads([line for line in group.output[0].splitlines() if '"changes"' in line][-1])
        assert answer["tokens"] == expected
        return answer

    try:
        group.wait_for(0, "ready", 200)
        assert next_round()["mesh"] == "dp=4"
        follower.send_signal(signal.SIGTERM)
        while follower.poll() is None:
            answer = next_round()
            assert time.monotonic() < deadline, group.last_words()
        assert follower.returncode == 0, group.last_words()
        answer = next_round()
        assert answer["mesh"] == "dp=2"
        assert (answer["changes"].get("leave"), answer["changes"].get("loss", 0)) == (1, 0)
        assert "This process leaves: process 0 is asked to go on without it." in group.output[1]
        assert "leaves, as it was told to end" in group.output[0]
        assert "has gone away" not in group.output[0]
        group.start_again(1)
        deadline = time.monotonic() + 200
        while (answer := next_round())["mesh"] != "dp=4":
            assert group.processes[1].poll() is None, group.last_words()
            assert time.monotonic() < deadline, group.last_words()
        assert answer["changes"]["return"] == 1
        assert next_round()["mesh"] == "dp=4"
        group.processes[0].stdin.close()
        assert group.codes(120) == [0, 0], group.last_words()
    finally:
        group.end()
