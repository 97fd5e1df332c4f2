"""From the host onto a mesh that other processes may share: each process brings the same host array, and keeps its devices' part."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding


def put(array: np.ndarray, sharding: Sharding) -> jax.Array:
    """A host array on the devices of ``sharding``. Where those are of several processes, each calls this with equal values.

    There ``jax.device_put`` would compare the values of all processes first, which is a collective, for every array.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    array = np.asarray(array)
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


def put_tree(tree: Any, shardings: Any) -> Any:
    """``put`` for each leaf of a pytree."""
    return jax.tree.map(put, tree, shardings)
