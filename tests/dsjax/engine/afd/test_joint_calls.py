"""Calls of several attention processes for one layer: computed together, and nobody is waited for who does not come."""

import numpy as np
import pytest

from dsjax.engine.afd.joint_calls import JointCalls, Part
from dsjax.engine.afd.messages import Call


@pytest.fixture
def joint():
    joint = JointCalls(3)
    for process, name in enumerate("abc"):
        joint.enter(name, process)
    return joint


def call(joint, name, number, *, again=False, tokens=8):
    """Have a process call over a link; give what is computed then: of each program, the links whose rows it has."""
    joint.add(Part(name, Call("moe_layers", 0, tokens, 8, b"", number, again), np.zeros(0), np.zeros(0, int)))
    return taken(joint)


def taken(joint):
    return ["".join(sorted(part.name for part in parts)) for parts in joint.take()]


def test_calls_of_all_processes_are_one_program(joint):
    for number in range(3):
        assert [call(joint, name, number) for name in "abc"] == [[], [], ["abc"]]


def test_a_call_waits_for_a_process_that_is_late_and_not_for_one_whose_connection_ends(joint):
    assert call(joint, "a", 0) == call(joint, "b", 0) == []
    joint.leave("c")
    assert taken(joint) == ["ab"]


def test_what_has_come_over_a_link_that_has_ended_is_not_computed(joint):
    assert call(joint, "c", 0) == call(joint, "a", 0) == []
    joint.leave("c")
    assert call(joint, "b", 0) == ["ab"]


def test_where_another_generation_has_begun_a_call_waits_for_nobody(joint):
    assert call(joint, "a", 0) == []
    joint.end()
    assert taken(joint) == ["a"]


def test_what_is_asked_for_again_is_computed_at_once_and_the_others_wait_no_more(joint):
    assert call(joint, "c", 4, again=True) == ["c"]  # the others had their answers of call 4
    assert call(joint, "a", 5) == call(joint, "b", 5) == []
    assert sorted(call(joint, "c", 5, again=True)) == ["ab", "c"]  # its connection has ended again


def test_a_process_that_is_past_a_call_is_not_waited_for(joint):
    assert call(joint, "b", 7) == call(joint, "c", 7) == []
    assert call(joint, "a", 6) == ["a"]
    assert call(joint, "a", 7) == ["abc"]


def test_a_call_that_waits_on_a_link_that_has_ended_gives_way_to_the_one_that_is_made_again(joint):
    assert call(joint, "a", 0) == []
    joint.enter("new", 0)
    assert call(joint, "new", 0, again=True) == ["new"]
    joint.leave("a")
    assert call(joint, "new", 1) == []
    assert call(joint, "b", 0) == []
    assert call(joint, "c", 0) == ["bc"]


def test_what_comes_late_over_an_old_link_takes_the_place_of_nothing(joint):
    joint.enter("new", 0)
    assert call(joint, "new", 0, again=True) == ["new"]
    assert call(joint, "new", 1) == []
    assert call(joint, "a", 0) == []
    assert call(joint, "b", 1) == []
    assert sorted(call(joint, "c", 1)) == ["bcnew"]


def test_parts_of_other_sizes_are_computed_by_themselves(joint):
    assert call(joint, "a", 0) == call(joint, "b", 0) == []
    assert sorted(call(joint, "c", 0, tokens=16)) == ["ab", "c"]
