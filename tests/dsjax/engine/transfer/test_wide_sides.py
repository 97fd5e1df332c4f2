"""A prefill and a decode side of several processes make the tokens of one engine; pages go straight from process to process.

These are the tests of `elastic/joining.py`, `elastic/transfer_processes.py` and `transfer/page_chunks.py` too.
"""

import signal
import time

import numpy as np
import pytest
from drafting_checkpoint import write_drafting_checkpoint
from side_process import run
from sides import Side
from transports import EACH_BACKEND

from dsjax import LLM

pytestmark = pytest.mark.slow

OPTIONS = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 16,
    "prefill_chunk": 16,
    "page_size": 4,
    "max_model_len": 96,
    "dtype": "float32",
}
OF_SIDES = {
    "transfer_timeout": 120,  # steps compile at first use, on busy cores
    "compile_ahead": 0,
    "heartbeat_timeout": 20,
    "local_prefill_tokens": 1,
}
PROMPTS = [np.random.default_rng(i).integers(2, 290, size=20 + 9 * i).tolist() for i in range(6)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    # So many experts that one, two and three devices share them alike.
    return str(write_drafting_checkpoint(tmp_path_factory.mktemp("wide"), n_routed_experts=24))


@pytest.fixture(scope="module")
def expected(checkpoint):
    llm = LLM(checkpoint, mesh="dp=1", **OPTIONS)
    yield run(llm, [(str(index), tokens, None) for index, tokens in enumerate(PROMPTS)])
    llm.shutdown()


@pytest.fixture
def sides(checkpoint):
    """Start a prefill and a decode side; give both, and what has all prompts computed by the one and decoded by the other."""
    sides = []

    def start(prefill, decode, prefill_mesh, decode_mesh, backend="jax"):
        given = OPTIONS | OF_SIDES | {"model": checkpoint, "disaggregation_transfer_backend": backend}
        sides.append(Side(prefill, mesh=prefill_mesh, disaggregation_mode="prefill", **given))
        sides.append(Side(decode, mesh=decode_mesh, disaggregation_mode="decode", **given))
        return *(side.wait() for side in sides), generate

    def generate(between=lambda: None):
        said = [[str(index), tokens, sides[0].ask(tokens=tokens)] for index, tokens in enumerate(PROMPTS)]
        between()
        return sides[1].ask(requests=said)["token_ids"]

    yield start
    for side in sides:
        side.kill()


@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_tokens_are_those_of_one_engine_and_a_lost_prefill_process_costs_no_request_and_no_page(
    expected, sides, backend
):
    prefill, decode, generate = sides(2, 2, "dp=2", "tp=2", backend)
    # Each prefill process keeps the chunks of its rank, and each decode process pulls its copy of them.
    assert generate() == expected
    counts = decode.ask()
    assert (counts["completed"], counts["given_up"], counts["used"]) == (len(PROMPTS), 0, 0)
    assert prefill.is_empty() is True
    assert generate(prefill.processes[1].kill) == expected  # the other one goes on alone
    assert generate() == expected
    after = decode.ask()
    assert after["used"] == after["under_way"] == 0
    assert after["completed"] >= counts["completed"] + len(PROMPTS)
    assert decode.end() == [0, 0]


def test_processes_that_are_told_to_end_leave_in_order_and_neither_they_nor_a_lost_decode_process_cost_a_request(
    expected, sides
):
    prefill, decode, generate = sides(2, 3, "dp=2", "dp=3")
    assert generate() == expected
    for side, leaver in ((prefill, prefill.processes[1]), (decode, decode.processes[2])):
        deadline = time.monotonic() + 120
        assert generate(lambda leaver=leaver: leaver.send_signal(signal.SIGTERM)) == expected
        while leaver.poll() is None:
            assert generate() == expected
            assert time.monotonic() < deadline
        assert leaver.returncode == 0
        assert generate() == expected
        changes = side.ask()["changes"]
        assert (changes.get("leave"), changes.get("loss", 0)) == (1, 0)
    before = decode.ask()
    assert before["mesh"] == "dp=2"
    assert generate() == expected
    after = decode.ask()
    assert after["completed"] == before["completed"] + len(PROMPTS), "the prefill process that has stayed sends all"
    assert generate(decode.processes[1].kill) == expected
    assert generate() == expected
    last = decode.ask()
    assert (last["used"], last["under_way"], last["mesh"]) == (0, 0, "dp=1")
    assert last["completed"] >= after["completed"] + len(PROMPTS)
    assert prefill.is_empty() is True
    assert prefill.end() == [0, 0]
