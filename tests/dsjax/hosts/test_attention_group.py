"""An attention side of several processes, with experts in processes of their own: its tokens are those of one device.

The attention processes are real ones with two devices each. The expert processes are objects in this process, so that a test can
close one in the middle of a layer, when one attention process has its answer and the other has not.
"""

import itertools
import json
import signal
import threading
import time

import pytest
from layouts import write_checkpoint
from llm_process import generate_alone
from processes import Group, free_port
from quick_compilation import FEW_SHAPES, SEVERAL_ROWS

from dsjax.engine.expert_process import load_experts
from dsjax.engine.setup.args import EngineArgs

pytestmark = pytest.mark.slow

DRAFTS = {"method": "mtp", "num_speculative_tokens": 1}
HEARTBEAT = 5
"""Seconds after which a collective fails that a process has not joined."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("attention"), mtp=True)


@pytest.fixture(scope="module")
def alone(checkpoint):
    return generate_alone(str(checkpoint), **FEW_SHAPES)


class Deployment:
    """Two attention processes, and processes with experts, which share the expert devices.

    Args:
        mesh: of the attention side. processes: the number of processes with experts. options: further options of all processes.
    """

    def __init__(self, checkpoint, mesh: str, processes: int = 1, **options):
        addresses = ",".join(f"127.0.0.1:{free_port()}" for _ in range(processes))
        sides = {"attention_mesh": mesh, "expert_mesh": "ep=4", "afd_address": addresses}
        self.options = FEW_SHAPES | {"speculative_config": DRAFTS} | sides | options
        self.options["model"] = str(checkpoint)
        self.several = processes > 1
        self.experts = [self.start_experts(rank) for rank in range(processes)]
        given = json.dumps(self.options | {"afd_role": "attention"})
        self.group = Group(
            ["tests/dsjax/hosts/llm_process.py", "--options", given], 2, heartbeat=HEARTBEAT, timeout=240, stuck=240
        )
        self.lines = 0

    def start_experts(self, rank: int):
        own = {"afd_server_rank": rank} if self.several else {}
        return load_experts(EngineArgs(**self.options, afd_role="expert", **own))

    def ask(self) -> None:
        """Have all prompts generated."""
        self.group.write(0, "go\n")

    def answer(self) -> dict:
        """What process 0 then prints."""
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


def go_between(deployment: Deployment, layers: int) -> None:
    """Have all prompts generated, and a process with experts go when it has answered one of the two calls for the layer after `layers`."""
    process, gone = deployment.experts[-1], threading.Event()
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
    deployment.ask()
    assert gone.wait(240), deployment.group.last_words()


def check_tokens(deployment: Deployment, alone: list[list[int]]) -> None:
    """Generate all prompts twice, the second time in part from pages of the cache: both times the tokens of one device."""
    deployment.group.wait_for(0, "ready", 240)
    expected = {"tokens": alone, "mesh": deployment.options["attention_mesh"], "changes": {}}
    for _ in range(2):
        deployment.ask()
        assert deployment.answer().items() >= expected.items()
    for process in deployment.experts:
        assert process.num_rows > 0
        assert process.num_calls == 2 * process.num_products, "one program computes what both ask for at a layer"


@pytest.mark.parametrize(("mesh", "processes", "layers"), [("tp=4", 2, 4), ("dp=4", 1, 5)])
def test_experts_that_go_when_one_attention_process_has_its_answer_are_waited_for_by_both(
    checkpoint, alone, mesh, processes, layers
):
    """For longer than a collective waits for a process; and on dp=4 an attention process that is killed meanwhile costs no token."""
    with Deployment(checkpoint, mesh, processes) as deployment:
        check_tokens(deployment, alone)
        go_between(deployment, layers)
        time.sleep(HEARTBEAT + 2)
        deployment.experts.append(deployment.start_experts(processes - 1))
        assert deployment.answer() == {"tokens": alone, "mesh": mesh, "changes": {}}
        assert "the call is made again" in "".join(deployment.group.output)
        if mesh != "dp=4":
            deployment.end()
            return
        go_between(deployment, 4)
        deployment.group.processes[1].kill()
        deployment.group.wait_for(0, "Generation 1 begins")
        deployment.experts.append(deployment.start_experts(0))
        assert deployment.answer() == {"tokens": alone, "mesh": "dp=2", "changes": {"loss": 1}}
        deployment.ask()
        assert deployment.answer()["tokens"] == alone
        deployment.end((0, -signal.SIGKILL))


def test_two_attention_processes_overlap_two_batches_experts_move_for_both_and_one_may_leave(checkpoint, alone):
    overlap = {"enable_dbo": True, "dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 4}
    balanced = {"num_redundant_experts": 4, "window_size": 4, "step_interval": 4, "payback": 0}
    options = SEVERAL_ROWS | overlap | {"enable_eplb": True, "eplb_config": balanced}
    with Deployment(checkpoint, "dp=2,tp=2", 2, **options) as deployment:
        deployment.group.wait_for(0, "ready", 240)
        before = [process._writer.rows.copy() for process in deployment.experts]
        check_tokens(deployment, alone)
        deployment.ask()
        answer = deployment.answer()
        assert answer["tokens"] == alone
        assert answer["rebalances"] > 0
        assert answer["failures"] == 0
        assert all(
            (process._writer.rows != rows).any() for process, rows in zip(deployment.experts, before, strict=True)
        )
        follower = deployment.group.processes[1]
        follower.send_signal(signal.SIGTERM)
        while follower.poll() is None:  # it leaves while a prompt is generated
            deployment.ask()
            assert deployment.answer()["tokens"] == alone
        deployment.ask()
        answer = deployment.answer()
        assert (answer["tokens"], answer["changes"]) == (alone, {"leave": 1})
        assert "leaves, as it was told to end" in deployment.group.output[0]
        deployment.end()
