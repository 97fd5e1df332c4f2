"""A follower goes from generation to generation, stands by in one without it, and ends with the reason where it is left out."""

import contextlib
import gc
import os
import queue
import re
import signal
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock

import msgspec
import pytest
from group_in_threads import Group, Told, groups, step
from waits import until

from dsjax.engine.elastic import generations as generations_module
from dsjax.engine.elastic.follower import Follower
from dsjax.engine.elastic.generations import Generations
from dsjax.engine.elastic.mesh_change import NoMeshError
from dsjax.engine.stream.leader import LeaderExecutor
from dsjax.hosts.group import GroupError
from dsjax.hosts.wire import Announcement
from dsjax.messaging import RefusedError


@pytest.fixture
def group():
    """A group whose process 1 has loaded the first generation and waits for commands."""
    group = Group()
    until(lambda: group.follower.phase == "warming up")
    return group


def tell(group, number):
    """Have process 0 launch a step in the generation of now."""
    LeaderExecutor(Told(), group.leader).launch(step(number))


def test_a_follower_goes_from_generation_to_generation_and_stands_by_in_one_without_it(group):
    tell(group, 1)
    until(lambda: group.loaded and group.loaded[0].launched == 1)
    group.announce(1, 0)
    until(lambda: group.follower.phase == "standing by")
    assert (group.released, group.follower.executor) == (group.loaded[:1], None)
    group.announce(2, 0, 1)
    tell(group, 2)
    until(lambda: len(group.loaded) == 2 and group.loaded[1].launched == 1)
    assert group.loaded[1].generation == 2
    assert group.follower.executor is group.loaded[1]
    # The stream of a generation begins anew, and so do the results that were collected.
    assert group.loaded[1].in_order() == [("launch", step(2))]
    group.announce(3, 0)
    until(lambda: group.dropped == [1, 3])  # weights, for a mesh without this process
    group.end()
    assert group.error is None


def test_the_record_is_read_everywhere_when_as_many_results_are_collected(group):
    leader = LeaderExecutor(Told(), group.leader)
    leader.set_recording(True)
    leader.collect(leader.launch(step(1)))
    leader.expert_counts()
    until(lambda: group.loaded and ("read record",) in group.loaded[0].events)
    events = group.loaded[0].events
    assert events[0] == ("record", True)
    assert events.index(("collect", 1)) < events.index(("read record",))
    leader.set_recording(False)
    assert leader.expert_counts() is None  # and nobody is asked
    leader.launch(step(2))
    until(lambda: group.loaded[0].launched == 2)
    assert group.loaded[0].events.count(("read record",)) == 1
    group.end()


def test_all_say_whom_they_reach_when_process_0_asks_and_who_is_left_out_ends_with_the_reason(group):
    group.leader.on_change = lambda error: None
    assert group.leader.links.check_all(0) == (None, True)
    assert group.follower.phase == "warming up", "nothing has changed for it"
    group.second.links.unreached = lambda members: [0]  # process 0 hears of it by another way
    drop, group.leader._door.drop = group.leader._door.drop, lambda process_id: None
    error, all_answered = group.leader.links.check_all(0)
    assert all_answered
    assert re.search(r"the link between process 1 \(.*\) and process 0 \(.*\) at 127.0.0.1 is cut", str(error))
    assert group.leader.live == group.leader.members[:1]
    ((pid, reason),) = group.leader.links.left_out.values()
    assert pid == os.getpid()
    group.leader.announce(Announcement(3, [0], [0], {"mesh": "dp=1"}, left_out={1: (pid + 1, reason)}))
    until(lambda: group.second.epoch == 3)  # another process is meant, which had its id
    group.leader.announce(Announcement(4, [0], [0], {"mesh": "dp=1"}, left_out={1: (pid, reason)}))
    group.join()
    assert str(group.error) == str(error)
    drop(1)


def test_one_that_does_not_say_whom_it_reaches_may_hang_and_is_not_left_out(group, monkeypatch):
    monkeypatch.setattr("dsjax.hosts.links._GRACE_SECONDS", -2.9)  # of the 3 s that they have to look
    answered = threading.Event()
    group.second.links.unreached = lambda members: answered.wait(60) and []
    group.leader.links.unreached = lambda members: [1]
    assert group.leader.links.check_all(0) == (None, False)
    assert len(group.leader.live) == 2
    group.leader.on_change = lambda error: None
    group.second.endpoint.close()  # its heartbeats have ended
    assert "has gone away" in str(group.leader.find_loss(60))
    answered.set()


def test_whom_process_0_looks_for_gives_up_the_collectives_that_have_broken(group):
    cut = threading.Event()
    group.second.collectives.cut_with(0, cut.set)
    group.leader.links.check_all(0)
    assert cut.is_set()
    group.end()


def fail_next_step(executor):
    executor.launch = Mock(side_effect=RuntimeError("Gloo: connection closed by peer"))


