"""The sampling of a launch, traced: biases, then the draw of every row's tokens with what its slot's sampling says."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from dsjax.engine.device import logit_edits
from dsjax.engine.device.device_state import MOST_COUNTED, DeviceState
from dsjax.engine.device.sampler import Scores, SlotSampling, Wanted, sample, score
from dsjax.engine.device.slots import StepRows, commit
from dsjax.model.step import ModelStep


def add_biases(
    step: ModelStep, state: DeviceState, rows: StepRows, logits: Float[Array, "B J V"], biases: Int[Array, "B _ 4"]
) -> Float[Array, "B J V"]:
    """Logits with the biases of ``logit_edits.add_biases``; the vocabulary stays spread over ``tp``."""
    _, _, vocab = step.logits_spec(logits.shape[1])
    spec, by_rank = P(step.spec.batch_axes, None, vocab), P(step.spec.batch_axes)
    R, C = rows.tokens.shape[1:]

    def local(logits, biases, place):
        first = lax.axis_index(spec[2]) * logits.shape[-1] if spec[2] else 0
        row = jnp.concatenate([jnp.repeat(jnp.arange(R), C), R + jnp.arange(logits.shape[1] - R * C)])
        return logit_edits.add_biases(logits[0], place[0], row, biases[0], first)[None]

    run = jax.shard_map(local, mesh=step.mesh, in_specs=(spec, by_rank, by_rank), out_specs=spec, check_vma=False)
    return run(logits, biases, _places(state, rows))


def draw(
    step: ModelStep,
    state: DeviceState,
    rows: StepRows,
    raw: Float[Array, "B J V"],
    biased: Float[Array, "B J V"],
    masks: Int[Array, "B J W"],
    wanted: Wanted,
) -> tuple[DeviceState, Int[Array, "B J+2R"]]:
    """Draw a token at every position, enter them as ``commit`` does, and count them where penalties want that.

    raw: the model's logits. Over ``tp`` all devices draw the same.
    """
    by_rank = P(step.spec.batch_axes)
    R, C = rows.tokens.shape[1:]

    def local(sampling, counts, rows, place, raw, biased, masks, wanted):
        sampling, counts, rows, place, raw, biased, masks = jax.tree.map(
            lambda array: array[0], (sampling, counts, rows, place, raw, biased, masks)
        )
        slots = jnp.concatenate([jnp.repeat(rows.slot, C), rows.prefill_slot])
        here = jnp.maximum(slots, 0)
        of_slot = jax.tree.map(lambda array: array[here], sampling)

        def penalised(logits):
            decoded = counts[jnp.maximum(rows.slot, 0)].astype(jnp.int32)
            along = logit_edits.counts_along_drafts(decoded, rows.tokens, MOST_COUNTED)
            along = along.reshape(R * C, counts.shape[-1])
            before = jnp.concatenate([along, counts[jnp.maximum(rows.prefill_slot, 0)].astype(jnp.int32)])
            return logit_edits.penalise(logits, before, of_slot.presence, of_slot.frequency, of_slot.repetition)

        changed = lax.cond(wanted.penalties, penalised, lambda logits: logits, biased)
        allowed = lambda logits: jnp.where(logit_edits.allowed(masks, logits.shape[-1]), logits, -jnp.inf)  # noqa: E731
        changed = lax.cond(wanted.masks, allowed, lambda logits: logits, changed)
        of_rows = jax.tree.map(lambda array: array[None], of_slot)
        return sample(raw[None], changed[None], of_rows, jnp.maximum(place, 0)[None], wanted)

    run = jax.shard_map(local, mesh=step.mesh, in_specs=(*[by_rank] * 7, P()), out_specs=by_rank, check_vma=False)
    tokens = run(state.sampling, state.counts, rows, _places(state, rows), raw, biased, masks, wanted)
    state, outcome = commit(step, state, rows, tokens)
    return _count(step, state, rows, outcome, wanted), outcome


def score_tokens(step: ModelStep, logits: Float[Array, "B J V"], tokens: Int[Array, "B J"]) -> Scores:
    """Scores of one token at each position, by the model's logits there."""
    by_rank = P(step.spec.batch_axes)
    run = jax.shard_map(score, mesh=step.mesh, in_specs=(by_rank, by_rank), out_specs=by_rank, check_vma=False)
    return run(logits, tokens)


def score_prompt(step: ModelStep, rows: StepRows, tokens: Int[Array, "B 1 T"], logits: Float[Array, "B T V"]) -> Scores:
    """Scores of the token behind each position of the only prefill row of a rank, whose ``tokens`` are given."""
    return score_tokens(step, logits, jnp.maximum(tokens_behind(rows, tokens, rows.next_token)[:, 0], 0))


def tokens_behind(
    rows: StepRows, tokens: Int[Array, "B R2 C2"], following: Int[Array, "B R2"]
) -> Int[Array, "B R2 C2"]:
    """The token behind each position of the prefill rows; behind the last active one it is ``following``."""
    shifted = jnp.concatenate([tokens[..., 1:], following[..., None]], axis=-1)
    last = jnp.arange(tokens.shape[-1]) == rows.prefill_length[..., None] - 1
    return jnp.where(last, following[..., None], shifted)


def _places(state: DeviceState, rows: StepRows) -> Int[Array, "B J"]:
    """The number in its output of the token that each position makes."""
    prompts = jnp.take_along_axis(state.sampling.num_prompt_tokens, jnp.maximum(rows.slots, 0), axis=1)
    return rows.positions + 1 - prompts


def _count(
    step: ModelStep, state: DeviceState, rows: StepRows, outcome: Int[Array, "B J+2R"], wanted: Wanted
) -> DeviceState:
    """Count the tokens made by slots that have penalties."""
    by_rank = P(step.spec.batch_axes)
    R, C = rows.tokens.shape[1:]

    def local(counts, sampling: SlotSampling, rows, outcome, wanted):
        counts, sampling, rows, outcome = jax.tree.map(lambda a: a[0], (counts, sampling, rows, outcome))
        num_slots = counts.shape[0]
        J = R * C + rows.prefill_slot.shape[0]
        tokens, made = outcome[:J], outcome[J : J + R]
        taken = jnp.concatenate(
            [(jnp.arange(C) < made[:, None]).reshape(-1), (rows.prefill_slot >= 0) & (rows.next_token < 0)]
        )
        slots = jnp.concatenate([jnp.repeat(rows.slot, C), rows.prefill_slot])
        here = jnp.maximum(slots, 0)
        counted = ((sampling.presence != 0) | (sampling.frequency != 0) | (sampling.repetition != 1))[here]
        at = jnp.where(taken & counted & (tokens >= 0), slots, num_slots)

        def add(counts):
            # A row may make one token several times, so its increments are added before they are bounded.
            more = counts.at[at, jnp.maximum(tokens, 0)].add(2, mode="drop")
            return jnp.where(more > 2 * MOST_COUNTED + 1, counts, more)

        return lax.cond(wanted.penalties, add, lambda counts: counts, counts)[None]

    run = jax.shard_map(
        local, mesh=step.mesh, in_specs=(by_rank, by_rank, by_rank, by_rank, P()), out_specs=by_rank, check_vma=False
    )
    return dataclasses.replace(state, counts=run(state.counts, state.sampling, rows, outcome, wanted))
