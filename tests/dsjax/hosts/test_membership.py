"""Who is in a group: processes that ask process 0 to go on without them, and those that come back.

`engine/elastic/test_follower.py` has what is decided about leavers, `test_two_process_server.py` real processes.
"""

import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import msgspec
import pytest
from group_in_threads import enter, groups
from waits import until

from dsjax.hosts import coordination
from dsjax.hosts import group as group_module
from dsjax.hosts.group import GroupError, HostGroup
from dsjax.hosts.wire import Announcement
from dsjax.messaging import RefusedError


@pytest.fixture
def three(monkeypatch):
    monkeypatch.setattr(group_module, "_LEAVE_BATCH_SECONDS", 0.3)
    monkeypatch.setattr(coordination, "wait_until_forgotten", Mock())
    return groups(3)


def test_a_process_that_comes_back_waits_until_jax_has_forgotten_the_one_before_and_is_told_of_when_it_is_ready(three):
    leader, told = three[0], []
    leader.on_change = told.append
    leader.announce(Announcement(4, [0, 1, 2]))
    leader._door.wanted = "dp=2"
    three[2].endpoint.close()
    until(lambda: len(told) == 1)
    back = enter(three[2].options)
    coordination.wait_until_forgotten.assert_called_once_with(2)
    assert (back.epoch, back._response.live_ids) == (5, [0, 1])
    assert back.wanted == "dp=2"  # what it should compile for
    assert back._response.service == leader._response.service
    assert leader.live_ids == [0, 1]
    time.sleep(0.05)
    assert len(told) == 1, "it has no programs yet"
    back.report_ready()
    until(lambda: len(told) == 2)
    assert leader.live_ids == [0, 1, 2]
    leader.announce(Announcement(5, [0, 1, 2]))
    assert back.next_announcement(60).number == 5
    until(lambda: three[1].members == leader.members)  # by which it looks at links


def lose_all_but_the_leader(three) -> list[list[int]]:
    """End the others' connections. Return a list that gets the ids of who is there at each change that is no loss."""
    leader, told = three[0], []
    leader.on_change = lambda error: error is None and told.append(leader.live_ids)
    for each in three[1:]:
        each.endpoint.close()
    until(lambda: leader.live_ids == [0])
    return told


def test_the_mesh_changes_once_for_several_that_come_back_together(three):
    told = lose_all_but_the_leader(three)
    back = [enter(each.options) for each in three[1:]]
    for each in back:
        each.report_ready()
    until(lambda: told)
    assert told == [[0, 1, 2]]


def test_one_that_comes_back_does_not_wait_for_another_that_still_prepares(three):
    told, prepares = lose_all_but_the_leader(three), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(enter, three[1].options, lambda: prepares.wait(60) and {})
        until(lambda: 1 in three[0]._door._callers)
        enter(three[2].options).report_ready()
        until(lambda: told)
        assert told == [[0, 2]]
        prepares.set()
        slow.result(60)


def test_a_process_that_cannot_follow_raises_it_and_ends_no_process(three, monkeypatch):
    ends, leader = Mock(), three[0]
    monkeypatch.setattr(HostGroup, "_end_process", ends)
    leader._log.close()
    three[2].endpoint.close()
    until(lambda: 2 not in leader._door._callers)
    with pytest.raises(GroupError, match=r"the group of process 0 \(.*\) cannot be followed"):
        enter(three[2].options)
    until(lambda: not [one for one in threading.enumerate() if one.name == "dsjax-last-words"])
    ends.assert_not_called()


def test_a_loss_is_told_of_though_another_process_has_come_under_the_id_before_anybody_listens(three):
    leader, lost = three[0], []
    door, member = leader._door, leader.members[1]
    door.open(leader, lost.append, lambda: None)
    assert lost == []
    caller = door._callers[1]
    door._callers[1] = dataclasses.replace(caller, member=msgspec.structs.replace(member, port=1), is_admitted=False)
    door.open(leader, lost.append, lambda: None)
    assert lost == [member]


def test_a_member_that_asks_twice_to_leave_is_answered_and_harms_nobody(three):
    leader, second = three[0], three[1]
    asked = [second.leader.request("leave", kind=bool) for _ in range(2)]
    with pytest.raises(RefusedError, match="asked again"):
        asked[0].result(60)
    for member in leader.take_leave_requests():
        leader.excuse(member)
    assert asked[1].result(60) is False


def test_one_that_has_left_or_was_left_out_and_comes_back_is_counted_on_again(three):
    leader, member = three[0], three[0].members[1]
    super(type(leader), leader).excuse(member)
    leader.links.left_out[1] = member.pid, "the link is cut"  # in a container it may have the same pid as before
    assert leader.live_ids == [0, 2]
    leader.replace(member)
    assert leader.live_ids == [0, 1, 2]
    assert leader.links.left_out == {}