def test_a_follower_whose_step_fails_waits_for_the_next_generation_and_not_for_ever(group):
    cut = []
    group.second.collectives.cut_with(0, lambda: cut.append(group.follower.phase))
    fail_next_step(group.loaded[0])
    tell(group, 1)
    until(lambda: group.follower.phase == "regrouping")
    assert cut == ["ready"], "those that wait for it in that step have heard at once that it will not come"
    group.announce(1, 0, 1)
    until(lambda: len(group.loaded) == 2)
    fail_next_step(group.loaded[1])
    tell(group, 2)
    group.join()
    assert str(group.error) == "Gloo: connection closed by peer"


def test_a_follower_whose_step_fails_ends_at_once_where_no_other_generation_can_come():
    group = Group(regroups=False)
    until(lambda: group.loaded)
    group.second.next_announcement = None  # it would be waited for
    fail_next_step(group.loaded[0])
    tell(group, 1)
    group.join()
    assert str(group.error) == "Gloo: connection closed by peer"


def test_a_follower_that_waits_for_an_answer_of_process_0_says_why_that_one_has_ended_the_group(group):
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(group.second.agreement.all_gather, "stages")
        group.leader.leave("its engine could not be started")
        group.join()
        assert str(group.error) == "process 0 has ended the group: its engine could not be started"
        with pytest.raises(GroupError):
            asked.result(60)


def test_what_a_generation_is_told_is_heard_though_it_begins_in_the_moment_in_which_it_is_announced(group):
    """Whoever waits for the announcement may be quicker than the thread that hears it, on a busy machine."""
    announced = queue.SimpleQueue()
    put = lambda item: (announced.put(item), time.sleep(0.3))  # who waits has time to go on  # noqa: E731
    group.second._announced = Mock(wraps=announced, put=put)
    group.announce(1, 0, 1)
    tell(group, 1)
    until(lambda: len(group.loaded) == 2 and group.loaded[1].launched == 1)
    group.end()


def test_two_hundred_changes_of_the_mesh_leave_nothing_behind(group):
    """In a process that has a part in each, in one that stands by, and in process 0: neither objects nor threads nor open files."""
    leader, second = group.leader, group.second

    def change(number: int, *processes: int) -> None:
        group.announce(number, *processes)
        executor = LeaderExecutor(Told(), leader)
        if 1 in processes:
            executor.collect(executor.launch(step(1)))
            until(lambda: group.loaded and group.loaded[-1].launched == 1)
            answer = second.agreement.contribute("stage", number)
            assert leader.agreement.all_gather("stage", number) == answer.result(60)
            if number % 10 == 0:
                leader.links.check_all(-1)
        else:
            until(lambda: second.epoch == number and group.follower.phase == "standing by")
        group.loaded.clear()
        group.released.clear()

    def state() -> tuple[int, ...]:
        gc.collect()
        ends = [one.endpoint for one in (leader, second)]
        owned = (len(end._accepted) + len(end._dialled) + len(end._monitors) for end in ends)
        return (*owned, threading.active_count(), len(os.listdir("/proc/self/fd")))

    for number in range(1, 11):
        change(number, 0, 1)
    time.sleep(0.3)
    before = state()
    tracemalloc.start()
    for number in range(11, 111):
        change(number, 0, 1)
    for number in range(111, 211):
        change(number, 0)
    until(lambda: all(now <= then for now, then in zip(state(), before, strict=True)))
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(second._inboxes) <= 1
    assert sum(inbox.qsize() for inbox in second._inboxes.values()) == second._announced.qsize() == 0
    assert not leader.agreement._gathers
    assert size < 100_000
    group.end()


class SmallGenerations(Generations):
    """What process 0 decides about leavers."""

    def __init__(self, group: Group):
        self.told: list = []
        self._group = group.leader
        group.leader.on_change = self.told.append
        self.args = self._config = self._weights = self.wanted = None

    def _devices(self):
        return [SimpleNamespace(process_index=member.process_id) for member in self._group.live]


@pytest.fixture(autouse=True)
def mesh_of_processes(monkeypatch):
    """A mesh is possible where there is one process, or as many as `needed`."""

    def largest_mesh(args, config, weights, wanted, devices):
        if len(devices) < largest_mesh.needed:
            raise NoMeshError(f"{len(devices)} devices are left, too few")

    largest_mesh.needed = 1
    monkeypatch.setattr(generations_module, "largest_mesh", largest_mesh)
    return largest_mesh


class Leaving:
    """A group, what process 0 decides about it, and process 1, which asks to leave once process 0's engine has been told."""

    def __init__(self, group):
        self.group, self.generations = group, SmallGenerations(group)

    def ask(self):
        self.thread = threading.Thread(target=self.group.follower.leave, daemon=True)
        self.thread.start()
        until(lambda: self.generations.told)
        assert self.generations.told == [None], "the engine looks at its processes, once"
        self.generations.told.clear()
        return self

    def left(self):
        self.group.announce(1, 0)
        self.group.join()
        self.thread.join(60)
        return self.group.follower.left and self.group.error is None


