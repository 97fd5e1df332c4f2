"""Prefill and decode sides of several processes make one engine's tokens; pages go straight from process to process.
Also tests `elastic/joining.py`, `elastic/transfer_processes.py` and `transfer/page_chunks.py`."""

import json
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from drafting_checkpoint import write_drafting_checkpoint
from listening_sockets import all_loopback, listening_addresses
from processes import Processes, free_port
from quick_compilation import FEW_SHAPES
from side_process import run
from test_transports import EACH_BACKEND
from waits import until

from dsjax import LLM

pytestmark = pytest.mark.slow

OPTIONS = FEW_SHAPES | {"max_model_len": 64, "dtype": "float32"}
OF_SIDES = {"compile_ahead": 0, "heartbeat_timeout": 20, "local_prefill_tokens": 1}
OF_SIDES |= {"transfer_timeout": 120}  # steps compile at first use, on busy cores
PROMPTS = [np.random.default_rng(i).integers(2, 290, size=20 + 9 * i).tolist() for i in range(4)]


class Side(Processes):
    """The processes of one side, each of which runs `side_process.py`. Requests go to the first one."""

    def __init__(self, count: int, **options):
        script, self._heard = str(Path(__file__).with_name("side_process.py")), 0
        options |= {"coordinator_address": f"127.0.0.1:{free_port()}", "num_processes": count}
        each = [json.dumps({"transfer_host": "127.0.0.1", "process_id": index, **options}) for index in range(count)]
        super().__init__([[sys.executable, script, own] for own in each])

    def wait(self) -> "Side":
        """Wait until it serves."""
        self._answer()
        return self

    def ask(self, **request) -> dict:
        self.write(0, json.dumps(request) + "\n")
        return self._answer()

    def keeps_nothing(self) -> bool:
        kept = self.ask()
        return kept["jobs"] == kept["chunks"] == kept["pages"] == 0

    def close(self) -> list[int]:
        self.processes[0].stdin.close()
        return self.codes(240)

    def _answer(self) -> dict:
        answers = lambda: re.findall(r"^(\{.*\})\n", self.output[0], re.MULTILINE)  # noqa: E731
        until(lambda: len(answers()) > self._heard or self.processes[0].poll() is not None, 600, every=0.02)
        self._heard += 1
        assert len(answers()) == self._heard, self.last_words()
        return json.loads(answers()[-1])


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
def start(checkpoint):
    """Start a prefill and a decode side of three processes each, and wait until they serve."""
    sides = []

    def start(backend):
        given = OPTIONS | OF_SIDES | {"model": checkpoint, "disaggregation_transfer_backend": backend}
        sides.extend(Side(3, mesh="dp=3", disaggregation_mode=mode, **given) for mode in ("prefill", "decode"))
        return [side.wait() for side in sides]

    yield start
    for side in sides:
        side.end()


@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_tokens_are_those_of_one_engine_and_processes_that_leave_or_are_lost_cost_no_request_and_no_page(
    expected, start, backend
):
    prefill, decode = start(backend)

    def generate(between=lambda: None):
        said = [[str(index), tokens, prefill.ask(tokens=tokens)] for index, tokens in enumerate(PROMPTS)]
        between()
        return decode.ask(requests=said)["token_ids"]

    # Each prefill process keeps the chunks of its rank.
    assert generate() == expected
    if backend == "jax":  # NIXL's UCX listens at all addresses of this host
        for process in (*prefill.processes, *decode.processes):
            assert all_loopback(listening_addresses(process.pid))
    counts = decode.ask()
    assert (counts["completed"], counts["given_up"], counts["used"]) == (len(PROMPTS), 0, 0)
    until(prefill.keeps_nothing, every=0.05)
    for side in (prefill, decode):
        leaver, deadline = side.processes[2], time.monotonic() + 300
        assert generate(lambda leaver=leaver: leaver.send_signal(signal.SIGTERM)) == expected
        while leaver.poll() is None:
            assert generate() == expected
            assert time.monotonic() < deadline
        assert leaver.returncode == 0
        assert generate() == expected
        changes = side.ask()["changes"]
        assert (changes.get("leave"), changes.get("loss", 0)) == (1, 0)
    for mesh in ("tp=2", "dp=2"):  # with tp=2 each decode process pulls its copy of every chunk
        before = decode.ask(mesh=mesh)
        assert before["mesh"] == mesh
        assert generate() == expected
        after = decode.ask()
        assert after["completed"] == before["completed"] + len(PROMPTS), "those that have stayed send all"
    for side in (prefill, decode):
        assert generate(side.processes[1].kill) == expected  # the other one goes on alone
        assert generate() == expected
    last = decode.ask()
    assert (last["used"], last["under_way"], last["mesh"]) == (0, 0, "dp=1")
    assert last["completed"] >= after["completed"] + 2 * len(PROMPTS)
    until(prefill.keeps_nothing, every=0.05)
    codes = []
    assert generate(lambda: codes.append(prefill.close()[::2])) == expected, "decode computes what has not come"
    assert decode.ask()["completed"] == last["completed"]
    assert [*codes, decode.close()[::2]] == [[0, 0]] * 2
