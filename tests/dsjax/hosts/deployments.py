"""Credentials of two deployments, and members of a group."""

from dsjax.hosts.wire import JoinRequest
from dsjax.messaging import Credentials
from dsjax.messaging.cluster_key import ClusterKey

KEY = Credentials(ClusterKey("k" * 32, "the test"))
OTHER = Credentials(ClusterKey("o" * 32, "the other test"))


def request(process_id: int, port: int, pid: int = 10) -> JoinRequest:
    return JoinRequest(process_id, 4, "host", pid, "127.0.0.1", "machine", port)
