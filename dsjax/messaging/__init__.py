"""How processes of one deployment talk, on pyzmq: an `Endpoint` for control messages, a `Link` for bulk. docs/messaging.md.

Knows nothing of models, engines, groups or HTTP, and imports no JAX. Names are imported when they are first asked for: `dsjax plan` reads
the options of a group without pyzmq.
"""

import importlib
from typing import Any

_MODULES = {
    "cluster_key": ("Credentials", "read_credentials"),
    "endpoint": ("Endpoint",),
    "link": ("Link", "LinkListener"),
    "peer": ("NotAMemberError", "Peer", "PeerLostError", "RefusedError", "Request"),
}

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


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _MODULES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"dsjax.messaging.{module}"), name)
