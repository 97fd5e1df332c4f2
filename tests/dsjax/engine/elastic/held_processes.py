"""Groups whose processes are threads of a test, with a key for real connections between them."""

from group_in_threads import MemoryStore

from dsjax.hosts import HostOptions
from dsjax.messaging.cluster_key import ClusterKey
from dsjax.messaging.credentials import Credentials
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
