"""A follower goes from generation to generation, stands by in one without it, and ends with the reason where it is left out."""

import contextlib
import os
import threading

import msgspec
import pytest
from group_in_threads import Group, Told, step

from dsjax.engine.stream.leader import LeaderExecutor
from dsjax.hosts import group
from dsjax.hosts.announcement import Announcement
from dsjax.hosts.group import GroupError


@pytest.fixture(autouse=True)
def nobody_watches_who_leaves(monkeypatch):
    """Leave at once: no thread of these groups watches the connections, so that nothing would end the wait for the other process."""
    monkeypatch.setattr(group, "_LEAVE_SECONDS", 0)


def test_a_follower_goes_from_generation_to_generation_and_stands_by_in_one_without_it():
    group = Group()
    first = LeaderExecutor(Told(), group.leader)
    first.launch(step(1))
    group.until(lambda: group.loaded and group.loaded[0].launched == 1)
    first.retire()
    group.announce(1, 0)
    group.until(lambda: group.follower.phase == "standing by")
    assert group.released == group.loaded[:1]
    group.announce(2, 0, 1)
    second = LeaderExecutor(Told(), group.leader)
    second.launch(step(2))
    group.until(lambda: len(group.loaded) == 2 and group.loaded[1].launched == 1)
    assert group.loaded[1].generation == 2
    # The stream of a generation begins anew, and so do the results that were collected.
    assert group.loaded[1].in_order() == [("launch", step(2))]
    assert group.follower.commands == 2
    group.end()
    assert group.error is None


def test_all_say_whom_they_reach_when_process_0_asks_and_who_is_left_out_ends_with_the_reason():
    group = Group()
    group.until(lambda: group.loaded)
    assert group.leader.links.look(Announcement(1, looks=True)) == (None, True)
    group.until(lambda: group.follower.phase == "standing by")  # it is no mesh
    group.second.links.unreached = lambda members: [0]  # process 0 hears of it by another way
    error, all_answered = group.leader.links.look(Announcement(2, looks=True))
    assert all_answered
    assert "the link between process 1 (host, pid 11) and process 0 (host, pid 10) at 127.0.0.1 is cut" in str(error)
    assert group.leader.live == group.leader.members[:1]
    ((pid, reason),) = group.leader.links.left_out.values()
    assert pid == 11  # this process is another one, so that it is not meant
    group.leader.announce(Announcement(3, [0], [0], {"mesh": "dp=1"}, left_out={1: (pid, reason)}))
    group.until(lambda: group.second.generation == 3)
    group.leader.announce(Announcement(4, [0], [0], {"mesh": "dp=1"}, left_out={1: (os.getpid(), reason)}))
    group.thread.join(60)
    assert str(group.error) == str(error)


def test_one_that_does_not_say_whom_it_reaches_may_hang_and_is_not_left_out(monkeypatch):
    group = Group()
    group.until(lambda: group.loaded)
    monkeypatch.setattr("dsjax.hosts.links._GRACE_SECONDS", -2.9)  # of the 3 s that they have to look
    group.second.links.tell = lambda number: None
    group.leader.links.unreached = lambda members: [1]
    assert group.leader.links.look(Announcement(1, looks=True)) == (None, False)
    assert len(group.leader.live) == 2
    group.leader.on_change = lambda error: None
    group.leader._lose(group.leader.members[1])  # its signs of life have ended
    assert "process 1 (host, pid 11) has gone away" in str(group.leader.lost_by(RuntimeError(), 0.1))
    group.end()


def test_a_follower_whose_step_fails_waits_for_the_next_generation_and_not_for_ever():
    group = Group()
    leader = LeaderExecutor(Told(), group.leader)
    group.until(lambda: group.loaded)

    def fail(command):
        raise RuntimeError("Gloo: connection closed by peer")

    group.loaded[0].launch = fail
    leader.launch(step(1))
    group.until(lambda: group.follower.phase == "regrouping")
    group.announce(1, 0, 1)
    group.until(lambda: len(group.loaded) == 2)
    group.loaded[1].launch = fail
    LeaderExecutor(Told(), group.leader).launch(step(2))
    group.thread.join(60)
    assert not group.thread.is_alive()
    assert str(group.error) == "Gloo: connection closed by peer"


