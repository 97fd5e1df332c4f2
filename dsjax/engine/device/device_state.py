"""``DeviceState``: what a step needs of the one before, on the device: its arrays, and its pages copied and cleared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int

from dsjax.engine.contract.executor import ExecutorLimits
from dsjax.engine.device import cache as device_cache
from dsjax.engine.device.sampler import SlotSampling
from dsjax.model.paging import Cache
from dsjax.model.step import ModelStep
from sharding.placement import CopyTables

Tree = TypeVar("Tree")

MOST_COUNTED = 32_000
"""Times that a token is counted in an output at most: penalties for more do not grow any further."""

MOVED_PAGES = 16
"""Pages of a rank that one program takes to host memory or brings from it."""
PagesOnTheWay = dict[str, Array]
"""Arrays as ``describe_moved`` describes them."""


@jax.tree_util.register_dataclass
@dataclass
class DeviceState:
    """One donated pytree: every program takes it and gives it back. docs/step-as-data.md explains each field."""

    cache: Cache
    filled: Bool[Array, "P_all G"] | None
    tables: Int[Array, "B Z Pr"]
    start: Int[Array, "B Z"]
    last_token: Int[Array, "B Z"]
    drafts: Int[Array, "B Z n"] | None
    num_drafts: Int[Array, "B Z"]
    sampling: SlotSampling
    counts: Int[Array, "B Z V"]  # uint16
    copies: CopyTables | None
    loads: Int[Array, "L N X"] | None


def describe(
    step: ModelStep, limits: ExecutorLimits, num_drafts: int = 0, *, counts_loads: bool = False
) -> DeviceState:
    """Shapes, dtypes and shardings of the state's arrays. num_drafts: at most. counts_loads: whether experts' loads are added up."""
    ranks, slots = limits.num_ranks, limits.max_rows_decode
    rows, everywhere = NamedSharding(step.mesh, P(step.spec.batch_axes)), NamedSharding(step.mesh, P())

    def array(*shape: int, dtype=np.int32):
        return jax.ShapeDtypeStruct((ranks, slots, *shape), dtype, sharding=rows)

    integers = {"num_prompt_tokens": np.int32, "seed": np.uint32, "seed_high": np.uint32, "top_k": np.int32}
    copies = None
    if step.config.is_moe:
        tables = step.placement.tables
        copies = CopyTables(*(jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=everywhere) for t in tables))
    loads = None
    if counts_loads:
        # A device counts what its own experts compute, or, where these are apart, which experts its tokens go to.
        counted = step.placement.n_physical // (1 if step.apart is not None else step.spec.ep_size)
        shape = (step.moe_layers_with_module, step.spec.num_devices, counted)
        loads = jax.ShapeDtypeStruct(shape, np.int32, sharding=NamedSharding(step.mesh, P(None, step.spec.token_axes)))
    filled = None
    if num_drafts and step.ends:
        shape = (ranks * limits.pages_per_rank, limits.page_size)
        filled = jax.ShapeDtypeStruct(shape, bool, sharding=rows)
    return DeviceState(
        cache=device_cache.describe(step, limits.pages_per_rank),
        filled=filled,
        tables=array(limits.max_pages),
        start=array(),
        last_token=array(),
        drafts=array(num_drafts) if num_drafts else None,
        num_drafts=array(),
        sampling=SlotSampling(
            **{field.name: array(dtype=integers.get(field.name, np.float32)) for field in fields(SlotSampling)}
        ),
        counts=array(limits.vocab_size if step.ends else 1, dtype=np.uint16),  # an empty array would lose its sharding
        copies=copies,
        loads=loads,
    )


def description(tree: Tree) -> Tree:
    """Descriptions of a tree's arrays, which may themselves be descriptions: the arrays are donated and must not be kept."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), tree)


def copy_pages(step: ModelStep, state: DeviceState, pairs: Int[Array, "B K 2"]) -> DeviceState:
    """Copy pages (from, to) of each rank, in all layers; (0, 0) is nothing: nobody reads page 0."""

    def local(cache, filled, pairs):
        sources, targets = pairs[0].T
        cache = {name: array.at[:, targets].set(array[:, sources]) for name, array in cache.items()}
        return cache, None if filled is None else filled.at[targets].set(filled[sources])

    return _change_pages(step, state, local, pairs)


