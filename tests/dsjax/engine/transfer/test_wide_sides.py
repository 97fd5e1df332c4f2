"""A prefill and a decode side, each of two processes, make the tokens of one engine; pages go straight from process to process.

These are the tests of `elastic/joining.py`, `elastic/transfer_processes.py` and `transfer/page_chunks.py` too.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from drafting_checkpoint import write_drafting_checkpoint
from processes import free_port
from quick_compilation import QUICK_COMPILATION
from side_process import run
from transports import EACH_BACKEND

from dsjax import LLM

pytestmark = pytest.mark.slow

OPTIONS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "prefill_chunk": 16,
    "page_size": 4,
    "max_model_len": 96,
    "dtype": "float32",
    "transfer_timeout": 120,  # steps compile at first use, on busy cores
    "compile_ahead": 0,
}


class Side:
    """The processes of one side, each with one device."""

    def __init__(self, count, **options):
        port = free_port()
        environment = os.environ | {
            "PYTHONPATH": str(Path(__file__).parents[4]),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": " ".join(QUICK_COMPILATION),
        }
        environment.pop("PJRT_NPROC", None)
        self.processes = []
        for index in range(count):
            group = {"coordinator_address": f"127.0.0.1:{port}", "num_processes": count, "process_id": index}
            group = group if count > 1 else {}
            shared_options = {
                **OPTIONS,
                "transfer_host": "127.0.0.1",
                "heartbeat_timeout": 20,
                "local_prefill_tokens": 1,
            }
            self.processes.append(
                subprocess.Popen(
                    [
                        sys.executable,
                        str(Path(__file__).with_name("side_process.py")),
                        json.dumps({**shared_options, **group, **options}),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=environment,
                )
            )

    def answer(self):
        while True:
            line = self.processes[0].stdout.readline()
            assert line, "process 0 has ended"
            if line.startswith("{"):
                return json.loads(line)

    def ask(self, **request):
        self.processes[0].stdin.write(json.dumps(request) + "\n")
        self.processes[0].stdin.flush()
        return self.answer()

    def is_empty(self):
        """Whether a prefill side comes to keep nothing."""
        for _ in range(200):
            kept = self.ask()
            if kept["jobs"] == kept["chunks"] == kept["pages"] == 0:
                return True
            time.sleep(0.05)
        return kept

    def end(self):
        """Exit codes."""
        self.processes[0].stdin.close()
        return [process.wait(30) for process in self.processes]

    def kill(self):
        for process in self.processes:
            process.kill()
            process.wait()


PROMPTS = [np.random.default_rng(i).integers(2, 290, size=20 + 9 * i).tolist() for i in range(6)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("wide")
    write_drafting_checkpoint(directory)
    return str(directory)


@pytest.fixture(scope="module")
def expected(checkpoint):
    llm = LLM(checkpoint, mesh="dp=1", **OPTIONS)
    yield run(llm, [(str(index), tokens, None) for index, tokens in enumerate(PROMPTS)])
    llm.shutdown()


@pytest.fixture
def sides(checkpoint):
    """Starts a prefill and a decode side; gives both, and what has all prompts computed by the one and decoded by the other."""
    sides = []

    def start(prefill, prefill_mesh, decode, decode_mesh, backend="jax"):
        shared_options = {"model": checkpoint, "disaggregation_transfer_backend": backend}
        sides.append(Side(prefill, mesh=prefill_mesh, disaggregation_mode="prefill", **shared_options))
        sides.append(Side(decode, mesh=decode_mesh, disaggregation_mode="decode", **shared_options))
        for side in sides:
            side.answer()
        return *sides, generate

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
    prefill, decode, generate = sides(2, "dp=2", 2, "tp=2", backend)
    # Each prefill process keeps the chunks of its rank, and each decode process pulls its copy of them.
    assert generate() == expected
    counts = decode.ask()
    assert (counts["completed"], counts["given_up"], counts["used"]) == (6, 0, 0)
    assert prefill.is_empty() is True
    assert generate(prefill.processes[1].kill) == expected  # the other one goes on alone
    assert generate() == expected
    after = decode.ask()
    assert after["used"] == after["under_way"] == 0
    assert after["completed"] >= counts["completed"] + 6
    assert decode.end() == [0, 0]


def test_a_lost_decode_process_costs_no_request_and_no_page(expected, sides):
    prefill, decode, generate = sides(1, "tp=1", 2, "dp=2")
    assert generate() == expected
    counts = decode.ask()
    assert (counts["completed"], counts["given_up"], counts["used"]) == (6, 0, 0)
    assert generate(decode.processes[1].kill) == expected
    assert generate() == expected
    after = decode.ask()
    assert (after["used"], after["under_way"], after["mesh"]) == (0, 0, "dp=1")
    assert after["completed"] >= counts["completed"] + 6
    assert prefill.is_empty() is True


def test_a_process_of_either_side_that_is_told_to_end_leaves_in_order_and_costs_no_request(expected, sides):
    prefill, decode, generate = sides(2, "dp=2", 2, "dp=2")
    assert generate() == expected
    for side in (prefill, decode):
        leaver, deadline = side.processes[1], time.monotonic() + 120
        assert generate(lambda leaver=leaver: leaver.send_signal(signal.SIGTERM)) == expected
        while leaver.poll() is None:
            assert generate() == expected
            assert time.monotonic() < deadline
        assert leaver.returncode == 0
        assert generate() == expected
        changes = side.ask()["changes"]
        assert (changes.get("leave"), changes.get("loss", 0)) == (1, 0)
    before = decode.ask()["completed"]
    assert generate() == expected
    after = decode.ask()
    assert after["completed"] == before + len(PROMPTS), "pages come from the prefill process that has stayed"
    assert (after["used"], after["under_way"], after["mesh"]) == (0, 0, "dp=1")
    assert prefill.is_empty() is True
    assert prefill.end() == [0, 0]
    assert decode.end() == [0, 0]