def test_a_follower_that_waits_for_an_answer_of_a_generation_that_was_given_up_goes_on_to_the_next():
    group = Group()
    group.until(lambda: group.loaded)
    asked: list[BaseException] = []

    def ask():
        try:
            group.second.ask("loading")
        except GroupError as error:
            asked.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    group.announce(1, 0, 1)
    thread.join(60)
    assert "generation 0 was given up while process 0 (host, pid 10) was waited for" in str(asked[0])
    group.end()


def leaving(group: Group) -> threading.Thread:
    """Process 1, which asks to leave, as process 0 has heard."""
    group.until(lambda: group.loaded)
    thread = threading.Thread(target=group.follower.leave, daemon=True)
    thread.start()
    group.until(lambda: group.store.list("dsjax/leaving/"))
    told = []
    group.leader.members[1] = msgspec.structs.replace(group.leader.members[1], pid=os.getpid())
    group.leader.on_change = told.append
    group.leader._hear_leavers()
    assert told == [None], "the engine looks at its processes"
    assert group.leader.leaving_members == {1: os.getpid()}
    assert not group.store.list("dsjax/leaving/"), "it is heard once"
    return thread


def test_a_follower_that_asks_to_leave_goes_when_there_is_a_generation_without_it_and_not_before():
    group = Group()
    thread = leaving(group)
    assert group.leader.live == group.leader.members, "process 0 has not decided yet"
    group.leader.settle(group.leader.members[1], None)
    assert group.leader.live == group.leader.members[:1]
    assert group.follower.phase == "warming up", "it works on for the generation of now"
    assert not group.follower.left
    group.announce(1, 0)
    group.thread.join(60)
    thread.join(60)
    assert (group.follower.left, group.error) == (True, None)
    assert group.released == group.loaded


def test_a_follower_that_cannot_be_spared_is_told_why_and_goes_on(caplog):
    group = Group()
    thread = leaving(group)
    group.leader.settle(group.leader.members[1], "without it 2 devices are left, too few")
    thread.join(60)
    assert "cannot be spared, and goes on: without it 2 devices are left, too few" in caplog.text
    assert group.leader.live == group.leader.members
    group.announce(1, 0)
    group.until(lambda: group.follower.phase == "standing by")
    group.announce(2, 0, 1)
    group.until(lambda: len(group.loaded) == 2)
    again = leaving(group)  # it may ask again
    group.leader.settle(group.leader.members[1], None)
    group.announce(3, 0)
    group.thread.join(60)
    again.join(60)
    assert group.follower.left


def test_a_process_that_comes_back_under_the_id_of_one_that_left_is_no_leaver():
    group = Group()
    leaving(group)
    group.leader.settle(group.leader.members[1], None)
    group.leader.members[1] = msgspec.structs.replace(group.leader.members[1], pid=os.getpid() + 1)
    assert group.leader.live == group.leader.members


def test_a_loss_that_two_threads_notice_at_once_is_one_loss(monkeypatch):
    group, told, both = Group(), [], threading.Barrier(2)
    group.until(lambda: group.loaded)
    group.leader.on_change = told.append

    class Lost(dict):
        """Lets whoever looks wait for the other thread, which looks too, where nothing keeps them apart."""

        def __contains__(self, key):
            known = super().__contains__(key)
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.5)
            return known

    group.leader.lost = Lost()
    threads = [threading.Thread(target=group.leader._lose, args=(group.leader.members[1],)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(told) == 1


def test_a_late_word_of_a_process_that_has_gone_is_none_of_the_one_that_came_back():
    group, told = Group(), []
    group.until(lambda: group.loaded)
    group.leader.on_change = told.append
    before = group.leader.members[1]
    group.leader.members[1] = msgspec.structs.replace(before, pid=before.pid + 1)
    group.leader._lose(before)
    assert told == []
    assert not group.leader.lost
