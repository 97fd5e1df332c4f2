"""Programs of a few devices that compile at once, and whoever compiles and keeps them."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dsjax.engine.program_cache.compiled_programs import CompiledPrograms
from dsjax.engine.program_cache.folder import ProgramFolder
from dsjax.engine.program_cache.library import ProgramLibrary, Shelf


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


def never_lowered():
    raise AssertionError("the program is traced, though it was kept")


def programs_in(tmp_path, mesh: Mesh, lower=None) -> CompiledPrograms:
    """Those of a process of its own, as far as the folder knows."""
    shelf = Shelf(ProgramLibrary(ProgramFolder.inside(tmp_path)), mesh, ("model",))
    return CompiledPrograms(lower or (lambda key: lowered(mesh)), lambda: None, shelf)
