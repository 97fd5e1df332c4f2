"""Processes of an attention side, as threads, that wait for each other at each layer over real connections."""

import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "elastic"))
from deployments import listening
from held_processes import KEY, groups
from processes import free_port
from waits import until

from dsjax.engine.afd.attention_processes import AttentionProcesses
from dsjax.engine.afd.expert_link import Errand
from dsjax.engine.afd.joint_calls import JointCalls, Part
from dsjax.engine.afd.messages import SERVICE, Answered, Call, Hello, Welcome, receive, send
from dsjax.engine.afd.remote_experts import RemoteExperts
from dsjax.engine.setup import loading
from dsjax.hosts.group import GroupError
from dsjax.hosts.secure_channel import connect
from sharding import MeshSpec


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
    assert [one.result(60) for one in first] == [0, 0]
    second = [pool.submit(meet, process, 1) for process in processes[:2]]
    assert processes[2].wait(0) == 0
    assert not any(one.done() for one in second)
    assert meet(processes[2], 2) == 2
    assert [one.result(60) for one in second] == [2, 2]


def test_one_that_gives_up_ends_the_wait_of_all_others(pool, processes):
    waits = [pool.submit(meet, process, 0) for process in processes[:2]]
    processes[2].close()
    for one in waits:
        with pytest.raises(RuntimeError, match="process 2 of the attention side was waited for at a layer"):
            one.result(60)


def test_one_that_waits_at_another_layer_is_an_error_and_no_answer(pool, processes):
    processes[1]._number = 7
    waits = [pool.submit(meet, process, 0) for process in (processes[0], processes[2])]
    processes[1].tell(0)
    with pytest.raises(RuntimeError, match="waits at its layer 7, and this process at 0"):
        waits[0].result(60)
    processes[1].close()
    with pytest.raises(RuntimeError):
        waits[1].result(60)


def test_where_one_cannot_be_reached_the_others_say_so(pool):
    three = groups(3)
    made = [pool.submit(AttentionProcesses, group) for group in three[1:]]
    three[0].agreement.tell("attention processes", 1)  # at whose port nobody listens
    for one in made:
        with pytest.raises(GroupError, match="cannot be reached at port 1"):
            one.result(60)


@pytest.mark.parametrize(("generation", "process"), [(5, 1), (0, 0), (0, 2)])
def test_one_of_another_generation_or_that_says_to_be_another_than_may_come_is_not_let_in(pool, generation, process):
    two = groups(2)
    made = pool.submit(AttentionProcesses, two[0])
    port, _ = two[1].agreement.ask("attention processes", 0)
    with connect(("127.0.0.1", port), "attention", KEY) as channel:
        channel.send(struct.pack("<QQ", generation, process))
        until(lambda: channel.has_ended)
    with connect(("127.0.0.1", port), "attention", KEY) as channel:
        channel.send(struct.pack("<QQ", 0, 1))
        two[1].agreement.tell("attention connections")
        made.result(60).close()


def test_a_process_comes_once(pool):
    three = groups(3)
    made = pool.submit(AttentionProcesses, three[0])
    port, *_ = pool.map(lambda group: group.agreement.ask("attention processes", 0)[0], three[1:])
    one, other = (connect(("127.0.0.1", port), "attention", KEY) for _ in range(2))
    with one, other:
        for channel in (one, other):
            channel.send(struct.pack("<QQ", 0, 1))
        until(lambda: one.has_ended or other.has_ended)
        assert not (one.has_ended and other.has_ended)
    three[0].lost[2] = GroupError("process 2 has gone away")
    with pytest.raises(GroupError, match="process 2 has gone away"):
        made.result(60)


@pytest.fixture
def experts_at():
    """The sides of experts at an address that some of two processes call; they are closed afterwards."""
    made = []

    def make(address: str, processes=(0, 1)) -> list[RemoteExperts]:
        for process in processes:
            side = RemoteExperts(MeshSpec(dp_size=1), [address], [KEY], waits=True, patience=600, silence=30)
            side.member = process, 2
            made.append(side)
        return made

    yield make
    for side in made:
        side.close()


def test_the_next_side_of_experts_is_called_as_the_one_before_by_a_number_of_its_own(experts_at):
    before, after = experts_at("127.0.0.1:1", (1, 1))
    before.generation = 3
    after.follows(before)
    first, second = before._hello(0), after._hello(0)
    assert (first.change, second.change) == (0, 1)
    assert second == msgspec.structs.replace(first, change=1)


def test_one_that_fails_in_a_step_is_waited_for_nowhere(pool, experts_at):
    """Its step has failed, and the process lives: the others hear of it though they wait for its rows at a process with experts."""
    joint = JointCalls(2)

    def serve(channel):
        process = receive(channel, Hello).process
        joint.enter(process)
        try:
            send(channel, Welcome())
            while True:
                call = receive(channel, Call)
                part = Part(call.number, "a layer", np.zeros(0), np.zeros(0, int))
                joint.together(process, part, lambda parts: [one.rows for one in parts])
                send(channel, Answered())
        finally:
            joint.leave(process)

    with listening(serve, services=(SERVICE,)) as listener:
        sides = experts_at(f"127.0.0.1:{listener.port}")
        for side, others in zip(sides, pool.map(AttentionProcesses, groups(2)), strict=True):
            side.connect()
            side.join(others)
        waits = sides[0].links[0].begin(lambda: Errand(Call("stack", 0, 1, 1, b"")))
        until(lambda: joint._parts)
        sides[1].give_up()
        waits.result(60)
        with pytest.raises(RuntimeError, match="process 1 of the attention side was waited for at a layer"):
            sides[0].tell(0), sides[0].agree(0)


def test_a_process_that_is_lost_while_all_wait_for_experts_that_are_not_there_yet_ends_the_wait(
    pool, experts_at, monkeypatch, caplog
):
    monkeypatch.setattr(loading, "expert_space", lambda *_: {})
    two, sides = groups(2), experts_at(f"127.0.0.1:{free_port()}")
    step = SimpleNamespace(placement=SimpleNamespace(physical_to_logical=sides[0].placement))
    started = [
        pool.submit(loading._connect_experts, None, step, side, Path(), b"side", group, True)
        for side, group in zip(sides, two, strict=True)
    ]
    two[0].on_change = lambda error: None
    until(lambda: caplog.text.count("it is waited for") >= 2)
    two[0]._lose(two[0].members[1])
    with pytest.raises(GroupError, match=r"process 1 .* has gone away"):
        started[0].result(60)


def test_where_the_others_come_when_the_generation_has_broken_already_nobody_waits_for_them(pool, experts_at):
    sides = experts_at("127.0.0.1:1")
    sides[0].abandon()
    for side, others in zip(sides, pool.map(AttentionProcesses, groups(2)), strict=True):
        side.join(others)
    with pytest.raises(RuntimeError, match="process 0 of the attention side was waited for at a layer"):
        pool.submit(sides[1].agree, 0).result(60)
