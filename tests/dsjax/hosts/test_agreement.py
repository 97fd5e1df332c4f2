"""Questions that all processes of a generation answer, here as threads over a store in memory."""

import threading
import time
from types import SimpleNamespace

import pytest
from group_in_threads import MemoryStore
from processes import free_port

from dsjax.hosts import HostOptions, coordination
from dsjax.hosts.announcement import Announcement
from dsjax.hosts.group import GroupError, HostGroup
from dsjax.hosts.rendezvous import JoinRequest


def two() -> list[HostGroup]:
    store = MemoryStore()
    members = [JoinRequest(index, 2, "host", 10 + index, "127.0.0.1", "m") for index in (0, 1)]
    return [HostGroup(HostOptions(("127.0.0.1", 1), 2, index, "127.0.0.1", 1, 1), members, store) for index in (0, 1)]


def test_questions_are_answered_by_all_in_the_order_of_their_ids_and_who_has_another_value_is_named():
    first, second = two()
    second.agreement.tell("kernels", "plain")
    with pytest.raises(GroupError, match=r"process 1 \(host, pid 11\) has kernels plain, process 0 has native"):
        first.agreement.alike("kernels", "kernels", "native")
    answers: list = []
    other = threading.Thread(target=lambda: answers.append(second.agreement.ask("pages", 7)))
    other.start()
    assert first.agreement.ask("pages", 9) == [9, 7]
    other.join(60)
    assert answers == [[9, 7]]


def test_one_that_cannot_go_on_says_why_to_all():
    first, second = two()
    with pytest.raises(ValueError, match="damaged"):
        second.agreement.run("loading", lambda: (_ for _ in ()).throw(ValueError("damaged")))
    with pytest.raises(GroupError, match=r"process 1 \(host, pid 11\): damaged"):
        first.agreement.run("loading", lambda: 1)


def test_who_waits_for_an_answer_of_a_generation_that_is_over_waits_no_more():
    first, _ = two()
    errors: list = []

    def ask():
        try:
            first.agreement.ask("experts")
        except GroupError as error:
            errors.append(str(error))

    waiting = threading.Thread(target=ask)
    waiting.start()
    while not first.store.list(first.key("agree", "experts", 0, 0)):
        time.sleep(0.001)
    first.enter(Announcement(1, [0, 1]))
    waiting.join(60)
    assert errors == ["generation 0 was given up while process 1 (host, pid 11) was waited for"]


def test_a_load_of_a_generation_with_a_lost_process_or_with_a_successor_does_not_go_on():
    first, second = two()
    second.announcements = SimpleNamespace(latest=0, why_ended=None)
    for group in (first, second):
        group.check_generation(0, "its weights were loaded")
    first.lost[1] = GroupError("process 1 has gone away")
    second.announcements.latest = 1
    for group, error in ((first, "process 1 has gone away"), (second, "generation 0 was given up while its weights")):
        with pytest.raises(GroupError, match=error):
            group.check_generation(0, "its weights were loaded")


def test_a_question_of_one_generation_is_not_answered_by_what_was_said_in_another():
    first, second = two()
    second.agreement.tell("pages", 7)
    for group in (first, second):
        group.enter(Announcement(1, [0, 1]))
    second.agreement.tell("pages", 8)
    assert first.agreement.ask("pages", 9) == [9, 8]
    second.agreement.tell("pages", 5)
    assert first.agreement.ask("pages", 6) == [6, 5], "it may be asked again"


def test_a_start_that_fails_leaves_the_address_free_for_the_next_try(monkeypatch):
    options = HostOptions(("127.0.0.1", free_port()), 1, 0, "127.0.0.1", 30, 10)

    def fail(*_):
        raise GroupError("the service cannot be reached")

    monkeypatch.setattr(coordination, "join", fail)
    for _ in range(2):  # as in a notebook
        with pytest.raises(GroupError, match="the service cannot be reached"):
            HostGroup.start(options, dict)
