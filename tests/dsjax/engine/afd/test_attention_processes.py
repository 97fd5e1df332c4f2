"""Processes of an attention side, as threads, that wait for each other at each layer over real connections."""

import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "elastic"))
from held_processes import KEY, groups

from dsjax.engine.afd.attention_processes import AttentionProcesses
from dsjax.hosts.group import GroupError
from dsjax.hosts.secure_channel import connect


@pytest.fixture
def pool():
    with ThreadPoolExecutor(3) as pool:
        yield pool


@pytest.fixture
def processes(pool):
    made = list(pool.map(AttentionProcesses, groups(3)))
    yield made
    for one in made:
        one.close()


def meet(process, number):
    process.tell(number)
    return process.wait(number)


def test_all_go_on_together_with_the_greatest_number(pool, processes):
    for numbers in ((1, 1, 1), (1, 3, 2), (4, 1, 1)):
        assert list(pool.map(meet, processes, numbers)) == [max(numbers)] * 3
    assert [process.leads for process in processes] == [True, False, False]


def test_one_that_is_late_is_waited_for_at_that_layer_by_all(pool, processes):
    """It may have told of a layer that the others are at, and is told of the next one before it has looked."""
    first = [pool.submit(meet, process, 0) for process in processes[:2]]
    processes[2].tell(0)
    assert [one.result(20) for one in first] == [0, 0]
    second = [pool.submit(meet, process, 1) for process in processes[:2]]
    assert processes[2].wait(0) == 0
    assert not any(one.done() for one in second)
    assert meet(processes[2], 2) == 2
    assert [one.result(20) for one in second] == [2, 2]


def test_one_that_gives_up_ends_the_wait_of_all_others(pool, processes):
    waits = [pool.submit(meet, process, 0) for process in processes[:2]]
    processes[2].close()
    for one in waits:
        with pytest.raises(RuntimeError, match="process 2 of the attention side was waited for at a layer"):
            one.result(20)


def test_one_that_waits_at_another_layer_is_an_error_and_no_answer(pool, processes):
    processes[1]._number = 7
    waits = [pool.submit(meet, process, 0) for process in (processes[0], processes[2])]
    processes[1].tell(0)
    with pytest.raises(RuntimeError, match="waits at its layer 7, and this process at 0"):
        waits[0].result(20)
    processes[1].close()
    with pytest.raises(RuntimeError):
        waits[1].result(20)


def test_where_one_cannot_be_reached_the_others_say_so(pool):
    three = groups(3)
    made = [pool.submit(AttentionProcesses, group) for group in three[1:]]
    three[0].agreement.tell("attention processes", 1)  # at whose port nobody listens
    for one in made:
        with pytest.raises(GroupError, match="cannot be reached at port 1"):
            one.result(20)


def test_one_of_another_generation_is_not_let_in(pool):
    two = groups(2)
    made = pool.submit(AttentionProcesses, two[0])
    port, _ = two[1].agreement.ask("attention processes", 0)
    two[1].agreement.tell("attention connections")
    with connect(("127.0.0.1", port), "attention", KEY) as channel:
        channel.send(struct.pack("<QQ", 5, 1))
        with pytest.raises(GroupError, match=r"processes \[1\] of the attention side do not connect to 0"):
            made.result(20)


@pytest.mark.parametrize("process", [0, 5], ids=["itself", "nobody"])
def test_a_process_that_is_not_expected_takes_nobody_s_place(pool, process):
    two = groups(2)
    made = pool.submit(AttentionProcesses, two[0])
    port, _ = two[1].agreement.ask("attention processes", 0)
    two[1].agreement.tell("attention connections")
    with connect(("127.0.0.1", port), "attention", KEY) as channel:
        channel.send(struct.pack("<QQ", two[0].generation, process))
        with pytest.raises(GroupError, match=r"processes \[1\] of the attention side do not connect to 0"):
            made.result(20)
