"""Two-batch overlap: a step's tokens are split into halves a and b. While the rows of one half are exchanged, the other half computes.

Each layer has a dispatch and a combine for each half, so four exchanges. The scan's body starts one exchange before a layer, so that the
combine of half b, the last exchange of a layer, overlaps with the attention of half a in the next layer:

    | window | exchanged                              | computed                             |
    |--------|----------------------------------------|--------------------------------------|
    | 1      | results of half b, of the layer before | attention and routing of half a      |
    | 2      | tokens of half a                       | attention and routing of half b      |
    | 3      | tokens of half b                       | routed and shared experts of half a  |
    | 4      | results of half a                      | routed and shared experts of half b  |

A method that forwards rows through another rank has two exchanges per window. Without a split of the computation too, the scheduler would
overlap all of it with only one of them:

    | window | exchanged, first and then              | computed, first and then                            |
    |--------|----------------------------------------|-----------------------------------------------------|
    | 1      | inside hosts, between hosts            | projections; attention's heads, output and routing  |
    | 2      | between hosts, inside hosts            | projections and heads; output and routing           |
    | 3      | between hosts, inside hosts            | routed experts; shared experts                      |
    | 4      | inside hosts, between hosts            | shared experts; routed experts                      |

XLA's scheduler needs the barriers here and the flags in ``sharding/scheduler_flags.py``. Without an ``optimization_barrier`` at both ends
of a window, collectives start late and end early, or several overlap with one matmul. With the barriers, only the window's computation can
run during its exchange. The barriers include the cache, because a write that may move past them makes the scheduler copy the pool. Ragged
exchanges do not overlap even so, and ``auto`` does not choose them (``DispatchConfig.overlapped``).

Rows over capacity are sent in further rounds, for both halves together, before window 1. The host thus reads the number of rounds once
per layer, and no window has another collective. The cost of the split: weights of attention and experts are read once per half.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from dsjax.model.expert_dispatch import ExpertDispatch
from dsjax.model.layer_parts import LayerParts
from dsjax.model.layer_values import Computed, Layer, Projected, Sent, Tokens
from dsjax.model.micro_batches import MicroBatches
from dsjax.model.paging import Cache
from dsjax.model.step_description import StepDescription
from dsjax.model.transformer import DecoderLayer, by_layer
from sharding.dispatch import further_together
from sharding.dispatch.transit import in_turn
from sharding.placement import CopyTables


def run_in_halves(
    step: StepDescription,
    merges: Sequence[Callable[[Any], DecoderLayer]],
    weights: Sequence[Any],
    x: Float[Array, "B T *n D"],
    cache: Cache,
    first: Int[Array, ""],
    tokens: Tokens,
    copies: CopyTables,
) -> tuple[Float[Array, "B T *n D"], Cache, dict[str, Array]]:
    """Run a run of layers with routed experts. Return the tokens, the cache, and the counts of both halves, stacked over layers.

    merges: for each kind of layer in the run, a function that builds one from its slice of ``weights``; the run repeats the kinds in order.
    first: the first layer's number in the cache. copies: with leading axes for the repetitions and the kinds.
    """
    step = replace(step, dispatch=replace(step.dispatch, overlapped=True))
    parts, halves = step.parts, MicroBatches.of(tokens.groups, 2)
    tokens_a, tokens_b = (step.tokens(groups) for groups in halves.groups)
    x_a, x_b = jnp.split(x[:, halves.places], halves.borders, axis=1)

    def layers_of(slices: Sequence[Any], own_copies: CopyTables, index: Int[Array, ""]) -> list[tuple[Layer, Layer]]:
        """Return the layers of repetition ``index``, one per kind, each as a pair: for half a and for half b."""
        pairs = []
        for position, (merge, layer_weights) in enumerate(zip(merges, slices, strict=True)):
            block, layer_number = merge(layer_weights), first + index * len(merges) + position
            expert_copies = jax.tree.map(lambda array: array[position], own_copies)  # noqa: B023
            pairs.append(tuple(Layer(block, index, layer_number, half, expert_copies) for half in (tokens_a, tokens_b)))
        return pairs

    def before(layers: Sequence[tuple[Layer, Layer]]) -> list[Layer]:
        """Return the layer before ``layers``, for each half. Only its numbers are correct, which suffices: its experts are in the stack."""
        return [
            replace(layer, index=layer.index - 1, cache_layer=layer.cache_layer - len(layers)) for layer in layers[-1]
        ]

    def nothing(half: int, x: Array, part: Callable[[Layer, Array], Computed]) -> Computed:
        """Return zeros in the shape of ``part``'s result, for the layer before the first. They add nothing to ``x``."""
        slices, own_copies = jax.tree.map(lambda array: array[0], (tuple(weights), copies))
        layer = layers_of(slices, own_copies, jnp.int32(0))[0][half]
        shapes = jax.eval_shape(lambda x: part(layer, x), x)
        zeros = jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), shapes)
        over_ranks = NamedSharding(step.mesh, P(step.spec.token_axes))
        transit = jax.tree.map(lambda one: jax.lax.with_sharding_constraint(one, over_ranks), zeros.transit)
        return replace(zeros, x=x, mix=layer.block.mlp_residual.unmixed(zeros.mix), transit=transit)

    def turn(carry, xs):
        """Run one repetition of the kinds. carry: the layer before (half a's results returned, half b's computed), cache, repetition."""
        returned_a, computed_b, cache, index = carry
        layers, counts = layers_of(*xs, index), []
        before_a, before_b = before(layers)
        for a, b in layers:
            returned_a, computed_b = _further_rounds(parts.experts, [(before_a, returned_a), (before_b, computed_b)])
            returned_a, computed_b, cache = _hold(returned_a, computed_b, cache)

            x_a, counts_a = parts.add(before_a, returned_a)
            exchanges = parts.combine_stages(b, computed_b.x)  # window 1
            attend_a = _attention(parts, a, heads_first=False)
            returned_b, routed_a, cache = _beside(exchanges, computed_b, attend_a, x_a, cache)

            x_b, counts_b = parts.add(before_b, returned_b)
            exchanges = parts.dispatch_stages(a, x_a)  # window 2
            attend_b = _attention(parts, b, heads_first=True)
            sent_a, routed_b, cache = _beside(exchanges, routed_a, attend_b, x_b, cache)

            exchanges = parts.dispatch_stages(b, x_b)  # window 3
            compute_a = _experts(parts, a, shared_first=False)
            sent_b, computed_a, cache = _beside(exchanges, routed_b, compute_a, sent_a, cache)

            exchanges = parts.combine_stages(a, x_a)  # window 4
            compute_b = _experts(parts, b, shared_first=True)
            returned_a, computed_b, cache = _beside(exchanges, computed_a, compute_b, sent_b, cache)
            counts.append(jax.tree.map(jnp.add, counts_a, counts_b))
            before_a, before_b = a, b
        return (returned_a, computed_b, cache, index + 1), counts

    def computed(layer: Layer, x: Array) -> Computed:
        return parts.compute(layer, parts.send(layer, x))

    def returned(layer: Layer, x: Array) -> Computed:
        return in_turn(parts.combine_stages(layer, x), computed(layer, x))

    carry = nothing(0, x_a, returned), nothing(1, x_b, computed), cache, jnp.int32(0)
    (returned_a, computed_b, cache, index), counts = jax.lax.scan(turn, carry, (tuple(weights), copies))
    a, b = before(layers_of(*jax.tree.map(lambda array: array[-1], (tuple(weights), copies)), index))
    x_a, counts_a = parts.add(a, returned_a)
    x_b, counts_b = parts.receive(b, computed_b)
    last = jax.tree.map(jnp.add, counts_a, counts_b)
    # A layer's counts are known during the next layer: drop the first, which belong to no layer, and append the last layer's.
    counts = jax.tree.map(lambda some, last: jnp.concatenate([some[1:], last[None]]), by_layer([counts]), last)
    return jnp.concatenate([x_a, x_b], axis=1)[:, np.argsort(halves.places)], cache, counts


