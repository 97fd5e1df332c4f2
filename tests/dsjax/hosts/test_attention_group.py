"""An attention side of several processes, with experts in processes of their own: its tokens are those of one device.

The attention side's processes are real ones of two devices each. The experts' are in this process, so that they can be made to go in the
midst of a layer, when one attention process has its answer and another has not.
"""

import itertools
import json
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from layouts import write_checkpoint
from llm_process import generate_alone
from processes import Group, free_port

from dsjax.engine.expert_process import load_experts
from dsjax.engine.setup.args import EngineArgs

pytestmark = pytest.mark.slow

SIZES = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "prefill_chunk": 16,
    "page_size": 4,
    "max_model_len": 48,
    "mla_prefill": "A_CC_ME",
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
}
HEARTBEAT = 12
"""Seconds after which a collective that a process does not join fails, where a test waits for longer."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("attention"), mtp=True, first_k_dense_replace=0)


@pytest.fixture(scope="module")
def alone(checkpoint):
    return generate_alone(str(checkpoint), **SIZES)


class Deployment:
    """Two attention processes, and processes with experts, which share the expert devices.

    Args:
        mesh: of the attention side. processes: with experts. heartbeat: of the attention side's group. options: of all.
    """

    def __init__(self, checkpoint, mesh: str, processes: int = 1, heartbeat: int = 30, **options):
        addresses = ",".join(f"127.0.0.1:{free_port()}" for _ in range(processes))
        self.options = {"attention_mesh": mesh, "expert_mesh": "ep=4", "afd_address": addresses, **SIZES, **options}
        self.options["model"] = str(checkpoint)
        self.several = processes > 1
        self.experts = [self.start_experts(rank) for rank in range(processes)]
        given = json.dumps(self.options | {"afd_role": "attention"})
        self.group = Group(
            ["tests/dsjax/hosts/llm_process.py", "--options", given], 2, heartbeat=heartbeat, timeout=240, stuck=240
        )
        self.lines = 0

    def start_experts(self, rank: int):
        own = {"afd_server_rank": rank} if self.several else {}
        return load_experts(EngineArgs(**self.options, afd_role="expert", **own))

    def ready(self) -> None:
        self.group.wait_for(0, "ready", 240)

    def ask(self) -> None:
        """Have all prompts generated."""
        self.group.write(0, "go\n")

    def answer(self) -> dict:
        """What came of it."""
        self.lines += 1
        self.group.wait_for(0, '{"tokens"', 900, times=self.lines)
        deadline = time.monotonic() + 60
        while True:
            lines = [line for line in self.group.output[0].splitlines() if line.startswith('{"tokens"')]
            if lines[self.lines - 1].endswith("}"):
                return json.loads(lines[self.lines - 1])
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def end(self, codes=(0, 0)) -> None:
        self.group.processes[0].stdin.close()
        assert self.group.codes(120) == list(codes), self.group.last_words()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.group.end()
        for process in self.experts:
            process.close()


def go_between(process, layers: int, gone: threading.Event):
    """Have a process with experts go when, after so many layers, it has answered one of the two calls for the next."""
    original, turn, replies = process._reply, threading.Lock(), itertools.count(1)

    def reply(channel, answers):
        with turn:
            if gone.is_set():
                return
            original(channel, answers)
            if next(replies) > 2 * layers:
                gone.set()
                process.close()

    process._reply = reply


@pytest.mark.parametrize(
    ("mesh", "processes", "options"),
    [
        ("dp=4", 1, {}),
        ("tp=4", 2, {}),
        ("dp=2,tp=2", 2, {"enable_dbo": True, "dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 4}),
    ],
)
def test_two_attention_processes_make_the_tokens_of_one_device(checkpoint, alone, mesh, processes, options):
    with Deployment(checkpoint, mesh, processes, **options) as deployment:
        deployment.ready()
        for _ in range(2):  # the second time in part from pages of the cache
            deployment.ask()
            assert deployment.answer() == {"tokens": alone, "mesh": mesh, "changes": {}}
        rows = [process.num_rows for process in deployment.experts]
        assert all(rows), rows
        for process in deployment.experts:
            assert process.num_calls == 2 * process.num_products, "what both ask for at a layer is one program's work"
        deployment.end()


@pytest.mark.parametrize("mesh", ["tp=4", "dp=4"])
def test_experts_that_go_when_one_attention_process_has_its_answer_are_waited_for_by_both(checkpoint, alone, mesh):
    """For longer than a collective waits for a process that does not join it."""
    with Deployment(checkpoint, mesh, heartbeat=HEARTBEAT) as deployment:
        deployment.ready()
        deployment.ask()
        assert deployment.answer()["tokens"] == alone
        for layers in (4, 5):
            gone = threading.Event()
            go_between(deployment.experts[-1], layers, gone)
            deployment.ask()
            assert gone.wait(240), deployment.group.last_words()
            time.sleep(HEARTBEAT + 2)
            deployment.experts.append(deployment.start_experts(0))
            assert deployment.answer() == {"tokens": alone, "mesh": mesh, "changes": {}}
            assert "the call is made again" in "".join(deployment.group.output)
        deployment.end()


def test_experts_move_for_all_attention_processes_at_once(checkpoint, alone):
    balanced = {"num_redundant_experts": 4, "window_size": 4, "step_interval": 4, "payback": 0}
    with Deployment(checkpoint, "dp=4", 2, enable_eplb=True, eplb_config=balanced) as deployment:
        deployment.ready()
        before = [process._writer.rows.copy() for process in deployment.experts]
        for _ in range(3):
            deployment.ask()
            answer = deployment.answer()
            assert answer["tokens"] == alone
        assert answer["rebalances"]
        assert answer["failures"] == 0
        assert all(
            (process._writer.rows != rows).any() for process, rows in zip(deployment.experts, before, strict=True)
        )
        deployment.end()


def test_an_attention_process_that_is_lost_while_all_wait_for_experts_costs_no_token(checkpoint, alone):
    with Deployment(checkpoint, "dp=4") as deployment:
        deployment.ready()
        deployment.ask()
        assert deployment.answer()["tokens"] == alone
        gone = threading.Event()
        go_between(deployment.experts[-1], 4, gone)
        deployment.ask()
        assert gone.wait(240), deployment.group.last_words()
        deployment.group.processes[1].kill()
        deployment.group.wait_for(0, "Generation 1 begins")
        deployment.experts.append(deployment.start_experts(0))
        assert deployment.answer() == {"tokens": alone, "mesh": "dp=2", "changes": {"loss": 1}}
        deployment.ask()
        assert deployment.answer()["tokens"] == alone
        deployment.end((0, -signal.SIGKILL))
