"""Processes of an attention side, threads with real links, wait for each other at each layer. Also tests `setup/attention_side.py`."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from deployments import KEY
from group_in_threads import groups
from processes import free_port
from test_expert_link import Experts, call
from waits import until

from dsjax.engine.afd.attention_processes import AttentionProcesses
from dsjax.engine.afd.remote_experts import RemoteExperts
from dsjax.engine.setup import attention_side
from dsjax.engine.setup.args import EngineArgs
from dsjax.hosts.group import GroupError
from dsjax.messaging import Endpoint, LinkListener
from sharding import MeshSpec


@pytest.fixture
def pool():
    with ThreadPoolExecutor(3) as pool:
        yield pool


def joined(group):
    """A process of an attention side that has met the others."""
    with contextlib.ExitStack() as failed:
        process = AttentionProcesses(Endpoint("127.0.0.1", KEY), b"side %d" % group.options.process_id, group)
        failed.callback(process.close)
        process.connect()
        failed.pop_all()
        return process


@contextlib.contextmanager
def several(pool, count):
    made = list(pool.map(joined, groups(count)))
    yield made
    for one in made:
        one.close()


@pytest.fixture
def processes(pool):
    with several(pool, 3) as made:
        yield made


def meet(process, number):
    process.arrive(number)
    return process.wait(number)


def test_one_that_is_late_is_waited_for_at_that_layer_by_all(pool, processes):
    """It may have told of a layer that the others are at, and is told of the next one before it has looked."""
    first = [pool.submit(meet, process, 0) for process in processes[:2]]
    processes[2].arrive(0)
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
    processes[1]._barrier = 7
    first, last = (pool.submit(meet, process, 0) for process in (processes[0], processes[2]))
    processes[1].arrive(0)
    with pytest.raises(RuntimeError, match="waits at its layer 7, and this process at 0"):
        first.result(60)
    processes[1].close()
    with pytest.raises(RuntimeError):
        last.result(60)


def test_what_is_no_word_is_an_error(pool, processes):
    waits = pool.submit(meet, processes[0], 0)
    processes[1]._links["0"].send(b"no word")
    with pytest.raises(RuntimeError, match="has gone or could not compute it"):
        waits.result(60)


@pytest.mark.parametrize(("silent", "why"), [(0, "nobody answers at 127.0.0.1:1"), (2, "process 2 .* has gone away")])
def test_one_that_cannot_be_reached_or_is_lost_is_not_waited_for(pool, silent, why):
    """Each process connects to those before it."""
    three = groups(3)
    others = [group for group in three if group is not three[silent]]
    made = [pool.submit(joined, group) for group in others]
    listener = LinkListener(three[silent].endpoint)  # of one that calls nobody
    address = listener.address if silent else "127.0.0.1:1"
    three[silent].agreement.contribute("attention side", b"side")
    three[silent].agreement.contribute("attention processes", [address, listener.ticket])
    if silent:
        three[0].lose(three[0].members[silent])
    for one in made:
        with pytest.raises(GroupError, match=why):
            one.result(60)


def experts_of(attention, address, change=0):
    """The side of experts at an address that an attention process calls."""
    rows = np.zeros((0, 0), np.int32)
    return RemoteExperts(MeshSpec(dp_size=1), [address], attention, {}, rows, waits=True, patience=600, change=change)


def test_the_next_side_of_experts_is_called_over_the_same_endpoint_as_the_one_before_by_a_number_of_its_own():
    with contextlib.closing(AttentionProcesses(Endpoint("127.0.0.1", KEY), b"side")) as alone:
        before, after = (experts_of(alone, "127.0.0.1:1", change) for change in range(2))
        assert before._opening(0).change == 0
        assert after._opening(0) == msgspec.structs.replace(before._opening(0), change=1)
        before.close()
        alone.endpoint.connect(alone.endpoint.address, "attention").close()
        assert alone._to_experts == set(after.links)


def test_one_that_fails_in_a_step_is_waited_for_nowhere(pool):
    """Its step has failed, and the process lives: the others hear of it though they wait for its rows at a process with experts."""
    with contextlib.closing(Experts(answers=False)) as experts, several(pool, 2) as two:
        first, second = (experts_of(attention, f"127.0.0.1:{experts.port}") for attention in two)
        first.connect()
        second.connect()
        waits = call(first.links[0])[0]
        assert experts.asked.acquire(timeout=60)
        second.give_up()
        with pytest.raises(RuntimeError, match="process 1 of the attention side was waited for at a layer"):
            meet(two[0], 0)
        assert not waits.done()


def test_a_process_that_is_lost_while_all_wait_for_experts_that_are_not_there_yet_ends_the_wait(
    pool, monkeypatch, caplog
):
    monkeypatch.setattr(attention_side, "expert_space", lambda *_: {})
    two, address = groups(2), f"127.0.0.1:{free_port()}"
    args = EngineArgs(attention_mesh="dp=1", expert_mesh="ep=1", afd_role="attention", afd_address=address)
    step = Mock(**{"placement.physical_to_logical": np.zeros((0, 0), np.int32)})
    step.mesh.devices = np.array([SimpleNamespace(platform="cpu")])
    with contextlib.ExitStack() as opened:
        connect = partial(attention_side.connect_experts, known=True)
        started = [pool.submit(connect, args, step, Path(), group, b"side", opened) for group in two]
        two[0].on_change = lambda error: None
        until(lambda: caplog.text.count("it is waited for") >= 2)
        two[0]._on_disconnect(two[0].members[1])
        with pytest.raises(GroupError, match=r"process 1 .* has gone away"):
            started[0].result(60)


def test_where_the_others_come_when_the_generation_has_broken_already_nobody_waits_for_them(pool):
    two = list(pool.map(lambda group: AttentionProcesses(group.endpoint, b"side", group), groups(2)))
    two[0].abandon()
    list(pool.map(AttentionProcesses.connect, two))
    with pytest.raises(RuntimeError, match="process 0 of the attention side was waited for at a layer"):
        pool.submit(two[1].wait, 0).result(60)
    for process in two:
        process.close()
