"""`RemoteExpertsPart` in `afd/remote_experts.py`: all attention processes go on with other expert processes, or none does."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from test_attention_processes import meet, several

from dsjax.engine.afd.attention_processes import AttentionProcesses
from dsjax.engine.afd.remote_experts import RemoteExperts, RemoteExpertsPart
from dsjax.engine.contract.commands import ConnectExperts
from dsjax.engine.device.access import CommandTable, Pending
from dsjax.errors import UserError
from sharding import MeshSpec

ROWS = np.arange(8).reshape(2, 4)
PROCESSES = 3


class Side(RemoteExperts):
    """An expert side without links. connecting: replaces its connection."""

    def __init__(self, attention, connecting=lambda side: None):
        super().__init__(MeshSpec(dp_size=4), [], attention, {}, ROWS, waits=True, patience=1)
        self._connecting = connecting
        self.closed = threading.Event()

    def connect(self, *, known=False):
        self._connecting(self)

    def close(self):
        self.closed.set()
        super().close()


class Process:
    """One attention process. another: makes the side that the command connects to."""

    def __init__(self, attention, another=Side, number=0):
        self.now, self.made, self.number = Side(attention), [], number
        with_experts = lambda model, experts: SimpleNamespace(experts=experts)  # noqa: E731
        programs = SimpleNamespace(experts=self.now, with_experts=with_experts)
        self.device = SimpleNamespace(model="model", programs=programs)
        self.device.replace_programs = lambda model, programs: setattr(self.device, "programs", programs)

        def make(command, device, before):
            self.made.append(another(before.attention))
            return device.model, self.made[-1]

        self.part, self.table = RemoteExpertsPart(self.device, make), CommandTable()
        self.part.register(self.table)

    @property
    def side(self):
        return self.device.programs.experts

    def change(self):
        command, handler = ConnectExperts("ep=4", "127.0.0.1:1"), self.table[ConnectExperts]
        pending = Pending(command, handler)
        assert list(handler.execute(pending, command)) == []
        return handler.collect(pending)

    def stays(self):
        return self.side is self.now and not self.now.closed.is_set() and self.made[-1].closed.is_set()


@pytest.fixture
def group():
    """Three attention processes as threads. `make` takes the `another` of each."""
    made = []
    with ThreadPoolExecutor(PROCESSES) as pool, several(pool, PROCESSES) as others:

        def make(*another):
            made.extend(map(Process, others, another, range(PROCESSES)))
            return made

        yield SimpleNamespace(make=make, all_do=lambda act: list(pool.map(act, made)), others=others)
        for process in made:
            process.part.close()


def meet_at_a_layer(process):
    """On the current side: the greatest number of all processes."""
    return meet(process.side.attention, process.number)


def test_all_continue_with_the_new_side_which_waits_for_the_others_as_the_old_one_did(group):
    processes = group.make(*[Side] * PROCESSES)
    assert group.all_do(Process.change) == [None] * PROCESSES
    for process in processes:
        assert process.side is process.made[0]
        assert process.now.closed.is_set()
        assert not process.side.closed.is_set()
    assert group.all_do(meet_at_a_layer) == [PROCESSES - 1] * PROCESSES


@pytest.mark.parametrize("who", range(PROCESSES))
@pytest.mark.parametrize(
    ("failure", "said"),
    [(UserError("it has other options"), "it has other options"), (RuntimeError("gone"), "RuntimeError: gone")],
)
def test_if_one_cannot_connect_all_stay_and_say_why_and_another_change_can_be_made(group, who, failure, said):
    sides, expected = [Side] * PROCESSES, ["another attention process could not connect to them"] * PROCESSES
    sides[who], expected[who] = partial(Side, connecting=Mock(side_effect=[failure, None])), said
    processes = group.make(*sides)
    assert group.all_do(Process.change) == expected
    assert all(map(Process.stays, processes))
    assert group.all_do(meet_at_a_layer) == [PROCESSES - 1] * PROCESSES
    assert group.all_do(Process.change) == [None] * PROCESSES
    assert group.all_do(meet_at_a_layer) == [PROCESSES - 1] * PROCESSES


def test_an_attention_process_that_is_gone_fails_the_change_and_leaves_no_link(group):
    processes = group.make(*[Side] * PROCESSES)
    group.others[2].close()

    def change(process):
        with pytest.raises(RuntimeError, match="process 2 of the attention side was waited for"):
            process.change()

    group.all_do(lambda process: None if process is processes[2] else change(process))
    assert all(map(Process.stays, processes[:2]))


def test_a_loss_while_it_connects_ends_the_wait():
    connecting, abandoned = threading.Event(), threading.Event()
    attention = AttentionProcesses(SimpleNamespace(), b"side")

    def wait(side):
        attention.add(Mock(give_up=abandoned.set))
        connecting.set()
        assert abandoned.wait(60)
        raise RuntimeError("the link is closed")

    process = Process(attention, partial(Side, connecting=wait))
    with ThreadPoolExecutor(1) as pool:
        changed = pool.submit(process.change)
        assert connecting.wait(60)
        attention.abandon()
        assert changed.result(60) == "RuntimeError: the link is closed"
    assert process.stays()


def test_what_is_connected_after_a_loss_does_not_wait():
    attention, link = AttentionProcesses(SimpleNamespace(), b"side"), Mock()
    attention.abandon()
    attention.add(link)
    link.give_up.assert_called_once_with()
