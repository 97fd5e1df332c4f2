"""How processes of one deployment talk, on pyzmq: an `Endpoint` for control messages, a `Link` for bulk. docs/messaging.md.

Knows nothing of models, engines, groups or HTTP, and imports no JAX.
"""

from dsjax.messaging.cluster_key import Credentials, read_credentials
from dsjax.messaging.endpoint import Endpoint
from dsjax.messaging.link import Link, LinkListener
from dsjax.messaging.peer import NotAMemberError, Peer, PeerLostError, RefusedError, Request

__all__ = [
    "Credentials",
    "Endpoint",
    "Link",
    "LinkListener",
    "NotAMemberError",
    "Peer",
    "PeerLostError",
    "RefusedError",
    "Request",
    "read_credentials",
]
