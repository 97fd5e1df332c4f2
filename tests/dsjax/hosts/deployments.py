"""Credentials of two deployments, members of a group, and what LeaderWorkerSet tells one."""

from dsjax.hosts.wire import JoinRequest
from dsjax.messaging import Credentials
from dsjax.messaging.cluster_key import ClusterKey

KEY = Credentials(ClusterKey("k" * 32, "the test"))
OTHER = Credentials(ClusterKey("o" * 32, "the other test"))


LEADER_WORKER_SET = {"LWS_LEADER_ADDRESS": "127.0.0.1", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}


def request(process_id: int, port: int, pid: int = 10) -> JoinRequest:
    return JoinRequest(process_id, 4, "host", pid, "127.0.0.1", "machine", port)
