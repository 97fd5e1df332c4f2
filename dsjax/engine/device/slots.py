"""Slots on the device: functions that assign them to requests, read them for the rows of a launch, and write a step's tokens back.

All functions are traced. Each DP rank has its own slots, so they are read and written in ``shard_map``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from dsjax.engine.device.device_state import DRAFTS, LAST_TOKEN, NUM_DRAFTS, SAMPLING, START, DeviceState
from dsjax.model.rows import GroupShape, RowGroup
from dsjax.model.step import ModelStep
from sharding.indices import put, take


@jax.tree_util.register_dataclass
@dataclass
class StepRows:
    """The rows of one launch: ``R`` decode rows and ``R2`` prefill rows; slot −1 is padding.

    tokens: last token and drafts of each decode row. next_token: the token after each prefill row, −1 if the row samples it.
    """

    slot: Int[Array, "B R"]
    start: Int[Array, "B R"]
    length: Int[Array, "B R"]
    limit: Int[Array, "B R"]
    tokens: Int[Array, "B R C"]
    prefill_slot: Int[Array, "B R2"]
    prefill_start: Int[Array, "B R2"]
    prefill_length: Int[Array, "B R2"]
    prefill_limit: Int[Array, "B R2"]
    next_token: Int[Array, "B R2"]

    @classmethod
    def of(cls, packed: Int[Array, "B W"], at: Positions, shape: LaunchShape) -> StepRows:
        """Return the rows of a launch, from its packed input and the positions that the step program returned."""
        R, C = shape.decode_rows
        rows = _split(packed, shape)
        start, active, tokens = (
            array[:, : R * C].reshape(array.shape[0], R, C) for array in (at.position, at.active, at.token)
        )
        return rows.step_rows(start[..., 0], jnp.sum(active, axis=2), tokens)


@jax.tree_util.register_dataclass
@dataclass
class Positions:
    """The sampled positions of a launch, passed from program to program: C per decode row, one per prefill row, then padding.

    Launches with the same number of positions share their sampling programs, which do not depend on rows.

    slot: −1 for padding. position: position of the input token; the sampled token is at the next one. token: for decode rows the token at
    this position, the last token or a draft. number: index in the row. active: 1 if the row computes the position. next_token: the token
    after it, −1 if it is sampled.
    """

    slot: Int[Array, "B J"]
    position: Int[Array, "B J"]
    token: Int[Array, "B J"]
    number: Int[Array, "B J"]
    active: Int[Array, "B J"]
    next_token: Int[Array, "B J"]

    @classmethod
    def of(cls, rows: StepRows, shape: LaunchShape) -> Positions:
        """Return the positions of a launch's rows."""
        groups = []
        if shape.decode:
            columns = jnp.arange(rows.tokens.shape[-1])
            spread = lambda array: jnp.broadcast_to(array, rows.tokens.shape).reshape(rows.slot.shape[0], -1)  # noqa: E731
            slot, position = spread(rows.slot[..., None]), spread(rows.start[..., None] + columns)
            number, active = spread(columns[None, None]), spread(columns < rows.length[..., None])
            groups.append((slot, position, spread(rows.tokens), number, active, jnp.full_like(slot, -1)))
        if shape.prefill:
            nothing, last = jnp.zeros_like(rows.prefill_slot), jnp.maximum(rows.prefill_length - 1, 0)
            active, position = rows.prefill_length > 0, rows.prefill_start + last
            groups.append((rows.prefill_slot, position, nothing, nothing, active, rows.next_token))
        joined = (
            jnp.concatenate([part.astype(jnp.int32) for part in parts], axis=1) for parts in zip(*groups, strict=True)
        )
        room = ((0, 0), (0, shape.positions - shape.own_positions))
        if not room[1][1]:
            return cls(*joined)
        slot, *fields = joined
        return cls(jnp.pad(slot, room, constant_values=-1), *(jnp.pad(array, room) for array in fields))

    def pack(self) -> Int[Array, "B 6J"]:
        """Concatenate all fields into one array, which the programs of a launch pass on."""
        return jnp.concatenate(jax.tree.leaves(self), axis=1)

    @classmethod
    def unpack(cls, packed: Int[Array, "B 6J"]) -> Positions:
        """Invert ``pack``."""
        return cls(*jnp.split(packed, len(fields(cls)), axis=1))


