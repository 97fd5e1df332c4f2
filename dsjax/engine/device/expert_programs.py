"""Programs that move experts between physical slots while an engine serves. docs/balancing.md has the design.

``stage`` sends experts from rank to rank into a staging buffer for one layer; steps continue to read the old slots. ``place`` copies the
staged experts into their slots on each device and activates the layer's tables. Slots and tables are consistent between two programs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Lowered
from jaxtyping import Array, Int

from dsjax.config.layers import moe_layers, stacks
from dsjax.model.expert_dispatch import EXPERTS
from dsjax.model.step import ModelStep
from sharding.dispatch.group import ExpertGroup
from sharding.dispatch.ragged import NATIVE_PLATFORMS
from sharding.placement import CopyTables

MODULES = "mtp.layers"
"""The stack of the MTP modules' layers. Their rows in a placement follow the model's rows."""

Stack = dict[str, Any]
"""Experts of one stack of layers: names such as ``gate_up.weight`` to arrays ``[layers, X, …]`` or their abstract values."""


class ExpertLayers(NamedTuple):
    """Expert parameters of one stack."""

    stack: str
    names: dict[str, str]  # name within a layer to parameter path
    rows: Sequence[int]  # placement rows of its layers

    def of(self, params: Mapping[str, Any]) -> Stack:
        """Return these parameters by their names within a layer."""
        return {name: params[path] for name, path in self.names.items()}


def expert_layers(step: ModelStep) -> list[ExpertLayers]:
    """Return the stacks that have experts."""
    runs, found = step.config.layer_runs, []
    row_of = {number: row for row, number in enumerate(moe_layers(runs))}
    rows = {kind.stack: [row_of[number] for number in numbers] for kind, numbers in stacks(runs).items() if kind.routed}
    for stack in (*rows, MODULES):
        prefix = stack + EXPERTS
        names = {path.removeprefix(prefix): path for path in step.table.infos if path.startswith(prefix)}
        if names:
            modules = range(len(row_of), step.num_moe_layers_with_mtp)
            found.append(ExpertLayers(stack, names, rows.get(stack, modules)))
    return found


def describe_staging(step: ModelStep) -> Stack:
    """Describe the staging buffer: one layer's experts ``[X, …]``, as unsigned integers of the same width and with the same sharding."""
    buffers = {}
    for name, path in expert_layers(step)[0].names.items():
        info = step.table.infos[path]
        sharding = step.rules.sharding(step.mesh, info.logical_axes[1:], info.shape[1:])
        buffers[name] = jax.ShapeDtypeStruct(info.shape[1:], _word(info.storage_dtype), sharding=sharding)
    return buffers


def staging_bytes(step: ModelStep) -> int:
    """Return the bytes of the staging buffer on one device."""
    buffers = describe_staging(step).values()
    return sum(math.prod(one.sharding.shard_shape(one.shape)) * one.dtype.itemsize for one in buffers)


def expert_bytes(step: ModelStep) -> int:
    """Return the bytes of one expert on one device: the whole expert, or its shard if its width is split."""
    if step.apart is not None:
        return step.apart.expert_bytes
    return staging_bytes(step) * step.spec.ep_size // step.with_shared_slots(step.placement).n_physical


def exchange_bytes(step: ModelStep, experts: int) -> int:
    """Return the bytes per device that moving experts needs besides the weights: the staging buffer, and the experts sent at once."""
    return staging_bytes(step) + experts * expert_bytes(step)


def received_bytes(step: ModelStep) -> int:
    """Return the maximum bytes a device receives if each rank is sent one expert. With an all-gather, it receives what all ranks send."""
    gathers = step.apart is None and step.mesh.devices.flat[0].platform not in NATIVE_PLATFORMS
    return expert_bytes(step) * (step.spec.ep_size - 1 if gathers else 1)


