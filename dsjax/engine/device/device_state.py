"""``DeviceState``: the arrays on the devices that one step passes to the next, and programs that copy, clear and move pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int

from dsjax.engine.contract.executor import ExecutorLimits
from dsjax.engine.device import cache as device_cache
from dsjax.engine.device.sampler import SAMPLING_COLUMNS
from dsjax.model.cache_groups import Table
from dsjax.model.paging import Cache
from dsjax.model.step import ModelStep
from sharding.placement import CopyTables

Tree = TypeVar("Tree")

START, LAST_TOKEN, NUM_DRAFTS, SAMPLING = range(4)
"""Columns of ``DeviceState.slots``; from ``SAMPLING`` on ``sampler.SlotSampling``, from ``DRAFTS`` on the drafts."""
DRAFTS = SAMPLING + SAMPLING_COLUMNS

MOST_COUNTED = 32_000
"""Maximum count of a token in an output. Beyond it, penalties no longer grow."""

MOVED_PAGES = 16
"""Pages per rank that one program copies to or from host memory."""
MOVED_WINDOWS = 2
"""The same for window pages, which are larger and moved in smaller numbers."""
TransferPages = dict[str, Array]
"""Pages in transfer: arrays as ``describe_moved`` describes them."""


@jax.tree_util.register_dataclass
@dataclass
class DeviceState:
    """The executor's arrays on the devices: one pytree, which is donated to each program and returned by it.

    cache: the KV cache, the MTP module's layer last; filled: whether the module's entry of a cache slot belongs to the slot's current
        token (in window pages, if the module's layer uses them).
    tables: page table of each slot, followed by its ring of window pages: page ``i`` at entry ``i % Pw``.
    slots: the other numbers of each slot, in one array, because a step pays for each array on each device: how many of the request's
        tokens are in the cache, the token at that position, how many drafts follow it, sampling parameters, the drafts.
    counts: for requests with penalties, 2 × times in the output + 1 if in the prompt.
    copies: the placement of experts; loads: tokens per physical expert since the last read, with ``--enable-eplb``.
    """

    cache: Cache
    filled: Bool[Array, "P_all G"] | None
    tables: Int[Array, "B Z Pt"]
    slots: Int[Array, "B Z _"]
    counts: Int[Array, "B Z V"]  # uint16
    copies: CopyTables | None
    loads: Int[Array, "L N X"] | None

    @property
    def max_drafts(self) -> int:
        """Most drafts of a slot; 0: the engine makes none."""
        return self.slots.shape[-1] - DRAFTS


def describe(
    step: ModelStep, limits: ExecutorLimits, num_drafts: int = 0, *, counts_loads: bool = False
) -> DeviceState:
    """Return shapes, dtypes and shardings of the state's arrays. num_drafts: maximum per row. counts_loads: count expert loads."""
    ranks, slots = limits.num_ranks, limits.max_rows_decode
    rows, everywhere = NamedSharding(step.mesh, P(step.spec.batch_axes)), NamedSharding(step.mesh, P())

    def array(*shape: int, dtype=np.int32):
        return jax.ShapeDtypeStruct((ranks, slots, *shape), dtype, sharding=rows)

    copies = None
    if step.config.is_moe:
        tables = step.placement.tables
        copies = CopyTables(*(jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=everywhere) for t in tables))
    loads = None
    if counts_loads:
        # A device counts the tokens of its own experts, or with disaggregated experts, the tokens it sends to each expert.
        counted = step.placement.n_physical // (1 if step.apart is not None else step.spec.ep_size)
        shape = (step.num_moe_layers_with_mtp, step.spec.num_devices, counted)
        loads = jax.ShapeDtypeStruct(shape, np.int32, sharding=NamedSharding(step.mesh, P(None, step.spec.token_axes)))
    filled = None
    if num_drafts and step.is_last_stage:
        pages = limits.windows_per_rank if step.mtp_fills_windows else limits.pages_per_rank
        shape = (ranks * pages, limits.page_size)
        filled = jax.ShapeDtypeStruct(shape, bool, sharding=rows)
    return DeviceState(
        cache=device_cache.describe(step, limits.pages_per_rank, limits.windows_per_rank),
        filled=filled,
        tables=array(limits.max_pages + limits.window_columns),
        slots=array(DRAFTS + num_drafts),
        # an empty array would lose its sharding
        counts=array(limits.vocab_size if step.is_last_stage else 1, dtype=np.uint16),
        copies=copies,
        loads=loads,
    )


