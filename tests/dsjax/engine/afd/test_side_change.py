"""Another side of experts takes over on all attention processes between the same two commands, or on none."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "elastic"))
from held_processes import groups

from dsjax.engine.afd.attention_processes import AttentionProcesses
from dsjax.engine.afd.remote_experts import RemoteExperts
from dsjax.engine.afd.side_change import SideChanges
from dsjax.engine.contract.commands import ChangeExperts, PrepareExperts
from dsjax.engine.device.access import CommandTable
from sharding import MeshSpec

ROWS = np.arange(8).reshape(2, 4)
PROCESSES = 3


class Side(RemoteExperts):
    """A side without links. connecting, moving: what is done when it is connected to, and when experts are to be moved on it."""

    def __init__(self, connecting=lambda side: None, moving=lambda message: None):
        super().__init__(MeshSpec(dp_size=4), {}, [], [], waits=True, patience=1, silence=1)
        self._connecting, self._everywhere = connecting, moving
        self.closed = threading.Event()
        self.placement = ROWS

    def connect(self, *, known=False):
        self._connecting(self)

    def close(self):
        self.closed.set()
        super().close()


class Process:
    """One attention process, with the side of now, and the one that `another` gives."""

    def __init__(self, others, meet, another=Side):
        self.now, self.made = Side(), []
        self.now.others = others
        self.device = SimpleNamespace(model=SimpleNamespace(apart=self.now), programs=SimpleNamespace(of=lambda m: m))
        self.device.placements = SimpleNamespace(physical_to_logical=ROWS)
        self.device.go_on_with = lambda model, programs: setattr(self.device, "model", model)

        def make(expert_mesh, afd_address, model):
            self.made.append(another())
            return SimpleNamespace(apart=self.made[-1])

        self.part, self.table = SideChanges(self.device, make, meet), CommandTable()
        self.part.register(self.table)

    @property
    def side(self):
        return self.device.model.apart

    def carry_out(self, command):
        pending = self.table.launch(command)
        assert list(pending.running) == []
        return pending.handler.collect(pending)

    def prepare(self, number=1):
        return self.carry_out(PrepareExperts(number, "ep=4", "127.0.0.1:1"))


@pytest.fixture
def group():
    """Three processes with attention as threads, made by `make`, one `another` side for each."""
    made = []
    with ThreadPoolExecutor(PROCESSES) as pool:
        own = groups(PROCESSES)
        others = list(pool.map(AttentionProcesses, own))

        def make(*another):
            meets = [one.agreement.run if one.is_leader else one.agreement.report for one in own]
            made.extend(map(Process, others, meets, another))
            return made

        def all_do(act):
            return list(pool.map(act, made))

        def prepare(number=1):
            for done in all_do(lambda process: process.prepare(number)):
                assert done.result(20) is None

        yield SimpleNamespace(make=make, all_do=all_do, prepare=prepare, others=others)
        for process in made:
            process.part.close()
        for one in others:
            one.close()


def meet(process):
    """A layer's wait, on whichever side it is now."""
    process.side.tell(1)
    return process.side.agree(1)


def test_all_go_on_with_the_new_side_which_waits_for_the_others_as_the_old_one_did(group):
    """Process 0 alone has the new side follow experts that have moved since the first command."""
    told = [[] for _ in range(PROCESSES)]
    processes = group.make(*(lambda heard=heard: Side(moving=heard.append) for heard in told))
    group.prepare()
    assert [process.side for process in processes] == [process.now for process in processes], "not yet"
    moved = np.stack([ROWS[0], ROWS[1][::-1]])
    for process in processes:
        process.device.placements = SimpleNamespace(physical_to_logical=moved)
    assert group.all_do(lambda process: process.carry_out(ChangeExperts(1, True))) == [None] * PROCESSES
    for process in processes:
        assert process.side is process.made[0]
        assert process.now.closed.is_set()
        assert not process.side.closed.is_set()
        np.testing.assert_array_equal(process.side.placement, moved)
    assert [[message.row for message in heard] for heard in told] == [[1], [], []]
    assert group.all_do(meet) == [1] * PROCESSES


def fail(message):
    raise RuntimeError("it has gone")


@pytest.mark.parametrize("who", range(PROCESSES))
def test_where_one_cannot_go_on_all_stay_and_say_why(group, who):
    """Experts have moved meanwhile, which process 0 has the new side follow; the others have lost what they had prepared."""
    sides = [Side] * PROCESSES
    if who == 0:
        sides[0] = lambda: Side(moving=fail)
    processes = group.make(*sides)
    group.prepare()
    for process in processes:
        process.device.placements = SimpleNamespace(physical_to_logical=np.roll(ROWS, 1, axis=1))
    if who:
        processes[who].part._prepared = None
    errors = group.all_do(lambda process: process.carry_out(ChangeExperts(1, True)))
    said = "RuntimeError: it has gone" if who == 0 else "RuntimeError: this process has not prepared it"
    expected = ["another process with attention could not"] * PROCESSES
    expected[who] = said
    assert errors == expected
    for process in processes:
        assert process.side is process.now
        assert process.made[0].closed.is_set()
        assert not process.now.closed.is_set()
    assert group.all_do(meet) == [1] * PROCESSES
    group.prepare(2)  # and another change can be made


def test_one_that_cannot_prepare_is_heard_of_by_process_0_and_the_side_is_dropped(group):
    def refused(side):
        raise ValueError("it has other options")

    group.make(Side, lambda: Side(refused), Side)
    leads, _, third = group.all_do(lambda process: process.prepare())
    with pytest.raises(ValueError, match=r"process 1 \(host, pid 11\): it has other options"):
        leads.result(20)
    third.result(20)
    assert group.all_do(lambda process: process.carry_out(ChangeExperts(1, False))) == [None] * PROCESSES
    for process in group.make():
        assert process.side is process.now
        assert process.made[0].closed.is_set()
    assert group.all_do(meet) == [1] * PROCESSES


def test_an_attention_process_that_has_gone_ends_the_generation_and_leaves_no_link(group):
    processes = group.make(*[Side] * PROCESSES)
    group.prepare()
    group.others[2].close()

    def change(process):
        with pytest.raises(RuntimeError, match="process 2 of the attention side was waited for"):
            process.carry_out(ChangeExperts(1, True))

    group.all_do(lambda process: None if process is processes[2] else change(process))
    for process in processes[:2]:
        assert process.side is process.now
        assert process.made[0].closed.is_set()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_loss_in_the_moment_of_the_change_ends_what_waits_on_the_new_side(when):
    process = Process(None, lambda name, act: act())
    process.prepare().result(20)
    go_on = process.device.go_on_with

    def lost(model, programs):
        if when == "after":
            go_on(model, programs)
        process.part.abandon()
        go_on(model, programs)

    process.device.go_on_with = lost
    assert process.carry_out(ChangeExperts(1, True)) is None
    assert process.side is process.made[0]
    assert process.side._is_abandoned
    process.part.close()


@pytest.mark.parametrize("end", ["drop", "close"])
def test_a_change_that_is_given_up_while_it_connects_ends_and_closes_its_side(end):
    connecting = threading.Event()

    def wait(side):
        connecting.set()
        assert side.closed.wait(20)

    process = Process(None, lambda name, act: act(), lambda: Side(wait))
    done = process.prepare()
    assert connecting.wait(20)
    if end == "drop":
        process.carry_out(ChangeExperts(1, False))
    else:
        process.part.close()
    with pytest.raises(RuntimeError, match="given up meanwhile"):
        done.result(20)
    assert process.side is process.now
    assert process.now.closed.is_set() == (end == "close")
    process.part.close()