def pack_moves(moves: Sequence[tuple[int, int]], *, ranks: int, per_rank: int, experts: int) -> Int[np.ndarray, "G W"]:
    """Pack pairs (source slot, target slot) for ``stage``, one row per sending rank.

    A row has the sender's ``experts`` source slots, then three arrays over receiving ranks: index among them, count (0 or 1), target slot.
    """
    packed = np.zeros((ranks, experts + 3 * ranks), np.int32)
    sends, (which, sent, lands) = packed[:, :experts], np.split(packed[:, experts:], 3, axis=1)
    chosen: list[list[int]] = [[] for _ in range(ranks)]
    for source, slot in moves:
        (start, own_slot), (end, target) = divmod(source, per_rank), divmod(slot, per_rank)
        if own_slot not in chosen[start]:
            chosen[start].append(own_slot)
        if len(chosen[start]) > experts or sent[start, end]:
            raise ValueError(f"rank {start} sends more than {experts} experts, or two of them to rank {end}")
        which[start, end], sent[start, end], lands[start, end] = chosen[start].index(own_slot), 1, target
    for rank, own_slot in enumerate(chosen):
        sends[rank, : len(own_slot)] = own_slot
    return packed


def lower_stage(step: ModelStep, params: Mapping[str, Any], layers: ExpertLayers, experts: int) -> Lowered:
    """Lower ``(stack, staging, moves, layer) -> (staging, done)``. staging is donated; moves: see ``pack_moves``; layer: in the stack."""
    group = ExpertGroup.of(step.spec, step.placement.n_physical, step.mesh.devices.flat[0].platform)
    stack, staging, everywhere = layers.of(params), describe_staging(step), NamedSharding(step.mesh, P())

    def local(stack: Stack, staging: Stack, moves: Array, layer: Array):
        sent_slots = moves[:, :experts][group.index()]
        plan = moves[:, experts:].reshape(group.size, 3, group.size)
        outgoing = {name: _rows(array, layer, sent_slots, experts) for name, array in stack.items()}
        return {name: _send(group, outgoing[name], staging[name], plan) for name in staging}

    specs = {name: array.sharding.spec for name, array in stack.items()}
    held = {name: array.sharding.spec for name, array in staging.items()}
    run = jax.shard_map(local, mesh=step.mesh, in_specs=(specs, held, P(), P()), out_specs=held, check_vma=False)
    shardings = {name: array.sharding for name, array in staging.items()}

    def stage(stack, staging, moves, layer):
        staged = run(stack, staging, moves, layer)
        pinned = lax.with_sharding_constraint(staged, shardings)
        return pinned, lax.with_sharding_constraint(layer + moves[0, 0], everywhere)

    moves = jax.ShapeDtypeStruct((group.size, experts + 3 * group.size), np.int32, sharding=everywhere)
    layer = jax.ShapeDtypeStruct((), np.int32, sharding=everywhere)
    return jax.jit(stage, donate_argnums=1).lower(stack, staging, moves, layer)


def _rows(array: Array, layer: Array, slots: Array, count: int) -> Array:
    """Return ``array[layer, slots]`` as words, ``[count, …]``. Each row is a separate slice, so the rest of the stack is not read."""
    start = (0,) * (array.ndim - 2)
    rows = [lax.dynamic_slice(array, (layer, slots[i], *start), (1, 1, *array.shape[2:])) for i in range(count)]
    return lax.bitcast_convert_type(jnp.concatenate(rows, axis=1)[0], _word(array.dtype))


def _send(group: ExpertGroup, outgoing: Array, staging: Array, plan: Int[Array, "G 3 G"]) -> Array:
    """Send rows of ``outgoing [n, …]`` to the staging buffers ``[X, …]`` of the ranks in ``plan``."""
    which, sent, lands = plan[:, 0], plan[:, 1], plan[:, 2]
    me = group.index()
    if group.size > 1 and group.platform in NATIVE_PLATFORMS:
        return lax.ragged_all_to_all(
            outgoing, staging, which[me], sent[me], lands[me], sent[:, me], axis_name=group.axes
        )
    # Emulated devices share one memory, so the cost is per collective and not per byte: gather all rows, then select this rank's.
    gathered = lax.all_gather(outgoing, group.axes, tiled=True) if group.size > 1 else outgoing
    first = jnp.argsort(-sent[:, me])

    def take(turn, staging):
        sender = first[turn]
        row = lax.dynamic_index_in_dim(gathered, sender * outgoing.shape[0] + which[sender, me], keepdims=False)
        return lax.dynamic_update_index_in_dim(staging, row, lands[sender, me], 0)

    return lax.fori_loop(0, jnp.sum(sent[:, me]), take, staging)