def description(tree: Tree) -> Tree:
    """Return abstract values of a tree's arrays (or abstract values). The arrays themselves are donated, so they must not be kept."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), tree)


def copy_pages(step: ModelStep, state: DeviceState, pairs: Int[Array, "B K 2"]) -> DeviceState:
    """Copy pages (from, to) of each rank, in all layers. (0, 0) is padding: page 0 is never read. Window pages are never copied."""

    def local(cache, filled, pairs):
        sources, targets = pairs[0].T
        cache = {name: array.at[:, targets].set(array[:, sources]) for name, array in cache.items()}
        return cache, None if filled is None else filled.at[targets].set(filled[sources])

    return _change_pages(step, state, "context", local, pairs)


def clear_pages(step: ModelStep, state: DeviceState, marked: Bool[Array, "B P+W"]) -> DeviceState:
    """Zero the marked pages of each rank in all layers. In ``marked``, window pages follow the other pages."""

    def local(cache, filled, marked):
        def clear(array: Array, axis: int) -> Array:
            at = marked[0].reshape([1] * axis + [-1] + [1] * (array.ndim - axis - 1))
            return jnp.where(at, jnp.zeros((), array.dtype), array)

        cache = {name: clear(array, 1) for name, array in cache.items()}
        return cache, None if filled is None else clear(filled, 0)

    windows = [array for name, array in state.cache.items() if _table_of(step, name) == "window"]
    if not windows:
        return _change_pages(step, state, "context", local, marked)
    first = marked.shape[1] - windows[0].shape[1] // step.spec.dp_size
    state = _change_pages(step, state, "context", local, marked[:, :first])
    return _change_pages(step, state, "window", local, marked[:, first:])


def describe_moved(step: ModelStep, state: DeviceState, table: Table = "context") -> dict[str, jax.ShapeDtypeStruct]:
    """Describe pages of a kind in transfer to or from host memory: ``[B, moved(table), layers, page_size, …]`` for each cache array."""
    B, batch = step.spec.dp_size, step.spec.batch_axes
    described, (cache, filled) = {}, _arrays_on(step, state, table)
    for name, array in cache.items():
        layers, _, *rest = array.shape
        sharding = NamedSharding(step.mesh, P(batch, None, None, *array.sharding.spec[2:]))
        described[name] = jax.ShapeDtypeStruct((B, moved(table), layers, *rest), array.dtype, sharding=sharding)
    if filled is not None:
        shape = (B, moved(table), *filled.shape[1:])
        described["filled"] = jax.ShapeDtypeStruct(shape, bool, sharding=NamedSharding(step.mesh, P(batch)))
    return described


def moved(table: Table) -> int:
    """Return the number of pages of a kind, per rank, that one program copies to or from host memory."""
    return MOVED_WINDOWS if table == "window" else MOVED_PAGES


def take_pages(
    step: ModelStep, state: DeviceState, pages: Int[Array, "B K"], table: Table = "context"
) -> TransferPages:
    """Return copies of each rank's pages of a kind."""

    def local(cache, filled, pages):
        taken = {name: jnp.moveaxis(array[:, pages[0]], 1, 0)[None] for name, array in cache.items()}
        return taken if filled is None else taken | {"filled": filled[pages[0]][None]}

    return _run_on_pages(step, state, table, local, _transfer_specs(step, state, table), pages)


def put_pages(
    step: ModelStep, state: DeviceState, transferred: TransferPages, pages: Int[Array, "B K"], table: Table = "context"
) -> DeviceState:
    """Write each rank's pages of a kind. Page 0 is padding: it is never read."""

    def local(cache, filled, pages, transferred):
        cache = {
            name: array.at[:, pages[0]].set(jnp.moveaxis(transferred[name][0], 0, 1)) for name, array in cache.items()
        }
        return cache, None if filled is None else filled.at[pages[0]].set(transferred["filled"][0])

    return _change_pages(step, state, table, local, pages, (transferred, _transfer_specs(step, state, table)))


def _table_of(step: ModelStep, name: str) -> Table:
    return next(group.table for group in step.cache_groups if name in group.arrays)


def _arrays_on(step: ModelStep, state: DeviceState, table: Table) -> tuple[Cache, Array | None]:
    """Return the cache arrays on pages of a kind, and ``filled`` if the MTP module's entries are on such pages."""
    cache = {name: array for name, array in state.cache.items() if _table_of(step, name) == table}
    return cache, state.filled if step.mtp_fills_windows == (table == "window") else None


def _cache_specs(step: ModelStep, table: Table) -> dict[str, P]:
    described = device_cache.describe(step, 2, 2)
    return {name: array.sharding.spec for name, array in described.items() if _table_of(step, name) == table}


def _transfer_specs(step: ModelStep, state: DeviceState, table: Table) -> dict[str, P]:
    batch = step.spec.batch_axes
    specs = {name: P(batch, None, None, *spec[2:]) for name, spec in _cache_specs(step, table).items()}
    _, filled = _arrays_on(step, state, table)
    return specs if filled is None else specs | {"filled": P(batch)}


def _change_pages(
    step: ModelStep, state: DeviceState, table: Table, local: Callable, argument: Array, *further
) -> DeviceState:
    """Return the state with ``cache`` (one kind) and ``filled`` replaced by the results of ``local``, called through ``_run_on_pages``."""
    changed = _cache_specs(step, table), P(step.spec.batch_axes)
    cache, filled = _run_on_pages(step, state, table, local, changed, argument, *further)
    return dataclasses.replace(state, cache=state.cache | cache, filled=state.filled if filled is None else filled)


def _run_on_pages(
    step: ModelStep, state: DeviceState, table: Table, local: Callable, out_specs, argument: Array, *further
):
    """Run ``local(cache, filled, argument, *further)`` on each rank's pages of a kind. further: pairs of a value and its specs."""
    rows = P(step.spec.batch_axes)
    specs = _cache_specs(step, table), rows, rows, *(spec for _, spec in further)
    run = jax.shard_map(local, mesh=step.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
    return run(*_arrays_on(step, state, table), argument, *(value for value, _ in further))
