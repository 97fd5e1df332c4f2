"""Calls of several attention processes for one layer: computed together, and nobody is waited for who does not come."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from waits import until

from dsjax.engine.afd.joint_calls import JointCalls, Part


def part(number: int, value: int = 0, key: str = "a layer") -> Part:
    return Part(number, key, np.array([value]), np.array([0]))


class Computed:
    """Answers ten times what came, and remembers what was computed together."""

    def __init__(self):
        self.together: list[list[int]] = []

    def __call__(self, parts):
        self.together.append(sorted(int(one.rows[0]) for one in parts))
        return [10 * one.rows for one in parts]


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def joint():
    joint = JointCalls(3)
    for process in range(3):
        joint.enter(process)
    return joint


def wait_here(joint, *processes):
    until(lambda: set(processes) <= set(joint._parts))


def test_calls_of_all_processes_are_one_program(pool, joint):
    computed = Computed()
    for number in range(3):
        own = [part(number, value) for value in (1, 2, 3)]
        answers = pool.map(lambda process, own=own: joint.together(process, own[process], computed), range(3))
        assert [int(answer[0]) for answer in answers] == [10, 20, 30]
    assert computed.together == [[1, 2, 3]] * 3
    assert not joint._parts


def test_a_call_waits_for_a_process_that_is_late_and_not_for_one_whose_connection_ends(pool, joint):
    computed = Computed()
    first = pool.submit(joint.together, 0, part(0, 1), computed)
    second = pool.submit(joint.together, 1, part(0, 2), computed)
    wait_here(joint, 0, 1)
    assert not first.done()
    assert not joint.leave(2)
    assert [int(one.result(60)[0]) for one in (first, second)] == [10, 20]
    assert computed.together == [[1, 2]]


def test_where_another_generation_has_begun_a_call_waits_for_nobody(pool, joint):
    computed = Computed()
    first = pool.submit(joint.together, 0, part(0, 1), computed)
    wait_here(joint, 0)
    joint.end()
    assert first.result(60)[0] == 10


def test_what_is_asked_for_again_is_computed_at_once_and_the_others_wait_no_more(pool, joint):
    computed = Computed()
    assert joint.alone(2, part(4, 3), computed)[0] == 30  # the others had their answers of call 4
    first = pool.submit(joint.together, 0, part(5, 1), computed)
    second = pool.submit(joint.together, 1, part(5, 2), computed)
    wait_here(joint, 0, 1)
    assert joint.alone(2, part(5, 3), computed)[0] == 30  # its connection has ended again
    assert [int(one.result(60)[0]) for one in (first, second)] == [10, 20]
    assert computed.together == [[3], [3], [1, 2]]


def test_a_process_that_is_past_a_call_is_not_waited_for(pool, joint):
    computed = Computed()
    ahead = [pool.submit(joint.together, process, part(7, process), computed) for process in (1, 2)]
    wait_here(joint, 1, 2)
    assert joint.together(0, part(6, 5), computed)[0] == 50
    assert joint.together(0, part(7, 0), computed)[0] == 0
    assert [int(one.result(60)[0]) for one in ahead] == [10, 20]
    assert computed.together == [[5], [0, 1, 2]]


def test_a_call_that_waits_on_a_connection_that_has_ended_gives_way_to_the_one_that_is_made_again(pool, joint):
    computed = Computed()
    old = pool.submit(joint.together, 0, part(0, 1), computed)
    wait_here(joint, 0)
    joint.enter(0)
    assert joint.alone(0, part(0, 1), computed)[0] == 10
    with pytest.raises(ConnectionError, match="made again over another connection"):
        old.result(60)


def test_what_fails_is_heard_of_by_all(pool, joint):
    def fail(parts):
        raise ValueError("no such layer")

    calls = [pool.submit(joint.together, process, part(0), fail) for process in range(3)]
    for call in calls:
        with pytest.raises(ValueError, match="no such layer"):
            call.result(60)


def test_parts_of_other_sizes_are_computed_by_themselves(pool, joint):
    computed = Computed()
    calls = [pool.submit(joint.together, process, part(0, process, key), computed) for process, key in enumerate("aab")]
    assert [int(call.result(60)[0]) for call in calls] == [0, 10, 20]
    assert sorted(computed.together) == [[0, 1], [2]]


def test_the_last_connection_of_all_is_told(joint):
    assert [joint.leave(process) for process in (0, 1, 2)] == [False, False, True]
