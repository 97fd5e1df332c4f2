"""Processes as threads, each with weights on devices of its own, that give each other weights over real connections."""

import threading

import jax
from group_in_threads import MemoryStore
from held_engines import Engine, assert_equal

from dsjax.checkpoint.held_weights import HeldWeights
from dsjax.engine.elastic.weight_peers import WeightPeers
from dsjax.hosts import HostOptions
from dsjax.hosts.announcement import Announcement
from dsjax.hosts.cluster_key import ClusterKey
from dsjax.hosts.credentials import Credentials
from dsjax.hosts.group import HostGroup
from dsjax.hosts.rendezvous import JoinRequest

KEY = Credentials(ClusterKey("k" * 32, "the test"))


def groups(count: int, seconds: int = 240, start: int = 60) -> list[HostGroup]:
    """The groups of so many processes, each of which is a thread. seconds, start: their heartbeat's and their start's timeout."""
    store = MemoryStore()
    members = [JoinRequest(index, count, "host", 10 + index, "127.0.0.1", "m") for index in range(count)]
    return [
        HostGroup(
            HostOptions(("127.0.0.1", 1), count, index, "127.0.0.1", start, seconds), members, store, credentials=KEY
        )
        for index in range(count)
    ]


_fresh: dict[tuple, dict] = {}
"""Parameters that were loaded from the checkpoint alone, by its folder, the process and the form."""


class Processes:
    """Processes of two devices each, which hold their part of one mesh and then each load a mesh of their own devices at once."""

    def __init__(self, checkpoint, count=2, seconds=240, empty=(), **form):
        (self.directory, self.config), self.form = checkpoint, form
        self.groups = groups(count, seconds)
        self.held = [HeldWeights() for _ in range(count)]
        self.results: list = [None] * count
        self.peers: list[WeightPeers] = []
        for index, held in enumerate(self.held):
            if index not in empty:
                extra = -32 % (2 * count)
                loaded = Engine(self.directory, self.config, f"dp={2 * count}", redundant=extra, held=held, **form)
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
            thread.join(120)
            assert not thread.is_alive()
        for peers in self.peers:
            peers.close()

    def _run(self, index, givers):
        try:
            if index in givers:
                self.results[index] = self.peers[index].stand_by()
                return
            self.results[index] = self.load(index, held=self.held[index], peers=self.peers[index])
            self.groups[index].agreement.ask("weights")
            self.peers[index].finish()
        except Exception as error:
            self.results[index] = error
            self.peers[index].give_up(error)

    def load(self, index, **options):
        devices = jax.devices()[2 * index : 2 * index + 2]
        return Engine(self.directory, self.config, "dp=2", devices=devices, **self.form, **options).params

    def check(self, index):
        """Check that a process has what a fresh load gives."""
        assert isinstance(self.results[index], dict), self.results[index]
        key = self.directory, index, *self.form.items()
        if key not in _fresh:
            _fresh[key] = self.load(index)
        assert_equal(self.results[index], _fresh[key])

    def expert_bytes(self, index):
        return sum(array.nbytes for path, array in self.results[index].items() if ".experts." in path)
