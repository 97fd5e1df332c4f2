"""Traced functions of a step: run a launch's rows through the model, sample greedily, then propose drafts with the MTP module."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dsjax.engine.device import sampling_programs, slots
from dsjax.engine.device.device_state import DeviceState
from dsjax.engine.device.sampler import greedy
from dsjax.engine.device.slots import LaunchShape, Positions, StepRows
from dsjax.model import mtp
from dsjax.model.rows import RowGroup
from dsjax.model.step import ModelStep


def compute(
    step: ModelStep,
    params: Mapping[str, Array],
    state: DeviceState,
    packed: Int[Array, "B W"],
    shape: LaunchShape,
    scored: bool = False,
    arrived: Float[Array, "B T *n D"] | None = None,
):
    """Run a launch's rows through the model and sample them greedily.

    Returns state, rows, positions, outcome, logits, hidden states and reports, with ``scored`` also scores: see ``Programs.lower_step``.
    arrived: the previous pipeline stage's hidden states; None on the first stage.
    """
    state, rows, groups, hidden, reports = run_layers(step, params, state, packed, shape, arrived)
    scores = ()
    if scored:  # each rank has one prefill row
        all_logits = step.logits(params, hidden)
        logits = _take_slots(all_logits, _sampled_slots(rows, shape))
        following = sampling_programs.following_tokens(rows, groups[-1].tokens, rows.next_token)[:, 0]
        scores = (sampling_programs.score_tokens(step, all_logits, jnp.maximum(following, 0)),)
    else:
        logits = step.logits(params, _take_slots(hidden, _sampled_slots(rows, shape)))
    positions, tokens = Positions.of(rows, shape), greedy(logits)
    if shape.positions > shape.own_positions:
        padding = (0, shape.positions - shape.own_positions)
        tokens, logits = jnp.pad(tokens, ((0, 0), padding)), jnp.pad(logits, ((0, 0), padding, (0, 0)))
    state, outcome = slots.commit(step, state, positions, tokens)
    return state, rows, positions, outcome, logits, hidden, reports, *scores


def run_layers(
    step: ModelStep,
    params: Mapping[str, Array],
    state: DeviceState,
    packed: Int[Array, "B W"],
    shape: LaunchShape,
    arrived: Float[Array, "B T *n D"] | None = None,
) -> tuple[DeviceState, StepRows, list[RowGroup], Float[Array, "B T *n D"], dict[str, Array]]:
    """Read a launch's rows and run them through this stage's layers. Return state, rows, their groups, hidden states and reports."""
    state, rows, groups = slots.read(step, state, packed, shape)
    hidden, cache, reports = step.hidden(params, state.cache, groups, state.copies, arrived)
    loads = _add_loads(state.loads, 0, reports)
    state = dataclasses.replace(state, cache=cache, filled=mark_stale(step, state, groups), loads=loads)
    return state, rows, groups, hidden, reports


def propose(
    step: ModelStep,
    params: Mapping[str, Array],
    state: DeviceState,
    packed: Int[Array, "B W"],
    rows: StepRows,
    outcome: Int[Array, "B J"],
    hidden: Float[Array, "B T *n D"],
    shape: LaunchShape,
    count: int,
) -> tuple[DeviceState, Int[Array, "B R+R2 n"]]:
    """Propose ``count`` drafts for each row with the MTP module after a launch, and keep them in the state.

    The first pass runs over all accepted tokens of the launch and fills the module's cache; each further pass runs over one token per row.
    The other arguments are those and the results of ``compute``. Rows are the decode rows, then the prefill rows.
    """
    R, C = shape.decode_rows
    tokens = outcome[:, : shape.own_positions]
    num_accepted = jnp.sum(tokens[:, : R * C].reshape(tokens.shape[0], R, C) > slots.REJECTED, axis=2)
    tables = slots.tables_of(step, state, rows)
    groups, next_tokens = [], []  # next_tokens: of each group, the token after each token slot
    if shape.decode:
        groups.append(RowGroup(rows.tokens, rows.start, num_accepted, tables[:, :R], shape.decode))
        next_tokens.append(tokens[:, : R * C])
    if shape.prefill:
        prompt = shape.prefill_tokens(packed)
        groups.append(RowGroup(prompt, rows.prefill_start, rows.prefill_length, tables[:, R:], shape.prefill))
        after_prompt = jnp.where(rows.next_token < 0, tokens[:, R * C :], rows.next_token)
        after_each = sampling_programs.following_tokens(rows, prompt, after_prompt)
        next_tokens.append(after_each.reshape(after_each.shape[0], -1))
    next_tokens = jnp.maximum(jnp.concatenate(next_tokens, axis=1), 0)
    lengths = jnp.concatenate([num_accepted, rows.prefill_length], axis=1)
    chunks = np.repeat([group.shape.chunk for group in groups], [group.shape.rows for group in groups])
    last_slots = np.cumsum(chunks) - chunks + jnp.maximum(lengths - 1, 0)  # of each row's accepted tokens
    with jax.named_scope("draft_1"):
        hidden, cache, filled, reports = mtp.further(
            step, params, state.cache, state.filled, groups, hidden, next_tokens, state.copies
        )
        loads = _add_loads(state.loads, step.config.num_moe_layers, reports)
        hidden = _take_slots(hidden, last_slots)
        drafts = [greedy(step.logits(params, hidden, module=True))]
    position = jnp.concatenate([rows.start, rows.prefill_start], axis=1) + lengths - 1
    limit = jnp.concatenate([rows.limit, rows.prefill_limit], axis=1)
    # A prefill row whose next prompt token is known is not at its prompt's end, so it needs no further drafts.
    drafting = (lengths > 0) & jnp.concatenate([num_accepted > 0, rows.next_token < 0], axis=1)
    one_token_each = dataclasses.replace(groups[0].shape, rows=lengths.shape[1], chunk=1, form=step.decode_form)
    for number in range(2, count + 1):
        position = position + 1
        active = (drafting & (position < limit)).astype(jnp.int32)
        with jax.named_scope(f"draft_{number}"):
            group = RowGroup(drafts[-1][..., None], position, active, tables, one_token_each)
            hidden, cache, filled, reports = mtp.further(
                step, params, cache, filled, [group], hidden, jnp.maximum(drafts[-1], 0), state.copies
            )
            loads = _add_loads(loads, step.config.num_moe_layers, reports)
            drafts.append(greedy(step.logits(params, hidden, module=True)))
    proposed = jnp.stack(drafts, axis=-1)
    state = dataclasses.replace(state, cache=cache, filled=filled, loads=loads)
    row_slots = jnp.concatenate([rows.slot, rows.prefill_slot], axis=1)
    next_token = jnp.concatenate([jnp.full_like(rows.slot, -1), rows.next_token], axis=1)
    return slots.write_drafts(step, state, row_slots, next_token, proposed), proposed


def _add_loads(loads: Array | None, first: int, reports: Mapping[str, Array]) -> Array | None:
    """Add the reported tokens per expert to ``loads``, from its row ``first`` on; None if loads are not counted."""
    if loads is None:
        return None
    counts = reports["tokens_per_expert"]
    return loads.at[first : first + counts.shape[0]].add(counts)


def mark_stale(step: ModelStep, state: DeviceState, groups: list[RowGroup]) -> Bool[Array, "P G"] | None:
    """Return ``state.filled`` without the cache slots that a step writes: their MTP entries are stale. None without the MTP module."""
    if state.filled is None:
        return None
    return mtp.mark(step, state.filled, step.mtp_slots(groups), False)


def _take_slots(values: Float[Array, "B T *n D"], token_slots: Int[Array, "B J"]) -> Float[Array, "B J *n D"]:
    """Return each DP rank's hidden states or logits at its ``token_slots``."""
    return jnp.take_along_axis(values, token_slots.reshape(*token_slots.shape, *[1] * (values.ndim - 2)), axis=1)


def _sampled_slots(rows: StepRows, shape: LaunchShape) -> Int[Array, "B J"]:
    """Return the token slot of each sampled position: all positions of decode rows, the last active position of prefill rows."""
    (R, C), (R2, C2) = shape.decode_rows, shape.prefill_rows
    decode_slots = jnp.broadcast_to(jnp.arange(R * C), (rows.slot.shape[0], R * C))
    if not R2:
        return decode_slots
    prefill_slots = R * C + jnp.arange(R2) * C2 + jnp.maximum(rows.prefill_length - 1, 0)
    return jnp.concatenate([decode_slots, prefill_slots], axis=1) if R else prefill_slots
