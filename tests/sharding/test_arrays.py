"""Parts of arrays that are on this process's devices, in the order of the axis that they divide."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sharding import MeshSpec
from sharding.arrays import own_parts, put_own_parts


def test_parts_come_in_the_order_of_the_axis_and_not_of_the_devices():
    devices = jax.devices()[:4]
    mesh = MeshSpec.parse("dp=2,tp=2").arrange([devices[place] for place in (2, 0, 3, 1)])
    spec = MeshSpec.parse("dp=2,tp=2").token_axes
    described = jax.ShapeDtypeStruct((8, 3), jnp.float32, sharding=NamedSharding(mesh, P(spec)))
    parts = [np.full((2, 3), number, np.float32) for number in range(4)]
    array = put_own_parts(parts, described)
    np.testing.assert_array_equal(array, np.concatenate(parts))
    assert [int(part[0, 0]) for part in own_parts(array)] == [0, 1, 2, 3]
    assert [next(iter(part.devices())) for part in own_parts(array)] == list(mesh.devices.flat)