def pack_slots(slots: Sequence[int], *, ranks: int, per_rank: int) -> Int[np.ndarray, "G X"]:
    """Return the slot mask for ``place``: for each rank, 1 for each slot to write."""
    marked = np.zeros(ranks * per_rank, np.int32)
    marked[list(slots)] = 1
    return marked.reshape(ranks, per_rank)


def lower_place(
    step: ModelStep, params: Mapping[str, Any], layers: ExpertLayers, copies: CopyTables, loads: Any
) -> Lowered:
    """Lower ``(stack, staging, copies, loads, marked, tables, layer, row) -> (stack, copies, loads, retired, done)``.

    stack, copies and loads are donated; one row of copies and of loads changes. retired: the previous counts in that row of loads.
    marked: see ``pack_slots``; tables: the layer's tables; layer: index in the stack; row: index in the placement.
    """
    group = ExpertGroup.of(step.spec, step.placement.n_physical, step.mesh.devices.flat[0].platform)
    stack, staging, everywhere = layers.of(params), describe_staging(step), NamedSharding(step.mesh, P())

    def local(stack: Stack, staging: Stack, marked: Array, layer: Array):
        rank_marks = marked[group.index()]
        slots = jnp.argsort(-rank_marks)

        def write(turn, stack: Stack) -> Stack:
            slot = slots[turn]
            changed = {}
            for name, array in stack.items():
                row = lax.dynamic_index_in_dim(staging[name], slot, keepdims=False)
                row = lax.bitcast_convert_type(row, array.dtype)[None, None]
                changed[name] = lax.dynamic_update_slice(array, row, (layer, slot, *(0,) * (array.ndim - 2)))
            return changed

        return lax.fori_loop(0, jnp.sum(rank_marks), write, stack)

    specs = {name: array.sharding.spec for name, array in stack.items()}
    held = {name: array.sharding.spec for name, array in staging.items()}
    run = jax.shard_map(local, mesh=step.mesh, in_specs=(specs, held, P(), P()), out_specs=specs, check_vma=False)
    shardings = {name: array.sharding for name, array in stack.items()}

    def place(stack, staging, copies, loads, marked, tables, layer, row):
        changed = lax.with_sharding_constraint(run(stack, staging, marked, layer), shardings)
        copies, loads, retired = put_tables(copies, loads, tables, row)
        pinned = lax.with_sharding_constraint((copies, loads), jax.tree.map(lambda a: a.sharding, described))
        return changed, *pinned, retired, lax.with_sharding_constraint(row + 0, everywhere)

    described = (copies, loads)
    number = jax.ShapeDtypeStruct((), np.int32, sharding=everywhere)
    marked = jax.ShapeDtypeStruct((group.size, step.placement.n_physical // group.size), np.int32, sharding=everywhere)
    tables = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype, sharding=everywhere), copies)
    return jax.jit(place, donate_argnums=(0, 2, 3)).lower(stack, staging, copies, loads, marked, tables, number, number)


def put_tables(copies: CopyTables, loads: Array, tables: CopyTables, row: Array) -> tuple[CopyTables, Array, Array]:
    """Activate a layer's tables and reset its row of loads; return copies, loads and the row's previous counts."""
    copies = jax.tree.map(lambda whole, own: lax.dynamic_update_index_in_dim(whole, own, row, 0), copies, tables)
    retired = lax.dynamic_index_in_dim(loads, row, keepdims=False)
    return copies, lax.dynamic_update_index_in_dim(loads, jnp.zeros_like(retired), row, 0), retired


def _word(dtype: np.dtype) -> np.dtype:
    return np.dtype(f"u{np.dtype(dtype).itemsize}")
