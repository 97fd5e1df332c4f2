"""A process that comes back under the id of one that is gone. `test_two_process_server.py` has real ones."""

from types import SimpleNamespace

from group_in_threads import MemoryStore

from dsjax.hosts import HostOptions
from dsjax.hosts.group import HostGroup
from dsjax.hosts.rendezvous import JoinRequest


def test_a_process_that_comes_back_keeps_its_way_in_until_it_has_joined():
    members = [JoinRequest(index, 2, "host", 10 + index, "127.0.0.1", "m") for index in (0, 1)]
    dropped, told = [], []
    rendezvous = SimpleNamespace(listener=SimpleNamespace(drop=dropped.append))
    options = HostOptions(("127.0.0.1", 1), 2, 0, "127.0.0.1", 1, 1)
    group = HostGroup(options, members, MemoryStore(), rendezvous=rendezvous)
    group.on_change = told.append
    group.unseen = {1}
    group._look({0})
    assert dropped == [1]
    assert "process 1" in str(told[0])
    group.comers._welcome = lambda arrival: None
    assert group.comers.let_in(JoinRequest(1, 2, "host", 99, "127.0.0.1", "m")) == group.generation + 1
    group._look({0})  # it is let in, and has not joined JAX's service yet
    assert dropped == [1]
    assert len(told) == 1
