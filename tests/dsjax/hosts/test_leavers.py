"""Processes that ask process 0 to go on without them; `engine/elastic/test_follower.py` has what is decided and done about it."""

import pytest
from group_in_threads import MemoryStore

from dsjax.hosts import HostOptions
from dsjax.hosts.announcement import Announcement
from dsjax.hosts.group import HostGroup
from dsjax.hosts.rendezvous import JoinRequest


@pytest.fixture
def groups():
    store = MemoryStore()
    members = [JoinRequest(index, 3, "host", 7, "127.0.0.1", "m", 9000 + index) for index in range(3)]
    return [HostGroup(HostOptions(("127.0.0.1", 1), 3, index, "127.0.0.1"), members, store) for index in range(3)]


def test_those_that_ask_are_heard_once_and_told_of_when_nobody_else_asks(groups):
    leader, told = groups[0], []
    leader.on_change = told.append
    for each in groups[1:]:
        each.leavers.ask()
        leader.leavers.hear()
    assert told == []
    leader.leavers.hear()
    leader.leavers.hear()
    assert (told, bool(leader.leavers)) == ([None], True)
    assert leader.leavers.take() == leader.members[1:]
    assert (leader.leavers.take(), bool(leader.leavers)) == ([], False)


def test_one_that_is_kept_hears_why_and_one_that_has_no_part_that_it_may_go(groups):
    leader, second, third = groups
    assert second.leavers.answer(0) is None
    leader.leavers.keep(second.me, "it is needed")
    assert [second.leavers.answer(0), second.leavers.answer(0)] == ["it is needed", None]
    leader.enter(Announcement(1, [0, 1]))
    leader.leavers.excuse(second.me)
    assert second.leavers.answer(0) is None, "it waits for a generation without it"
    leader.leavers.excuse(third.me)
    assert third.leavers.answer(0) == ""
    assert leader.live_ids == [0]
    assert leader.take_ended() == {1, 2}
    assert leader.reachable_ids == [0, 1, 2], "they have not gone yet"


def test_one_that_has_left_and_comes_back_is_counted_on_again(groups):
    leader = groups[0]
    leader.leavers.excuse(leader.members[1])
    comes = JoinRequest(1, 3, "host", 7, "127.0.0.1", "m", 9100)
    leader.replace(comes)
    assert leader.live_ids == [0, 1, 2]
    leader.leavers.excuse(comes)
    leader.replace(comes)  # it has asked again before it was welcomed
    assert leader.live_ids == [0, 2]
