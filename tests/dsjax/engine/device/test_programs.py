"""What the host sends to the devices with every step lies where `put` would have it."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dsjax.engine.device.programs import RepeatedPut
from sharding import MeshSpec
from sharding.arrays import put


@pytest.mark.parametrize("mesh", ["dp=1", "dp=4", "dp=2,tp=2"])
def test_what_is_put_again_and_again_lies_where_put_has_it(mesh):
    spec = MeshSpec.parse(mesh)
    rows = NamedSharding(spec.arrange(jax.devices()[: spec.num_devices]), P(spec.batch_axes))
    put_rows, rng = RepeatedPut(rows), np.random.default_rng(0)
    for shape in [(4, 3), (8, 2), (4, 3), (4, 0), (4, 3), (4, 0)]:
        values = rng.integers(-9, 9, shape, np.int32)
        found, expected = put_rows(values), put(values, rows)
        np.testing.assert_array_equal(found, values)
        assert (found.aval, found.sharding, found.committed) == (expected.aval, rows, True)
        assert [
            (shard.device, shard.index, shard.data.tolist()) for shard in found.addressable_shards
        ] == [(shard.device, shard.index, shard.data.tolist()) for shard in expected.addressable_shards]  # fmt: skip


def test_values_of_a_type_that_jax_narrows_are_narrowed_each_time():
    put_rows = RepeatedPut(NamedSharding(MeshSpec.parse("dp=2").arrange(jax.devices()[:2]), P("dp")))
    for _ in range(3):
        assert put_rows(np.arange(4)).dtype == np.int32