def clear_pages(step: ModelStep, state: DeviceState, marked: Bool[Array, "B P"]) -> DeviceState:
    """Zeros in the pages that are marked, rank by rank, in all layers."""

    def local(cache, filled, marked):
        def clear(array: Array, axis: int) -> Array:
            at = marked[0].reshape([1] * axis + [-1] + [1] * (array.ndim - axis - 1))
            return jnp.where(at, jnp.zeros((), array.dtype), array)

        cache = {name: clear(array, 1) for name, array in cache.items()}
        return cache, None if filled is None else clear(filled, 0)

    return _change_pages(step, state, local, marked)


def describe_moved(step: ModelStep, state: DeviceState) -> dict[str, jax.ShapeDtypeStruct]:
    """Pages on their way to host memory or from it: of each array that has pages ``[B, MOVED_PAGES, layers, page_size, …]``."""
    B, batch = step.spec.dp_size, step.spec.batch_axes
    moved = {}
    for name, array in state.cache.items():
        layers, _, *rest = array.shape
        sharding = NamedSharding(step.mesh, P(batch, None, None, *array.sharding.spec[2:]))
        moved[name] = jax.ShapeDtypeStruct((B, MOVED_PAGES, layers, *rest), array.dtype, sharding=sharding)
    if state.filled is not None:
        shape = (B, MOVED_PAGES, *state.filled.shape[1:])
        moved["filled"] = jax.ShapeDtypeStruct(shape, bool, sharding=NamedSharding(step.mesh, P(batch)))
    return moved


def take_pages(step: ModelStep, state: DeviceState, pages: Int[Array, "B K"]) -> PagesOnTheWay:
    """Copies of pages, rank by rank."""

    def local(cache, filled, pages):
        taken = {name: jnp.moveaxis(array[:, pages[0]], 1, 0)[None] for name, array in cache.items()}
        return taken if filled is None else taken | {"filled": filled[pages[0]][None]}

    return _over_pages(step, state, local, _specs_of_moved(step, state), pages)


def put_pages(step: ModelStep, state: DeviceState, moved: PagesOnTheWay, pages: Int[Array, "B K"]) -> DeviceState:
    """Write pages, rank by rank; page 0 is nothing: nobody reads it."""

    def local(cache, filled, pages, moved):
        cache = {name: array.at[:, pages[0]].set(jnp.moveaxis(moved[name][0], 0, 1)) for name, array in cache.items()}
        return cache, None if filled is None else filled.at[pages[0]].set(moved["filled"][0])

    return _change_pages(step, state, local, pages, (moved, _specs_of_moved(step, state)))


def _cache_specs(step: ModelStep) -> dict[str, P]:
    return {name: array.sharding.spec for name, array in device_cache.describe(step, 2).items()}


def _specs_of_moved(step: ModelStep, state: DeviceState) -> dict[str, P]:
    batch = step.spec.batch_axes
    specs = {name: P(batch, None, None, *spec[2:]) for name, spec in _cache_specs(step).items()}
    return specs if state.filled is None else specs | {"filled": P(batch)}


def _change_pages(step: ModelStep, state: DeviceState, local: Callable, argument: Array, *further) -> DeviceState:
    """The state with the cache and the marks of filled pages that ``local`` makes, as ``_over_pages`` calls it."""
    changed = _cache_specs(step), P(step.spec.batch_axes)
    cache, filled = _over_pages(step, state, local, changed, argument, *further)
    return dataclasses.replace(state, cache=cache, filled=filled)


def _over_pages(step: ModelStep, state: DeviceState, local: Callable, out_specs, argument: Array, *further):
    """``local(cache, filled, argument, *further)`` on each rank's part of them; ``further``: pairs of what else it takes and its specs."""
    rows = P(step.spec.batch_axes)
    specs = _cache_specs(step), rows, rows, *(spec for _, spec in further)
    run = jax.shard_map(local, mesh=step.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
    return run(state.cache, state.filled, argument, *(value for value, _ in further))
