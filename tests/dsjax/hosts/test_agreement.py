"""Questions that all processes of a generation answer, here as threads over real connections."""

import threading
from unittest.mock import Mock

import pytest
from group_in_threads import groups
from processes import free_port
from waits import until

from dsjax.hosts import HostOptions, coordination
from dsjax.hosts.group import GroupError, HostGroup
from dsjax.hosts.wire import Announcement
from dsjax.messaging import RefusedError


@pytest.fixture
def two():
    return groups(2)


def begin(groups: list[HostGroup], number: int) -> None:
    """Have all be in another generation."""
    groups[0].announce(Announcement(number, list(range(len(groups)))))
    for group in groups[1:]:
        group.begin(group.next_announcement(60))


def test_questions_are_answered_by_all_in_the_order_of_their_ids_and_who_has_another_value_is_named(two):
    first, second = two
    second.agreement.contribute("kernels", "plain")
    with pytest.raises(GroupError, match=r"process 1 \(.*\) has kernels plain, process 0 has native"):
        first.agreement.check_equal("kernels", "native")
    answer = second.agreement.contribute("pages", (7, b"x"))
    assert first.agreement.all_gather("pages", (9, None)) == [[9, None], [7, b"x"]]
    assert answer.result(60) == [[9, None], [7, b"x"]]


def test_one_that_cannot_go_on_says_why_to_all(two):
    first, second = two
    with pytest.raises(ValueError, match="damaged"):
        second.agreement.run("loading", Mock(side_effect=ValueError("damaged")))
    with pytest.raises(GroupError, match=r"process 1 \(.*\): damaged"):
        first.agreement.run("loading", lambda: 1)


@pytest.mark.parametrize("asks", [0, 1])
def test_who_waits_for_an_answer_of_a_generation_that_is_over_or_of_a_process_that_is_gone_waits_no_more(two, asks):
    waiting = two[asks].agreement.contribute("experts")
    second = two[1].agreement
    second.contribute("other")  # behind it, so that process 0 has heard both
    two[0].agreement.all_gather("other")
    begin(two, 1)
    with pytest.raises(ValueError, match="another generation has begun"):
        waiting.result(60)
    two[0].on_change = lambda error: None
    late = two[0].agreement.contribute("experts")
    two[1].endpoint.close()
    with pytest.raises(ValueError, match=r"process 1 \(.*\) has gone away"):
        late.result(60)
    with pytest.raises(GroupError, match=r"process 1 \(.*\) has gone away"):
        two[0].agreement.all_gather("experts")


def test_a_load_of_a_generation_with_a_lost_process_or_with_a_successor_does_not_go_on(two):
    first, second = two
    for group in (first, second):
        group.check_epoch(0, "its weights were loaded")
    first.announce(Announcement(1, [0]))
    second.next_announcement(60)
    with pytest.raises(GroupError, match="mesh epoch 0 was abandoned while its weights"):
        second.check_epoch(0, "its weights were loaded")
    first.on_change = lambda error: None
    second.endpoint.close()
    first.present = first.members
    until(lambda: 1 in first.lost)
    with pytest.raises(GroupError, match="has gone away"):
        first.check_epoch(1, "its weights were loaded")


def test_a_question_of_one_generation_is_not_answered_by_what_was_said_in_another(two):
    first, second = two
    second.agreement.contribute("pages", 7)
    begin(two, 1)
    second.agreement.contribute("pages", 8)
    assert first.agreement.all_gather("pages", 9) == [9, 8]
    second.agreement.contribute("pages", 5)
    assert first.agreement.all_gather("pages", 6) == [6, 5], "it may be asked again"


def test_who_is_in_no_group_is_not_heard(two, endpoints):
    stranger = endpoints(two[0].endpoint.credentials)
    peer = stranger.connect(two[0].endpoint.address, "member")
    with pytest.raises(RefusedError, match="not in the group"):
        peer.request("gather", (0, "pages", 0)).result(60)


def test_a_start_that_fails_leaves_the_address_free_for_the_next_try(monkeypatch):
    options = HostOptions(("127.0.0.1", free_port()), 1, 0, "127.0.0.1", 30, 10)
    fail = Mock(side_effect=GroupError("the service cannot be reached"))
    monkeypatch.setattr(coordination, "start_service", lambda options: (None, "127.0.0.1:1"))
    monkeypatch.setattr(coordination, "join", fail)
    before = set(threading.enumerate())
    for _ in range(2):  # as in a notebook
        with pytest.raises(GroupError, match="the service cannot be reached"):
            HostGroup.start(options, dict)
    until(lambda: set(threading.enumerate()) <= before)
