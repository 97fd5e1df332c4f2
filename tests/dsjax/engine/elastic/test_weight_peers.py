"""Processes as threads that give each other weights over real connections; one dies, hangs, or cannot go on."""

import json
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from group_in_threads import MemoryStore
from held_engines import Engine, assert_equal
from layouts import write_checkpoint

from dsjax.checkpoint.held_weights import HeldWeights
from dsjax.config import ModelConfig
from dsjax.engine.elastic import weight_peers
from dsjax.engine.elastic.weight_peers import WeightPeers
from dsjax.hosts import HostOptions
from dsjax.hosts.announcement import Announcement
from dsjax.hosts.cluster_key import ClusterKey
from dsjax.hosts.credentials import Credentials
from dsjax.hosts.group import GroupError, HostGroup
from dsjax.hosts.rendezvous import JoinRequest

KEY = Credentials(ClusterKey("k" * 32, "the test"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = write_checkpoint(tmp_path_factory.mktemp("tiny"))
    return directory, ModelConfig.from_dict(json.loads((directory / "config.json").read_text()))


def groups(count: int, seconds: int = 5) -> list[HostGroup]:
    store = MemoryStore()
    members = [JoinRequest(index, count, "host", 10 + index, "127.0.0.1", "m") for index in range(count)]
    return [
        HostGroup(HostOptions(("127.0.0.1", 1), count, index, "127.0.0.1", 1, seconds), members, store, credentials=KEY)
        for index in range(count)
    ]


class Processes:
    """Processes of two devices each, which hold their part of one mesh and then each load a mesh of their own devices at once."""

    def __init__(self, checkpoint, count=2, seconds=5, empty=()):
        self.directory, self.config = checkpoint
        self.groups = groups(count, seconds)
        self.held = [HeldWeights() for _ in range(count)]
        self.results: list = [None] * count
        self.peers: list[WeightPeers] = []
        for index, held in enumerate(self.held):
            if index not in empty:
                loaded = Engine(self.directory, self.config, f"dp={2 * count}", redundant=-32 % (2 * count), held=held)
                loaded.release(held, lost=set(range(2 * count)) - {2 * index, 2 * index + 1})

    def run(self, present=None, givers=()):
        """Have all in the mesh load. givers: stand by."""
        for group in self.groups:
            group.enter(Announcement(1, present or list(range(len(self.groups))), givers=list(givers)))
        self.peers = [
            WeightPeers(group, held, () if index in givers else givers)
            for index, (group, held) in enumerate(zip(self.groups, self.held, strict=True))
        ]
        threads = [threading.Thread(target=self._run, args=(index, givers)) for index in range(len(self.groups))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        for peers in self.peers:
            peers.close()

    def _run(self, index, givers):
        try:
            if index in givers:
                self.results[index] = self.peers[index].stand_by()
                return
            self.results[index] = self.load(index, held=self.held[index], peers=self.peers[index])
            self.groups[index].ask("weights")
            self.peers[index].finish()
        except Exception as error:
            self.results[index] = error
            self.peers[index].give_up(error)

    def load(self, index, **options):
        devices = jax.devices()[2 * index : 2 * index + 2]
        return Engine(self.directory, self.config, "dp=2", devices=devices, **options).params

    def check(self, index):
        assert isinstance(self.results[index], dict), self.results[index]
        assert_equal(self.results[index], self.load(index))

    def expert_bytes(self, index):
        return sum(array.nbytes for path, array in self.results[index].items() if ".experts." in path)


def test_each_takes_what_it_lacks_from_the_other_and_nothing_is_read(checkpoint):
    processes = Processes(checkpoint)
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


@pytest.mark.parametrize("fault", ["dies", "hangs", "has forgotten"])
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

    monkeypatch.setattr(WeightPeers, "_give_parts", fail)
    processes.run()
    over.set()
    for index in (0, 1):
        processes.check(index)
    assert sum(held.counts.read for held in processes.held) > 0


def test_a_giver_that_cannot_be_reached_costs_reading(checkpoint, monkeypatch):
    monkeypatch.setattr(weight_peers, "_listen", lambda group, give: None)
    processes = Processes(checkpoint)
    processes.run()
    for index in (0, 1):
        processes.check(index)
        assert processes.held[index].counts.received == 0
        assert processes.held[index].counts.read == processes.expert_bytes(index) // 2


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


def test_what_is_said_of_parts_survives_the_way(checkpoint):
    [held] = Processes(checkpoint, count=1).held
    from dsjax.checkpoint.held_weights import read_inventory

    for path, shards in read_inventory(held.inventory()).items():
        for (dtype, extent), shard in zip(shards, held.shards(path), strict=True):
            assert extent.is_like(shard.extent)
            assert np.dtype(dtype) == shard.values.dtype
