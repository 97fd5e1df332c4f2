"""Programs that are kept, and found again for other devices: they compute the same, and nothing is compiled a second time."""

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dsjax.engine.contract.executor import ExecutorLimits
from dsjax.engine.device.program_library import ProgramLibrary


def mesh_of(order: list[int]) -> Mesh:
    return Mesh(np.array([jax.devices()[i] for i in order]).reshape(2, 2), ("a", "b"))


def lowered(mesh: Mesh):
    """Every device adds what tells its place in the mesh to its part, and to the sum of all."""

    def on_each(x):
        place = 100 * jax.lax.axis_index("a") + 1000 * jax.lax.axis_index("b")
        return 10 * x + place, jax.lax.psum(x, ("a", "b"))

    run = jax.shard_map(on_each, mesh=mesh, in_specs=P("a", "b"), out_specs=(P("a", "b"), P(None, None)))
    described = jax.ShapeDtypeStruct((4, 4), np.float32, sharding=NamedSharding(mesh, P("a", "b")))
    return jax.jit(run, donate_argnums=0).lower(described)


X = np.arange(16, dtype=np.float32).reshape(4, 4)


def run_on(program, mesh: Mesh) -> list[np.ndarray]:
    given = jax.device_put(X, NamedSharding(mesh, P("a", "b")))
    found = program(given)
    assert given.is_deleted()  # donated, as it was compiled
    assert found[0].sharding == NamedSharding(mesh, P("a", "b"))
    return [np.asarray(array) for array in found]


@pytest.fixture
def jax_cache(tmp_path):
    """JAX's own cache of compiled programs, empty, for programs of any size."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (str(tmp_path), 0), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 0, 3, 1], [4, 5, 6, 7]])
def test_a_program_computes_the_same_on_devices_it_was_not_compiled_for(order):
    library = ProgramLibrary()
    first, second = mesh_of([0, 1, 2, 3]), mesh_of(order)
    expected = run_on(library.shelf("about", first).compile("key", lowered(first)), first)
    shelf = library.shelf("about", second)
    for found, wanted in zip(run_on(shelf.find("key"), second), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert shelf.find("another key") is None
    assert library.shelf("about something else", second).find("key") is None
    assert library.works


def test_so_does_one_that_came_out_of_the_cache_of_jax_itself(jax_cache):
    first, second = mesh_of([0, 1, 2, 3]), mesh_of([3, 2, 1, 0])
    expected = run_on(lowered(first).compile(), first)
    assert list(jax_cache.iterdir())
    library = ProgramLibrary()  # as of a process that was started again
    library.shelf("about", first).compile("key", lowered(first))
    found = run_on(library.shelf("about", second).find("key"), second)
    for array, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(array, wanted)


def test_where_a_program_cannot_be_kept_that_is_said_once_and_it_is_compiled_all_the_same(caplog, monkeypatch):
    monkeypatch.setattr("dsjax.engine.device.program_library._keep", lambda *_: 1 / 0)
    library, mesh = ProgramLibrary(), mesh_of([0, 1, 2, 3])
    for key in "ab":
        assert run_on(library.shelf("about", mesh).compile(key, lowered(mesh)), mesh)
    assert library.shelf("about", mesh).find("a") is None
    assert len([record for record in caplog.records if "cannot be kept" in record.message]) == 1


def test_a_cache_is_made_as_large_as_its_programs_were_compiled_for_where_that_costs_little():
    library, found = ProgramLibrary(), ExecutorLimits(1, 1, 8, 4, 1000, 2, 32, 64)
    assert library.settled("dp=2", found) == found
    for foretold, pages in ((990, 990), (1001, 1000), (900, 1000)):
        library.pages["dp=2"] = foretold
        assert library.settled("dp=2", found).pages_per_rank == pages
