"""From the host onto a mesh that other processes may share: each process brings the same host arrays, and keeps its devices' part."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding


def put(tree: Any, sharding: Sharding) -> Any:
    """A pytree of host arrays on the devices of ``sharding``. Where those are of several processes, each calls this with equal values.

    There ``jax.device_put`` would compare the values of all processes first, which is a collective, for every array.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)
    arrays = jax.tree.map(np.asarray, tree)
    return jax.tree.map(lambda a: jax.make_array_from_callback(a.shape, sharding, a.__getitem__), arrays)
