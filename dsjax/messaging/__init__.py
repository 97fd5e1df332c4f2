"""Messaging between processes of a deployment, on pyzmq: an `Endpoint` for control messages, a `Link` for bulk data. docs/messaging.md.

Independent of models, engines, groups and HTTP; imports no JAX. Names are imported on first access, so that `dsjax plan` can read
the options of a group without pyzmq.
"""

import importlib
from typing import Any

_MODULES = {
    "Credentials": "cluster_key",
    "Endpoint": "endpoint",
    "Link": "link",
    "LinkListener": "link",
    "NotAMemberError": "peer",
    "Peer": "peer",
    "PeerLostError": "peer",
    "RefusedError": "peer",
    "Request": "peer",
    "read_credentials": "cluster_key",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"dsjax.messaging.{_MODULES[name]}"), name)
