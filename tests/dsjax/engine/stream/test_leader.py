"""A leader and a follower over real connections: the same commands, the same results collected before each, and one end for both."""

from unittest.mock import Mock

import pytest
from group_in_threads import Pair, step
from waits import until

from dsjax.engine.contract.commands import Clear, Copy, Flush
from dsjax.engine.stream.leader import Landings
from dsjax.engine.transfer.messages import PulledChunk
from dsjax.hosts.group import GroupError


def end(pair: Pair) -> None:
    pair.leader.shutdown()
    pair.join()
    assert pair.error is None


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_follower_launches_and_collects_in_the_leaders_order(max_in_flight):
    pair = Pair(max_in_flight=max_in_flight)
    leader = pair.leader
    leader.warm_up()
    assert pair.follower.phase == "ready", "process 0 is not ready before its followers are"
    first = leader.launch(step(1))
    second = leader.launch(step(2))  # laid out before the first one's results are known
    leader.launch(Copy([b""]))
    leader.wait(first)
    assert leader.collect(first) == [1]
    third = leader.launch(step(3))
    leader.launch(Clear([b""]))
    leader.set_recording(True)
    leader.collect(second)
    leader.collect(third)
    flushed = leader.launch(Flush())
    leader.collect(flushed)
    end(pair)
    led, followed = pair.inner.in_order(), pair.told.in_order()
    assert [event for event in followed if event[0] != "collect"] == [event for event in led if event[0] != "collect"]
    # What had been collected when a command was laid out is the same; what nothing came after is not collected at all.
    assert followed.index(("collect", 1)) < followed.index(("launch", step(3)))
    assert followed.index(("collect", 1)) > followed.index(("launch", step(2)))
    assert followed.index(("collect", 4)) < followed.index(("launch", Flush()))


def test_a_result_that_is_collected_once_more_after_an_interrupt_counts_once_and_one_that_nobody_waits_for_counts():
    pair = Pair()
    first = pair.leader.launch(step(1))
    for _ in range(2):
        assert pair.leader.collect(first) == [1]
    assert pair.leader.collected == 1
    pair.leader.launch(step(2))
    pair.leader.collect(pair.leader.launch(step(3)))
    pair.leader.launch(step(4))
    pair.take_part(4)
    events = [event for event in pair.told.in_order() if event[0] == "collect" or event[1] == step(4)]
    assert events == [("collect", 1), ("collect", 2), ("collect", 3), ("launch", step(4))]
    end(pair)


def test_emulated_devices_are_waited_for_until_nothing_more_is_under_way():
    pair = Pair(max_in_flight=1)
    pair.leader.launch(step(1))
    pair.leader.launch(step(2))
    until(lambda: ("wait", 2) in pair.told.events)
    assert [event for event in pair.told.events if event[0] == "wait"] == [("wait", 1), ("wait", 2)]
    end(pair)


def test_a_warm_up_that_fails_elsewhere_is_raised_by_the_leader():
    pair = Pair()
    pair.told.warm_up = Mock(side_effect=RuntimeError("no compiler"))
    with pytest.raises(GroupError, match=r"process 1 \(.*\): RuntimeError: no compiler"):
        pair.leader.warm_up()
    pair.join()
    assert isinstance(pair.error, RuntimeError)


def test_a_command_that_the_leader_cannot_launch_ends_all():
    pair = Pair()
    pair.inner.fails_at = 2
    pair.leader.launch(step(1))
    with pytest.raises(ValueError, match="it cannot be laid out"):
        pair.leader.launch(step(2))
    pair.join()
    assert isinstance(pair.error, GroupError)
    assert "process 0 has ended the group: a command could not be launched (ValueError)" in str(pair.error)


def test_an_engine_that_is_given_back_after_its_failure_was_told_does_not_end_the_others_as_if_all_were_well():
    pair = Pair()
    pair.groups[0].leave("its engine could not be started")
    pair.leader.shutdown()
    pair.join()
    assert "process 0 has ended the group: its engine could not be started" in str(pair.error)
    assert pair.inner.events == [("shutdown",)]


def test_what_fails_because_a_member_is_gone_names_it():
    pair = Pair()
    pending = pair.leader.launch(step(1))

    def fail(pending):
        pair.groups[0].on_change = lambda error: None
        pair.groups[0].lose(pair.groups[0].members[1])
        raise RuntimeError("Gloo: connection closed by peer")

    pair.inner.wait = fail
    with pytest.raises(GroupError, match=r"process 1 \(.*\) has gone away"):
        pair.leader.wait(pending)
    with pytest.raises(GroupError, match="has gone away"):
        pair.leader.launch(step(2))
    pair.leader.group.leave("a test")
    pair.join()


def test_a_chunk_has_come_when_it_has_come_in_every_process_of_its_rank():
    landed = []
    landings = Landings([[0], [0, 1]], landed.append)
    landings.enter(PulledChunk(0, 0, 7, [1], True))
    for ok in (True, False):
        landings.enter(PulledChunk(1, 0, 8, [2, 3], ok))
        landings.enter(PulledChunk(1, 0, 9, [4], True))
    assert [(chunk.number, chunk.ok) for chunk in landed] == [(7, True), (8, False), (9, True)]
