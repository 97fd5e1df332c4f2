"""Traced sampling of a launch: adds biases, then draws every row's tokens with its slot's sampling parameters."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from dsjax.engine.device import sampler
from dsjax.engine.device.device_state import MOST_COUNTED, DeviceState
from dsjax.engine.device.sampler import SamplingOps, Scores, SlotSampling, sample, score
from dsjax.engine.device.slots import Positions, StepRows, commit
from dsjax.model.step import ModelStep
from sharding.indices import take


def add_biases(
    step: ModelStep, state: DeviceState, at: Positions, logits: Float[Array, "B J V"], biases: Int[Array, "B _ 4"]
) -> Float[Array, "B J V"]:
    """Return logits with biases added, see ``sampler.add_biases``. The vocabulary stays sharded over ``tp``."""
    _, _, vocab = step.logits_spec(logits.shape[1])
    spec, by_rank = P(step.spec.batch_axes, None, vocab), P(step.spec.batch_axes)

    def local(logits, biases, at, prompts):
        first = lax.axis_index(spec[2]) * logits.shape[-1] if spec[2] else 0
        biases, at, prompts = jax.tree.map(lambda array: array[0], (biases, at, prompts))
        return sampler.add_biases(logits[0], _output_indices(at, take(prompts, _slot_indices(at))), biases, first)[None]

    run = jax.shard_map(
        local, mesh=step.mesh, in_specs=(spec, by_rank, by_rank, by_rank), out_specs=spec, check_vma=False
    )
    return run(logits, biases, at, state.sampling.num_prompt_tokens)


def draw(
    step: ModelStep,
    state: DeviceState,
    at: Positions,
    raw: Float[Array, "B J V"],
    biased: Float[Array, "B J V"],
    masks: Int[Array, "B J W"],
    ops: SamplingOps,
) -> tuple[DeviceState, Int[Array, "B J"]]:
    """Draw a token at every position, write the tokens to the state with ``commit``, and count them for slots with penalties.

    raw: the model's logits. All devices of ``tp`` draw the same tokens.
    """
    by_rank = P(step.spec.batch_axes)
    most_drafts = 0 if state.drafts is None else state.drafts.shape[-1]

    def local(sampling, counts, at, raw, biased, masks, ops):
        sampling, counts, at, raw, biased, masks = jax.tree.map(
            lambda array: array[0], (sampling, counts, at, raw, biased, masks)
        )
        slots = _slot_indices(at)
        row_sampling = jax.tree.map(lambda array: take(array, slots), sampling)

        def penalised(logits):
            before = take(counts, slots).astype(jnp.int32)
            if most_drafts:
                before = sampler.counts_along_drafts(before, at.token, at.number, most_drafts, MOST_COUNTED)
            return sampler.penalise(
                logits, before, row_sampling.presence, row_sampling.frequency, row_sampling.repetition
            )

        changed = lax.cond(ops.penalties, penalised, lambda logits: logits, biased)
        allowed = lambda logits: jnp.where(sampler.allowed(masks, logits.shape[-1]), logits, -jnp.inf)  # noqa: E731
        changed = lax.cond(ops.masks, allowed, lambda logits: logits, changed)
        of_rows = jax.tree.map(lambda array: array[None], row_sampling)
        place = jnp.maximum(_output_indices(at, row_sampling.num_prompt_tokens), 0)
        return sample(raw[None], changed[None], of_rows, place[None], ops)

    run = jax.shard_map(local, mesh=step.mesh, in_specs=(*[by_rank] * 6, P()), out_specs=by_rank, check_vma=False)
    tokens = run(state.sampling, state.counts, at, raw, biased, masks, ops)
    state, outcome = commit(step, state, at, tokens)
    return _count(step, state, at, outcome, ops), outcome


def score_tokens(step: ModelStep, logits: Float[Array, "B J V"], tokens: Int[Array, "B J"]) -> Scores:
    """Return the scores of one token at each position, from the model's logits there."""
    by_rank = P(step.spec.batch_axes)
    run = jax.shard_map(score, mesh=step.mesh, in_specs=(by_rank, by_rank), out_specs=by_rank, check_vma=False)
    return run(logits, tokens)


def following_tokens(
    rows: StepRows, tokens: Int[Array, "B R2 C2"], next_token: Int[Array, "B R2"]
) -> Int[Array, "B R2 C2"]:
    """Return the token after each position of the prefill rows; after the last active position it is ``next_token``."""
    shifted = jnp.concatenate([tokens[..., 1:], next_token[..., None]], axis=-1)
    last = jnp.arange(tokens.shape[-1]) == rows.prefill_length[..., None] - 1
    return jnp.where(last, next_token[..., None], shifted)


def _slot_indices(at: Positions) -> Int[Array, "J"]:
    """Return the slot of each position, 0 for padding."""
    return jnp.maximum(at.slot, 0)


def _output_indices(at: Positions, prompts: Int[Array, "J"]) -> Int[Array, "J"]:
    """Return the output index of the token sampled at each position. prompts: prompt length of each position's request."""
    return at.position + 1 - prompts


def _count(
    step: ModelStep, state: DeviceState, at: Positions, outcome: Int[Array, "B J"], ops: SamplingOps
) -> DeviceState:
    """Count the sampled tokens of slots with penalties."""
    by_rank = P(step.spec.batch_axes)

    def local(counts, sampling: SlotSampling, at, outcome, ops):
        counts, sampling, at, outcome = jax.tree.map(lambda a: a[0], (counts, sampling, at, outcome))
        is_new = (at.slot >= 0) & (at.active > 0) & (at.next_token < 0) & (outcome >= 0)
        has_penalties = (sampling.presence != 0) | (sampling.frequency != 0) | (sampling.repetition != 1)
        slot = jnp.where(is_new & take(has_penalties, _slot_indices(at)), at.slot, counts.shape[0])

        def add(counts):
            # A row may sample one token several times, so add all increments before clamping.
            increased = counts.at[slot, jnp.maximum(outcome, 0)].add(2, mode="drop")
            return jnp.where(increased > 2 * MOST_COUNTED + 1, counts, increased)

        return lax.cond(ops.penalties, add, lambda counts: counts, counts)[None]

    run = jax.shard_map(
        local, mesh=step.mesh, in_specs=(by_rank, by_rank, by_rank, by_rank, P()), out_specs=by_rank, check_vma=False
    )
    return dataclasses.replace(state, counts=run(state.counts, state.sampling, at, outcome, ops))
