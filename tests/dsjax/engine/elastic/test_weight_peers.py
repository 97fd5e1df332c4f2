"""Processes as threads that give each other weights over real connections; one dies, hangs, or cannot go on."""

import json
import threading
import time
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from held_engines import Engine
from held_processes import Processes, groups
from layouts import write_checkpoint

from dsjax.checkpoint.held_weights import HeldWeights, read_inventory
from dsjax.config import ModelConfig
from dsjax.engine.elastic import weight_peers
from dsjax.engine.elastic.weight_peers import WeightPeers
from dsjax.hosts.agreement import Agreement
from dsjax.hosts.group import GroupError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = write_checkpoint(tmp_path_factory.mktemp("tiny"))
    return directory, ModelConfig.from_dict(json.loads((directory / "config.json").read_text()))


def test_each_takes_what_it_lacks_from_the_other_and_nothing_is_read(checkpoint):
    processes = Processes(checkpoint)
    for held in processes.held:  # what is said of parts survives the way
        for path, shards in read_inventory(held.inventory()).items():
            for (dtype, extent), shard in zip(shards, held.shards(path), strict=True):
                assert extent.is_like(shard.extent)
                assert np.dtype(dtype) == shard.values.dtype
    processes.run()
    for index in (0, 1):
        processes.check(index)
        counts = processes.held[index].counts
        assert (counts.read, counts.file) == (0, 0)
        assert counts.received == processes.expert_bytes(index) // 2


def test_one_that_comes_back_gets_all_from_the_others_who_share_the_load(checkpoint):
    processes = Processes(checkpoint, count=3, empty=(2,))
    given = [0, 0]

    @contextmanager
    def reading(index, real, path, part):
        given[index] += 1
        with real(path, part) as pieces:
            yield pieces

    for index in (0, 1):
        real = processes.held[index].reading
        processes.held[index].reading = lambda path, part, index=index, real=real: reading(index, real, path, part)
    processes.run()
    for index in range(3):
        processes.check(index)
    counts = processes.held[2].counts
    lost = processes.expert_bytes(2) // 3  # those that nobody holds but, before, this process: a third and its copies
    assert 0 < counts.read <= lost
    assert counts.received + counts.read == sum(array.nbytes for array in processes.results[2].values())
    assert min(given) > 0.3 * max(given)


def test_one_that_leaves_the_mesh_gives_what_it_has_before_it_forgets_it(checkpoint):
    processes = Processes(checkpoint)
    processes.run(present=[0], givers=[1])
    processes.check(0)
    assert processes.results[1] is True
    assert processes.held[0].counts.read == 0
    assert processes.held[0].counts.received == processes.expert_bytes(0) // 2


@pytest.mark.parametrize("fault", ["dies", "hangs", "has forgotten", "cannot be reached"])
def test_what_a_giver_does_not_give_is_read(checkpoint, monkeypatch, fault):
    processes, calls, over = Processes(checkpoint, seconds=1), [], threading.Event()
    give = WeightPeers._give_parts

    def fail(self, channel, take):
        calls.append(take)
        if len(calls) != 3:
            give(self, channel, take)
        elif fault == "dies":
            channel.send(b"y")
            channel.send_bytes(b"half of it")
            channel.close()
        elif fault == "hangs":
            over.wait(30)
        else:
            channel.send(b"n")

    if fault == "cannot be reached":
        monkeypatch.setattr(weight_peers, "_listen", lambda group, give: None)
    monkeypatch.setattr(WeightPeers, "_give_parts", fail)
    processes.run()
    over.set()
    for index in (0, 1):
        processes.check(index)
        counts = processes.held[index].counts
        if fault == "cannot be reached":
            assert (counts.received, counts.read) == (0, processes.expert_bytes(index) // 2)
    assert sum(held.counts.read for held in processes.held) > 0


def test_one_that_cannot_go_on_is_heard_of_and_what_is_held_stays(checkpoint):
    processes = Processes(checkpoint)
    before = [held.nbytes for held in processes.held]
    load = processes.load

    def fail(index, **options):
        if index == 1:
            raise ValueError("no room")
        return load(index, **options)

    processes.load = fail
    processes.run()
    assert isinstance(processes.results[0], GroupError)
    assert "process 1 (host, pid 11): no room" in str(processes.results[0])
    assert [held.nbytes for held in processes.held] == before


def test_a_loss_and_a_new_generation_are_heard_of_between_two_layers():
    first, second = groups(2)
    leader, follower = WeightPeers(first, HeldWeights()), WeightPeers(second, HeldWeights())
    second.announcements = SimpleNamespace(latest=0)
    leader.check()
    follower.check()
    first.lost[1] = GroupError("process 1 has gone away")
    second.announcements.latest = 1
    with pytest.raises(GroupError, match="process 1 has gone away"):
        leader.check()
    with pytest.raises(GroupError, match="generation 0 was given up while its weights were loaded"):
        follower.check()
    for peers in (leader, follower):
        peers.close()


def test_a_layer_is_given_back_though_it_was_taken_before_it_was_known_who_wants_it(checkpoint, monkeypatch):
    """A taker may be quicker than the giver, which then has yet to hear what that one wants; nothing waits for a time limit."""
    ask, late = Agreement.ask, []

    def ask_late(self, stage, value=None):
        answers = ask(self, stage, value)
        if stage == "weights wanted" and self._group.is_leader:
            late.append(True)
            taken.wait(60)
        return answers

    taken, give = threading.Event(), WeightPeers._give_parts

    def note(self, channel, take):
        give(self, channel, take)
        if self._group.is_leader:
            taken.set()

    monkeypatch.setattr(Agreement, "ask", ask_late)
    monkeypatch.setattr(WeightPeers, "_give_parts", note)
    processes = Processes(checkpoint)  # whose time limits are longer than `run` takes at most
    processes.run()
    assert late
    for index in (0, 1):
        processes.check(index)
        assert processes.held[index].counts.read == 0


def test_givers_are_asked_side_by_side(checkpoint, monkeypatch):
    """One of three processes lacks what the other two have, and either gives only when the other one was asked too."""
    both = threading.Barrier(2, timeout=60)
    give, met = WeightPeers._give_parts, []

    def give_together(self, channel, take):
        if not met and ".experts." in take.path:
            both.wait()
            met.append(True)
        give(self, channel, take)

    monkeypatch.setattr(WeightPeers, "_give_parts", give_together)
    processes = Processes(checkpoint, count=3, empty=(2,))
    for index, held in enumerate(processes.held[:2]):  # these need nothing
        held.clear()
        devices = jax.devices()[2 * index : 2 * index + 2]
        Engine(processes.directory, processes.config, "dp=2", devices=devices, held=held).release(held)
    processes.run()
    assert met
    processes.check(2)
    assert processes.held[2].counts.read == 0


def test_who_takes_nothing_for_the_heartbeats_timeout_is_not_waited_for_again():
    [group] = groups(1, seconds=1)
    peers = WeightPeers(group, HeldWeights())
    peers._wanted[7] = Counter({("a", 0): 1, ("a", 1): 1})
    began = time.monotonic()
    peers.wait_until_taken("a", 0)
    assert time.monotonic() - began > 0.9
    peers.wait_until_taken("a", 1)
    assert not peers._waits_for("a", 1)
    peers.close()
