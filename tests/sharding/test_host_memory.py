"""A table in the hosts' memory: where its array lies, and that the rows which a program fetches from it are the table's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sharding import MeshSpec, Rules
from sharding.host_memory import HOST, host_sharding, memory_of, on_device, rows_from_host

V, D = 50, 6


def test_only_arrays_with_a_named_axis_lie_in_host_memory():
    spec = MeshSpec.parse("dp=2,tp=2")
    rules = Rules.for_mesh(spec).replace(embedded_vocab=()).in_host_memory("embedded_vocab")
    mesh = spec.build()
    table, head = (rules.sharding(mesh, axes, (V, 8)) for axes in (("embedded_vocab", "embed"), ("embed", "vocab")))
    assert not on_device(table)
    assert on_device(head)
    assert table.spec == P(None, None)
    assert rules.replace(vocab=()).in_host == {"embedded_vocab"}, "another change keeps it"
    assert on_device(Rules.for_mesh(spec).sharding(mesh, ("embedded_vocab", "embed"), (V, 8)))


@pytest.mark.parametrize("layout", ["dp=1", "dp=4,tp=2", "dp=8,ep=2"])
def test_rows_of_indices_that_the_program_makes_are_those_of_the_table(layout):
    spec = MeshSpec.parse(layout)
    mesh = spec.build()
    values = np.arange(V * D, dtype=np.uint16).reshape(V, D)
    whole = host_sharding(NamedSharding(mesh, P()))
    parts = [jax.device_put(values, memory_of(device, whole)) for device in mesh.devices.flat]
    table = jax.make_array_from_single_device_arrays(values.shape, whole, parts)
    assert table.sharding.memory_kind == HOST

    @jax.jit
    def step(table, before):
        return rows_from_host(table, (3 * before + 1) % V, mesh, spec.batch_axes)

    before = np.arange(spec.dp_size * 5, dtype=np.int32).reshape(spec.dp_size, 5)
    rows = step(table, jax.device_put(before, NamedSharding(mesh, P(spec.batch_axes))))
    np.testing.assert_array_equal(rows, values[(3 * before + 1) % V])
    assert on_device(rows.sharding)


def test_devices_that_are_only_described_have_host_memory_too():
    """A topology's devices know of no memory, and JAX drops the kind of it that a sharding over them is given."""
    mesh = MeshSpec.parse("dp=2").build()

    class Forgetful(NamedSharding):
        def with_memory_kind(self, kind):
            return NamedSharding(self.mesh, self.spec)

    sharding = host_sharding(Forgetful(mesh, P()))
    assert sharding.memory_kind == HOST
    assert not on_device(sharding)
    look_up = jax.jit(lambda table: rows_from_host(table, jnp.zeros((2, 3), jnp.int32), mesh, ("dp", "ep")))
    text = look_up.lower(jax.ShapeDtypeStruct((V, D), jnp.float32, sharding=sharding)).as_text()
    assert 'mhlo.memory_kind = "pinned_host"' in text
    assert '_xla_compute_type = "host"' in text
