"""Processes of an attention side, as threads, that wait for each other at each layer over real links."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from deployments import KEY
from group_in_threads import groups
from processes import free_port
from test_expert_link import Experts
from waits import until

from dsjax.engine.afd.attention_processes import AttentionProcesses
from dsjax.engine.afd.expert_link import Errand
from dsjax.engine.afd.messages import Call
from dsjax.engine.afd.remote_experts import RemoteExperts
from dsjax.engine.setup import loading
from dsjax.hosts.group import GroupError
from dsjax.messaging import Endpoint, LinkListener
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


def test_what_is_no_word_is_an_error(pool, processes):
    waits = pool.submit(meet, processes[0], 0)
    processes[1]._links["0"].send(b"no word")
    with pytest.raises(RuntimeError, match="has gone or could not compute it"):
        waits.result(60)


def test_where_one_cannot_be_reached_the_others_say_so(pool):
    three = groups(3)
    made = [pool.submit(AttentionProcesses, group) for group in three[1:]]
    three[0].agreement.tell("attention processes", ["127.0.0.1:1", b"a ticket"])  # where nobody listens
    for one in made:
        with pytest.raises(GroupError, match=r"nobody answers at 127.0.0.1:1"):
            one.result(60)


def test_one_that_is_lost_is_not_waited_for(pool):
    three = groups(3)
    made = [pool.submit(AttentionProcesses, group) for group in three[:2]]
    listener = LinkListener(three[2].endpoint)  # of one that calls nobody
    three[2].agreement.tell("attention processes", [listener.address, listener.ticket])
    for group in three[:2]:
        group.lost[2] = GroupError("process 2 has gone away")
    for one in made:
        with pytest.raises(GroupError, match="process 2 has gone away"):
            one.result(60)


@pytest.fixture
def experts_at():
    """The sides of experts at an address that some of two processes call; they are closed afterwards."""
    made = []

    def make(address: str, processes=(0, 1)) -> list[RemoteExperts]:
        for process in processes:
            endpoint = Endpoint("127.0.0.1", KEY)
            spec = MeshSpec(dp_size=1)
            side = RemoteExperts(spec, [address], endpoint, waits=True, patience=600, owns_endpoint=True)
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
    first, second = before._opening(0), after._opening(0)
    assert (first.change, second.change) == (0, 1)
    assert second == msgspec.structs.replace(first, change=1)


def test_the_next_side_of_experts_has_the_endpoint_of_the_one_before(experts_at):
    before, after = experts_at("127.0.0.1:1", (1, 1))
    before.hand_over(after)
    before.close()
    before.endpoint.connect(before.endpoint.address, "attention").close()
    after.close()
    after.endpoint.close()


def test_one_that_fails_in_a_step_is_waited_for_nowhere(pool, experts_at):
    """Its step has failed, and the process lives: the others hear of it though they wait for its rows at a process with experts."""
    experts = Experts(answers=False)
    sides = experts_at(f"127.0.0.1:{experts.port}")
    try:
        for side, others in zip(sides, pool.map(AttentionProcesses, groups(2)), strict=True):
            side.connect()
            side.join(others)
        waits = (
            sides[0]
            .links[0]
            .begin(lambda: Errand(Call("stack", 0, 1, 1, b""), np.empty(0, np.uint8), np.empty(0, np.uint8)))
        )
        assert experts.asked.acquire(timeout=60)
        sides[1].give_up()
        with pytest.raises(RuntimeError, match="process 1 of the attention side was waited for at a layer"):
            sides[0].tell(0), sides[0].agree(0)
        assert not waits.done()
    finally:
        experts.close()


def test_a_process_that_is_lost_while_all_wait_for_experts_that_are_not_there_yet_ends_the_wait(
    pool, experts_at, monkeypatch, caplog
):
    monkeypatch.setattr(loading, "expert_space", lambda *_: {})
    two, sides = groups(2), experts_at(f"127.0.0.1:{free_port()}")
    step = SimpleNamespace(placement=SimpleNamespace(physical_to_logical=sides[0].placement))
    started = [
        pool.submit(
            loading._Loader._connect_experts,
            SimpleNamespace(
                args=None, step=step, directory=Path(), held=SimpleNamespace(name=b"side"), group=group, is_later=True
            ),
            side,
        )
        for side, group in zip(sides, two, strict=True)
    ]
    two[0].on_change = lambda error: None
    until(lambda: caplog.text.count("it is waited for") >= 2)
    two[0]._left(two[0].members[1])
    with pytest.raises(GroupError, match=r"process 1 .* has gone away"):
        started[0].result(60)


def test_where_the_others_come_when_the_generation_has_broken_already_nobody_waits_for_them(pool, experts_at):
    sides = experts_at("127.0.0.1:1")
    sides[0].abandon()
    for side, others in zip(sides, pool.map(AttentionProcesses, groups(2)), strict=True):
        side.join(others)
    with pytest.raises(RuntimeError, match="process 0 of the attention side was waited for at a layer"):
        pool.submit(sides[1].agree, 0).result(60)
