"""Traced sampling of a launch: adds biases, then draws every row's tokens with its slot's sampling parameters."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from dsjax.engine.device import sampler
from dsjax.engine.device.device_state import DRAFTS, MOST_COUNTED, SAMPLING, DeviceState
from dsjax.engine.device.sampler import SamplingOps, Scores, SlotSampling, sample, score
from dsjax.engine.device.slots import Positions, StepRows, commit
from dsjax.model.step import ModelStep
from sharding.indices import take


def add_biases(
    step: ModelStep, state: DeviceState, at: Positions, logits: Float[Array, "B J V"], biases: Int[Array, "B _ 4"]
) -> Float[Array, "B J V"]:
    """Return logits with biases added; ``sampler.add_biases`` has the columns. The vocabulary stays sharded over ``tp``."""
    _, _, vocab = step.logits_spec(logits.shape[1])
    spec, by_rank = P(step.spec.batch_axes, None, vocab), P(step.spec.batch_axes)

    def local(logits, biases, at, slots):
        first = lax.axis_index(vocab) * logits.shape[-1] if vocab else 0
        biases, at, slots = jax.tree.map(lambda array: array[0], (biases, at, slots))
        return sampler.add_biases(logits[0], _output_indices(at, _sampling(slots, at)), biases, first)[None]

    run = jax.shard_map(
        local, mesh=step.mesh, in_specs=(spec, by_rank, by_rank, by_rank), out_specs=spec, check_vma=False
    )
    return run(logits, biases, at, state.slots)


def draw(
    step: ModelStep,
    state: DeviceState,
    at: Positions,
    raw: Float[Array, "B J V"],
    biased: Float[Array, "B J V"],
    masks: Int[Array, "B J words"],
    ops: SamplingOps,
) -> tuple[DeviceState, Int[Array, "B J"]]:
    """Draw a token at every position, write the tokens to the state with ``commit``, and count them for slots with penalties.

    raw: the model's logits; biased: with biases; masks: bitmasks of allowed tokens. All devices of ``tp`` draw the same tokens.
    """
    by_rank = P(step.spec.batch_axes)
    most_drafts = state.max_drafts

    def local(slots, counts, at, raw, biased, masks, ops):
        slots, counts, at, raw, biased, masks = jax.tree.map(
            lambda array: array[0], (slots, counts, at, raw, biased, masks)
        )
        row_sampling = _sampling(slots, at)

        def penalised(logits):
            before = take(counts, _slot_indices(at)).astype(jnp.int32)
            if most_drafts:
                before = sampler.counts_along_drafts(before, at.token, at.number, most_drafts, MOST_COUNTED)
            return sampler.penalise(
                logits, before, row_sampling.presence, row_sampling.frequency, row_sampling.repetition
            )

        changed = lax.cond(ops.penalties, penalised, lambda logits: logits, biased)
        allowed = lambda logits: jnp.where(sampler.allowed(masks, logits.shape[-1]), logits, -jnp.inf)  # noqa: E731
        changed = lax.cond(ops.masks, allowed, lambda logits: logits, changed)
        num_sampled = jnp.maximum(_output_indices(at, row_sampling), 0)
        return sample(*jax.tree.map(lambda array: array[None], (raw, changed, row_sampling, num_sampled)), ops)

    run = jax.shard_map(local, mesh=step.mesh, in_specs=(*[by_rank] * 6, P()), out_specs=by_rank, check_vma=False)
    tokens = run(state.slots, state.counts, at, raw, biased, masks, ops)
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


def _sampling(slots: Int[Array, "Z _"], at: Positions) -> SlotSampling:
    """Return the sampling parameters of each position. slots: see ``DeviceState``."""
    return SlotSampling.unpack(take(slots, _slot_indices(at))[:, SAMPLING:DRAFTS])


def _output_indices(at: Positions, sampling: SlotSampling) -> Int[Array, "J"]:
    """Return the output index of the token sampled at each position."""
    return at.position + 1 - sampling.num_prompt_tokens


def _count(
    step: ModelStep, state: DeviceState, at: Positions, outcome: Int[Array, "B J"], ops: SamplingOps
) -> DeviceState:
    """Count the sampled tokens of slots with penalties. A count is 2 × times in the output + 1 if in the prompt."""
    by_rank = P(step.spec.batch_axes)

    def local(counts, slots, at, outcome, ops):
        counts, slots, at, outcome = jax.tree.map(lambda a: a[0], (counts, slots, at, outcome))
        sampling = _sampling(slots, at)
        is_sampled = (at.slot >= 0) & (at.active > 0) & (at.next_token < 0) & (outcome >= 0)
        has_penalties = (sampling.presence != 0) | (sampling.frequency != 0) | (sampling.repetition != 1)
        slot = jnp.where(is_sampled & has_penalties, at.slot, counts.shape[0])

        def add(counts):
            # A row may sample one token several times, so add all increments before clamping.
            increased = counts.at[slot, jnp.maximum(outcome, 0)].add(2, mode="drop")
            return jnp.where(increased > 2 * MOST_COUNTED + 1, counts, increased)

        return lax.cond(ops.penalties, add, lambda counts: counts, counts)[None]

    run = jax.shard_map(
        local, mesh=step.mesh, in_specs=(by_rank, by_rank, by_rank, by_rank, P()), out_specs=by_rank, check_vma=False
    )
    return dataclasses.replace(state, counts=run(state.counts, state.slots, at, outcome, ops))
