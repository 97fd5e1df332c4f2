"""A function that is cut at work done outside gives what it would give whole, and gives away what it was given away."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sharding import MeshSpec
from sharding.cut import lower_cut, outside


class Doubling:
    """Doubles its first value on the host, and keeps the rest as it is."""

    def __init__(self):
        self.calls = 0

    def compile_work(self, work, described):
        assert work == "double"

        def run(values):
            self.calls += 1
            first, *others = values
            values.clear()
            return [jax.device_put(2 * np.asarray(first), first.sharding), *others]

        return run, [one.sharding for one in described]


@pytest.fixture(scope="module")
def described():
    sharding = NamedSharding(MeshSpec().build(jax.devices()[:1]), P())
    return lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def step(params, state, x):
    y = x @ params["a"] + state["seen"]
    early = jnp.sin(y)
    results = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in (y, state["cache"])]
    for _ in range(2):
        y, cache = outside("double", [y, state["cache"]], results)
        state = state | {"cache": cache}
    return {"seen": state["seen"] + y, "cache": state["cache"] + 1, "idle": state["idle"] * 1}, early + y


def test_pieces_give_what_the_function_gives(described):
    state = {"seen": described(4, 4), "cache": described(3), "idle": described(2)}
    arguments = {"a": described(4, 4)}, state, described(4, 4)
    work = Doubling()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of arrays that were given away for nothing
        program = lower_cut(step, *arguments, donate_argnum=1, worker=work).compile()
    params, state, x = jax.tree.map(lambda one: jax.device_put(jnp.ones(one.shape), one.sharding), arguments)
    made, y = program(params, state, x)
    assert work.calls == 2
    np.testing.assert_allclose(y, np.sin(5.0) + 20.0, rtol=1e-6)
    told, found = (jax.tree.map(lambda one: (one.shape, one.dtype), tree) for tree in (program.out_info, (made, y)))
    assert told == found
    assert jax.tree.leaves(program.output_shardings) == [one.sharding for one in jax.tree.leaves((made, y))]
    np.testing.assert_array_equal(made["seen"], np.full((4, 4), 21.0))
    np.testing.assert_array_equal(made["cache"], np.full(3, 2.0))
    assert state["seen"].is_deleted()
    assert state["idle"].is_deleted()
    assert not params["a"].is_deleted()
    assert not x.is_deleted()


def test_a_function_without_outside_is_one_program(described):
    add = lambda state, x: state + x  # noqa: E731
    program = lower_cut(add, described(3), described(3), donate_argnum=0, worker=Doubling()).compile()
    np.testing.assert_array_equal(program(jnp.ones(3), jnp.ones(3)), np.full(3, 2.0))
    assert len(program.runs) == 1
    assert program.memory_analysis().alias_size_in_bytes == 12
