"""An attention side of several processes, with experts in processes of their own: its tokens are those of one device.

The attention processes are real ones with two devices each. The expert processes are objects in this process, so that a test can
close one in the middle of a layer, when one attention process has its answer and the other has not.
"""

import itertools
import json
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

HEARTBEAT = 5
"""Seconds after which a collective fails that a process has not joined."""
BEGINNING = '{"mesh"'
"""How the line begins that process 0 prints for all prompts."""


class Deployment:
    """Two attention processes, and two with experts, which share the expert devices. options: of all."""

    def __init__(self, **options):
        addresses = ",".join(f"127.0.0.1:{free_port()}" for _ in range(2))
        self.options = options | {"expert_mesh": "ep=4", "afd_address": addresses}
        self.experts = [self.start_experts(rank) for rank in range(2)]
        given = json.dumps(self.options | {"afd_role": "attention"})
        command = ["tests/dsjax/hosts/llm_process.py", "--options", given]
        self.group = Group(command, 2, heartbeat=HEARTBEAT, timeout=240, stuck=240)
        self.lines = 0

    def start_experts(self, rank: int):
        return load_experts(EngineArgs(**self.options, afd_role="expert", afd_server_rank=rank))

    def ask(self) -> None:
        self.group.write(0, "go\n")

    def answer(self) -> dict:
        self.lines += 1
        self.group.wait_for(0, BEGINNING, 900, times=self.lines)
        return json.JSONDecoder().raw_decode(BEGINNING + self.group.output[0].split(BEGINNING)[self.lines])[0]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.group.end()
        for process in self.experts:
            process.close()


def go_between(deployment: Deployment, layers: int) -> None:
    """Have all prompts generated, and a process with experts go when it has answered one of the two calls for the layer after `layers`."""
    process, gone = deployment.experts[-1], threading.Event()
    original, replies = process._reply, itertools.count(1)

    def reply(*answered):
        if gone.is_set():
            return
        original(*answered)
        if next(replies) > 2 * layers:
            gone.set()
            process.close()

    process._reply = reply
    deployment.ask()
    assert gone.wait(240), deployment.group.last_words()


def test_two_attention_processes_overlap_batches_experts_move_for_both_and_both_wait_for_experts_that_have_gone(
    tmp_path,
):
    """When one has its answer, for longer than a collective waits for a process, on a mesh with a collective of both in each layer."""
    options = SEVERAL_ROWS | {
        "model": str(write_checkpoint(tmp_path)),
        "attention_mesh": "tp=4",
        "enable_dbo": True,
        "dbo_decode_token_threshold": 2,
        "dbo_prefill_token_threshold": 4,
        "enable_eplb": True,
        "eplb_config": {"num_redundant_experts": 4, "window_size": 4, "step_interval": 4, "payback": 0},
    }
    alone = generate_alone(options["model"], **FEW_SHAPES)
    with Deployment(**options) as deployment:
        before = [process._writer.rows.copy() for process in deployment.experts]
        deployment.group.wait_for(0, "ready", 240)
        for _ in range(3):  # all but the first time in part from pages of the cache
            deployment.ask()
            answer = deployment.answer()
            assert answer["tokens"] == alone
        assert answer["rebalances"] > 0
        assert answer["failures"] == 0
        for process, rows in zip(deployment.experts, before, strict=True):
            assert (process._writer.rows != rows).any()
            assert process.num_rows > 0
            assert process.num_calls == 2 * process.num_products, "one program computes what both ask for at a layer"
        go_between(deployment, 4)
        time.sleep(HEARTBEAT + 2)
        deployment.experts.append(deployment.start_experts(1))
        assert deployment.answer()["tokens"] == alone
        assert "the call is made again" in "".join(deployment.group.output)
        assert "Generation" not in deployment.group.output[0]
        deployment.group.processes[0].stdin.close()
        assert deployment.group.codes(120) == [0, 0], deployment.group.last_words()