def _further_rounds(dispatch: ExpertDispatch, halves: Sequence[tuple[Layer, Computed]]) -> list[Computed]:
    """Run the further rounds of both halves together, so that ``add`` has none left to run."""
    exchanges = [dispatch.exchange(layer, computed.x) for layer, computed in halves]
    with jax.named_scope("experts"):
        transits = further_together(
            [
                (exchange, computed.transit, experts)
                for (exchange, experts), (_, computed) in zip(exchanges, halves, strict=True)
            ]
        )
    return [replace(computed, transit=one) for (_, computed), one in zip(halves, transits, strict=True)]


Work = Callable[[Any, Cache], tuple[Any, Cache]]
"""Part of a half's computation: (value, cache) → (value, cache)."""


def _beside(ways: Sequence[Callable[[Any], Any]], travels: Any, works: tuple[Work, Work], value: Any, cache: Cache):
    """Run one exchange beside both works, or the first two beside one each. Return the exchanged ``travels``, the value and the cache."""
    windows = [[work] for work in works] if len(ways) > 1 else [works]
    for exchange, works_beside in itertools.zip_longest(ways, windows, fillvalue=()):
        arrived = exchange(travels)
        for work in works_beside:
            value, cache = work(value, cache)
        travels, value, cache = _hold(arrived, value, cache)
    return travels, value, cache


def _attention(parts: LayerParts, layer: Layer, *, heads_first: bool) -> tuple[Work, Work]:
    """Return attention and routing of a half as two works. heads_first: compute attention's heads in the first work, not the second."""

    def attend(projected: Projected, cache: Cache) -> tuple[tuple[Array, Any, list[Array]], Cache]:
        return (projected.x, projected.mix, parts.heads(layer, projected.projections, cache)), cache

    def route(attended: tuple[Array, Any, list[Array]], cache: Cache) -> tuple[Sent, Cache]:
        return parts.route(layer, parts.add_heads(layer, *attended)), cache

    project = partial(parts.project, layer)
    if heads_first:
        return lambda x, cache: attend(*project(x, cache)), route
    return project, lambda projected, cache: route(*attend(projected, cache))


def _experts(parts: LayerParts, layer: Layer, *, shared_first: bool) -> tuple[Work, Work]:
    """Return the routed and the shared experts of a half as two works."""

    def share(sent: Sent, cache: Cache) -> tuple[tuple[Sent, Array | None], Cache]:
        return (sent, parts.share(layer, sent.normed)), cache

    def behind_shared(value: tuple[Sent, Array | None], cache: Cache) -> tuple[Computed, Cache]:
        sent, shared = value
        return replace(parts.compute_routed(layer, sent), shared=shared), cache

    def compute(sent: Sent, cache: Cache) -> tuple[tuple[Array, Computed], Cache]:
        return (sent.normed, parts.compute_routed(layer, sent)), cache

    def behind_routed(value: tuple[Array, Computed], cache: Cache) -> tuple[Computed, Cache]:
        normed, computed = value
        return replace(computed, shared=parts.share(layer, normed)), cache

    return (share, behind_shared) if shared_first else (compute, behind_routed)


def _hold(*values: Any) -> tuple[Any, ...]:
    """Schedule the producers of these values before this point, and their consumers after it."""
    return jax.lax.optimization_barrier(values)