def test_a_follower_that_asks_to_leave_goes_when_there_is_a_generation_without_it_and_not_before(group):
    leaving = Leaving(group).ask()
    generations = leaving.generations
    assert group.leader.live == group.leader.members, "process 0 has not decided yet"
    generations._decide_on_leavers()
    assert [member.process_id for member in generations._leavers] == [1]
    assert group.leader.live == group.leader.members[:1]
    assert group.follower.phase == "warming up", "it works on for the generation of now"
    assert not group.follower.left
    assert leaving.left()
    assert group.released == group.loaded
    assert generations._leavers == [], "nothing more is to be changed"
    until(lambda: group.leader.lost)  # its connection ends
    assert not generations._is_broken, "its exit is no loss"


def test_a_follower_that_cannot_be_spared_is_told_why_and_goes_on(group, caplog, mesh_of_processes):
    leaving = Leaving(group)
    for needed, needs_all, why in (
        (2, False, "without it 1 devices are left, too few"),
        (1, True, "process 0 is ending too"),  # it may ask again
    ):
        mesh_of_processes.needed, group.leader.needs_all = needed, needs_all
        leaving.ask().generations._decide_on_leavers()
        leaving.thread.join(60)
        assert f"cannot be spared, and goes on: {why}" in caplog.text
        assert group.leader.live == group.leader.members
        assert leaving.generations._leavers == []
    group.leader.needs_all = False
    leaving.ask().generations._decide_on_leavers()
    assert leaving.left()


def test_of_those_that_ask_to_leave_at_once_the_last_that_is_needed_stays(mesh_of_processes):
    several = groups(4)
    leader = several[0]
    generations = SmallGenerations(SimpleNamespace(leader=leader))
    mesh_of_processes.needed = 2
    asked = []
    for each in several[1:]:
        asked.append(each.leader.request("leave", kind=bool))
        each.leader.request("ping").result(60)  # one after the other
    until(lambda: generations.told)
    generations._decide_on_leavers()
    assert generations._leavers == leader.members[1:3]
    with pytest.raises(RefusedError, match="without it 1 devices are left, too few"):
        asked[2].result(60)
    assert leader.live == [leader.members[0], leader.members[3]]


def come_back(group):
    """Have process 1 come back as another process; give the one that it was."""
    before = group.leader.members[1]
    group.leader.members = [group.leader.members[0], msgspec.structs.replace(before, port=before.port + 1)]
    return before


def test_a_late_word_of_a_process_that_has_gone_is_none_of_the_one_that_came_back(group):
    group.leader.on_change = Mock()
    group.leader.lose(come_back(group))
    group.leader.on_change.assert_not_called()
    assert not group.leader.lost


def test_a_member_that_has_come_back_while_nobody_looked_is_still_gone_from_the_generation_that_it_was_in(group):
    generations = SmallGenerations(group)
    group.leader._door.drop = lambda process_id: None
    group.leader.lose(group.leader.members[1])
    come_back(group)  # before the engine's thread, which was busy, has looked
    del group.leader.lost[1]
    assert generations._is_broken
    with pytest.raises(GroupError, match="has gone away"):
        group.leader.check()
    group.announce(1, 0, 1)
    assert not generations._is_broken
    assert group.leader.check() is None
    until(lambda: group.second.members == group.leader.members)  # by which it looks at links


def test_a_member_may_come_back_while_its_loss_is_looked_at(group):

    class Lost(dict):
        """Forgets whoever is looked for: it comes back in that moment."""

        def __contains__(self, key):
            return super().pop(key, None) is not None

    group.leader.lost = Lost({1: GroupError("gone")})
    with contextlib.suppress(GroupError):  # either is true; to fail in another way is not
        group.leader.check()


@pytest.mark.parametrize(
    ("phase", "generation", "served", "code"),
    [
        ("loading", 0, False, 0),  # the group has not served, and ends with this process
        ("compiling ahead", 2, False, 0),  # nobody counts on it yet
        ("loading", 2, False, None),  # a mesh is being made with it
        ("standing by", 2, False, None),
        ("loading", 1, True, None),
    ],
)
def test_a_signal_ends_a_process_that_nobody_needs_yet_and_lets_another_one_leave(
    phase, generation, served, code, monkeypatch, capfd
):
    end, asked = Mock(side_effect=SystemExit), threading.Event()
    monkeypatch.setattr(os, "_exit", end)
    follower = Follower(SimpleNamespace(epoch=generation))
    follower.phase, follower.has_served, follower.leave = phase, served, asked.set
    with contextlib.suppress(SystemExit):
        follower._on_signal(signal.SIGTERM, None)
    if code is None:
        assert asked.wait(60)
        end.assert_not_called()
        with pytest.raises(SystemExit):
            follower._on_signal(signal.SIGINT, None)
        end.assert_called_once_with(1)  # the second one, whichever it is, ends it at once
    else:
        end.assert_called_once_with(code)
        assert capfd.readouterr().err == f"SIGTERM while {phase}: this process ends now\n"
        assert not asked.is_set()