@dataclass(frozen=True)
class LaunchShape:
    """Static shape of a launch: its row groups (None: absent). It determines the layout of the packed input.

    room: number of positions of its sampling programs, if that is more than the launch has.
    """

    decode: GroupShape | None
    prefill: GroupShape | None
    page_size: int
    room: int = 0

    @cached_property
    def groups(self) -> tuple[GroupShape, ...]:
        """The row groups, decode first."""
        return tuple(group for group in (self.decode, self.prefill) if group)

    @cached_property
    def tokens(self) -> int:
        """Token slots on one DP rank."""
        return sum(group.tokens for group in self.groups)

    @cached_property
    def decode_rows(self) -> tuple[int, int]:
        """Rows and width of the decode group; (0, 1) without one."""
        return (self.decode.rows, self.decode.chunk) if self.decode else (0, 1)

    @cached_property
    def prefill_rows(self) -> tuple[int, int]:
        """Rows and width of the prefill group; (0, 1) without one."""
        return (self.prefill.rows, self.prefill.chunk) if self.prefill else (0, 1)

    @cached_property
    def own_positions(self) -> int:
        """Sampled positions per DP rank: all positions of decode rows, one of each prefill row."""
        rows, width = self.decode_rows
        return rows * width + self.prefill_rows[0]

    @cached_property
    def positions(self) -> int:
        """Number of positions of the sampling programs: ``own_positions`` plus padding."""
        return max(self.own_positions, self.room)

    @cached_property
    def first_positions(self) -> np.ndarray:
        """The first position of each row."""
        (rows, width), prefill_rows = self.decode_rows, self.prefill_rows[0]
        return np.concatenate([np.arange(rows) * width, rows * width + np.arange(prefill_rows)])

    @cached_property
    def page_changes(self) -> int:
        """Page-table changes that the packed input has room for: one page per decode row, a chunk's pages per prefill row.

        With window pages, the same number for each kind.
        """
        rows, chunk = self.prefill_rows
        kinds = 2 if any(group.windows for group in self.groups) else 1
        return 1 + kinds * (self.decode_rows[0] + rows * -(-chunk // self.page_size))

    def prefill_tokens(self, packed: Int[Array, "B W"]) -> Int[Array, "B R2 C2"]:
        """Return the prompt tokens in the packed input."""
        return _split(packed, self).prefill_tokens.reshape(packed.shape[0], *self.prefill_rows)

    @cached_property
    def packed_width(self) -> int:
        """Number of integers in the packed input of one DP rank."""
        return 3 * self.decode_rows[0] + self.prefill_rows[0] * (5 + self.prefill_rows[1]) + 3 * self.page_changes


class _PackedRows(NamedTuple):
    """The parts of a launch's packed input, in order; the last two are flat. max_drafts: most drafts to verify."""

    slot: Int[Array, "*B R"]
    limit: Int[Array, "*B R"]
    max_drafts: Int[Array, "*B R"]
    prefill_slot: Int[Array, "*B R2"]
    prefill_start: Int[Array, "*B R2"]
    prefill_length: Int[Array, "*B R2"]
    prefill_limit: Int[Array, "*B R2"]
    next_token: Int[Array, "*B R2"]
    prefill_tokens: Int[Array, "*B _"]
    page_changes: Int[Array, "*B _"]

    def step_rows(self, start: Array, length: Array, tokens: Array) -> StepRows:
        """Return the rows, with the parts of the decode rows that depend on the state."""
        prefills = self.prefill_slot, self.prefill_start, self.prefill_length, self.prefill_limit, self.next_token
        return StepRows(self.slot, start, length, self.limit, tokens, *prefills)


def _split(packed: Int[Array, "*B W"], shape: LaunchShape) -> _PackedRows:
    R, (R2, C2) = shape.decode_rows[0], shape.prefill_rows
    return _PackedRows(*jnp.split(packed, np.cumsum([R, R, R, R2, R2, R2, R2, R2, R2 * C2]), axis=-1))


def _on_each_rank(step: ModelStep, function: Callable, *arguments):
    """Run ``function`` on each DP rank's arrays, without their leading axis, and add the axis to its results."""

    def local(*arguments):
        rank_arrays = jax.tree.map(lambda array: jax.lax.squeeze(array, [0]), arguments)
        return jax.tree.map(lambda array: jax.lax.expand_dims(array, [0]), function(*rank_arrays))

    rows = P(step.spec.batch_axes)
    return jax.shard_map(local, mesh=step.mesh, in_specs=rows, out_specs=rows, check_vma=False)(*arguments)


def _change_slots(
    step: ModelStep, function: Callable, state: DeviceState, names: Sequence[str], *arguments
) -> tuple[DeviceState, Any]:
    """Apply ``function(fields, *arguments) -> (changed fields, extra)`` to these fields on each rank; return the new state and extra."""
    changed, more = _on_each_rank(step, function, {name: getattr(state, name) for name in names}, *arguments)
    return dataclasses.replace(state, **changed), more


ADMISSIONS, ADMISSION_WIDTH = 8, 2 + DRAFTS
"""Admissions per rank in one run of the admission program, and integers per admission."""
PAGE_CHANGES = 256
"""Page-table changes per rank in one run of the admission program."""
COUNTED = 1024
"""Token counts per rank in one run of the admission program."""
ADMIT_WIDTH = ADMISSIONS * ADMISSION_WIDTH + 3 * PAGE_CHANGES + 3 * COUNTED


def admit(step: ModelStep, state: DeviceState, packed: Int[Array, "B W"]) -> DeviceState:
    """Assign slots to requests and change page tables.

    packed: admissions (slot, its columns in ``DeviceState.slots`` up to the drafts, 1 if counts follow), page changes (slot, index, page),
    counts (slot, token, code); slot −1 is padding.
    """

    def local(state: dict[str, Any], packed):
        ends = np.cumsum([ADMISSIONS * ADMISSION_WIDTH, 3 * PAGE_CHANGES])
        admissions, changes, counts = jnp.split(packed, ends)
        admissions = admissions.reshape(ADMISSIONS, ADMISSION_WIDTH)
        at, columns, has_counts = admissions[:, 0], admissions[:, 1:-1], admissions[:, -1] > 0
        counted = put(state["counts"], jnp.where(has_counts, at, -1), 0)
        slot, token, code = counts.reshape(COUNTED, 3).T
        # Zero the table: entries left by the slot's last owner would be read too, with weight 0, and their pages may become NaN.
        tables = put(state["tables"], at, 0)
        changed = {
            "tables": _change_pages(tables, changes.reshape(PAGE_CHANGES, 3)),
            "slots": put(state["slots"], (at, slice(DRAFTS)), columns),
            "counts": put(counted, (slot, token), code.astype(jnp.uint16)),
        }
        return changed, ()

    return _change_slots(step, local, state, ("tables", "slots", "counts"), packed)[0]


def read(
    step: ModelStep, state: DeviceState, packed: Int[Array, "B W"], shape: LaunchShape
) -> tuple[DeviceState, StepRows, list[RowGroup]]:
    """Change page tables, and read the rows of a launch from its packed input and the state."""
    max_drafts, (R2, C2) = shape.decode_rows[1] - 1, shape.prefill_rows

    def local(state: dict[str, Array], packed):
        row = _split(packed, shape)
        all_tables = _change_pages(state["tables"], row.page_changes.reshape(shape.page_changes, 3))
        slots = jnp.maximum(row.slot, 0)
        columns = take(state["slots"], slots)
        start = columns[:, START]
        row_tokens = columns[:, LAST_TOKEN : LAST_TOKEN + 1]
        num_drafts = jnp.zeros_like(row.slot)
        if max_drafts:
            row_tokens = jnp.concatenate([row_tokens, columns[:, DRAFTS : DRAFTS + max_drafts]], axis=1)
            num_drafts = jnp.minimum(jnp.minimum(columns[:, NUM_DRAFTS], row.max_drafts), max_drafts)
        length = jnp.where(row.slot >= 0, jnp.clip(row.limit - start, 0, 1 + num_drafts), 0)
        rows = row.step_rows(jnp.where(row.slot >= 0, start, 0), length, row_tokens)
        tables, prefill_tables = take(all_tables, slots), take(all_tables, jnp.maximum(row.prefill_slot, 0))
        return {"tables": all_tables}, (rows, tables, prefill_tables, row.prefill_tokens.reshape(R2, C2))

    state, (rows, tables, prefill_tables, tokens) = _change_slots(step, local, state, ("tables", "slots"), packed)
    groups = []
    if shape.decode:
        prompts = _prompt_lengths(step, state, rows.slot)
        groups.append(RowGroup(rows.tokens, rows.start, rows.length, tables, shape.decode, prompts))
    if shape.prefill:
        prompts, of_rows = _prompt_lengths(step, state, rows.prefill_slot), (rows.prefill_start, rows.prefill_length)
        groups.append(RowGroup(tokens, *of_rows, prefill_tables, shape.prefill, prompts))
    return state, rows, groups


def _prompt_lengths(step: ModelStep, state: DeviceState, slots: Int[Array, "B R"]) -> Int[Array, "B R"] | None:
    """Return the prompt length of each row's request; None if no MLA form depends on it. Padding rows have arbitrary values."""
    if not step.forms_by_kind:
        return None
    # The first of a slot's sampling parameters.
    local = lambda table, slots: take(table, (jnp.maximum(slots, 0), SAMPLING))  # noqa: E731
    return _on_each_rank(step, local, state.slots, slots)


REJECTED, NOT_COMPUTED = -3, -4
"""Values instead of a token in an outcome of an engine with drafts: after a rejected draft; where the row computed nothing."""


def commit(
    step: ModelStep, state: DeviceState, at: Positions, tokens: Int[Array, "B J"]
) -> tuple[DeviceState, Int[Array, "B J"]]:
    """Verify drafts against the drawn tokens, and update each slot's start and last token.

    tokens: token of each position, negative where the draw failed. A draft is accepted if it equals the token drawn one position earlier.
    Returns the state without drafts, and the outcome: each row's accepted tokens, then ``REJECTED`` and ``NOT_COMPUTED``.
    """

    most_drafts = state.max_drafts

    def local(state: dict[str, Array], at: Positions, tokens):
        active = at.active > 0
        is_last, outcome = active, tokens
        if most_drafts:
            is_first = at.number == 0
            is_valid = active & (is_first | (jnp.roll(tokens, 1) == at.token))
            # A draft is accepted if all earlier drafts of its row are valid, too. Each pass carries that one position further.
            is_accepted = is_valid
            for _ in range(most_drafts - 1):
                is_accepted = is_valid & (is_first | jnp.roll(is_accepted, 1))
            continues = jnp.concatenate([(is_accepted & ~is_first)[1:], jnp.zeros(1, bool)])
            is_last = is_accepted & ~continues
            outcome = jnp.where(is_accepted, tokens, jnp.where(active, REJECTED, NOT_COMPUTED))
        last_token = jnp.where(at.next_token < 0, tokens, at.next_token)
        columns = jnp.stack([at.position + 1, last_token, jnp.zeros_like(tokens)], axis=-1)
        where = jnp.where(is_last, at.slot, -1), slice(START, NUM_DRAFTS + 1)
        return {"slots": put(state["slots"], where, columns)}, outcome

    return _change_slots(step, local, state, ("slots",), at, tokens)


def tables_of(step: ModelStep, state: DeviceState, rows: StepRows) -> Int[Array, "B R+R2 Pt"]:
    """Return the page tables of a launch's rows, decode rows first."""

    def local(tables, slot, prefill_slot):
        return take(tables, jnp.maximum(jnp.concatenate([slot, prefill_slot]), 0))

    return _on_each_rank(step, local, state.tables, rows.slot, rows.prefill_slot)


def write_drafts(
    step: ModelStep,
    state: DeviceState,
    slots: Int[Array, "B R+R2"],
    next_token: Int[Array, "B R+R2"],
    drafts: Int[Array, "B R+R2 n"],
) -> DeviceState:
    """Store the MTP module's drafts for every row that sampled a token. slots, next_token: see ``Positions``."""

    def local(state: dict[str, Array], slots, next_token, drafts):
        at = jnp.where(next_token < 0, slots, -1)
        num_valid = jnp.sum(jnp.cumprod(drafts >= 0, axis=1), axis=1, dtype=jnp.int32)
        written = put(state["slots"], (at, NUM_DRAFTS), num_valid)
        return {"slots": put(written, (at, slice(DRAFTS, DRAFTS + drafts.shape[1])), drafts)}, ()

    return _change_slots(step, local, state, ("slots",), slots, next_token, drafts)[0]


def _change_pages(tables: Int[Array, "Z Pt"], changes: Int[Array, "_ 3"]) -> Int[Array, "Z Pt"]:
    slot, index, page = changes.T
    return put(tables, (slot, index), page)
