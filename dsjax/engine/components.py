"""The parts of a model that bytes and parameters are shown under."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
from jaxtyping import Array


def component(path: str) -> str:
    """The part of the model that a parameter's path belongs to."""
    for part, name in ((".experts.", "routed experts"), (".shared.", "shared experts"), (".router.", "router")):
        if part in path:
            return name
    if ".attn." in path:
        return "attention"
    if ".eh_proj." in path:
        return "MTP projection"
    if ".mlp." in path:
        return "dense MLP"
    return {"embed": "embedding", "head": "head"}.get(path.split(".")[0], "norms")


def device_bytes(params: Mapping[str, Array | jax.ShapeDtypeStruct]) -> dict[str, int]:
    """Bytes by component that one device holds of ``params``: arrays, or their descriptions with shardings."""
    found: dict[str, int] = {}
    for path, array in params.items():
        local = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        found[component(path)] = found.get(component(path), 0) + local
    return found
