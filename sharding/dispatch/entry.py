"""``dispatch``: the one call a model makes; opens ``shard_map`` and hands this rank's tokens to the chosen method."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from sharding.dispatch.config import DispatchConfig, default_capacity
from sharding.dispatch.gather import gather_dispatch
from sharding.dispatch.group import ExpertGroup
from sharding.dispatch.padded import padded_dispatch
from sharding.dispatch.wire import WireFormat
from sharding.errors import MeshError
from sharding.mesh import MeshSpec

LocalExperts = Callable[[Any, Float[Array, "N D"], Int[Array, "N K"], Float[Array, "N K"]], Float[Array, "N D"]]


def dispatch(
    spec: MeshSpec,
    mesh: Mesh,
    config: DispatchConfig,
    x_TD: Float[Array, "T D"],
    slots_TK: Int[Array, "T K"],
    weights_TK: Float[Array, "T K"],
    params: Any,
    local_experts: LocalExperts,
    param_specs: Any,
) -> tuple[Float[Array, "T D"], Any]:
    """Send every token to the ranks that hold its experts and return the weighted sums, inside ``jit``.

    x_TD: all tokens of the step, DP rank by DP rank. T must be a multiple of ``spec.dp_size``; a DP rank's tokens are
        padded to a multiple of ``tp`` here, and split over its ``tp`` ranks.
    slots_TK: physical experts of each token, distinct in a row; -1: none (padding, or an idle rank's tokens).
    weights_TK: their routing weights; used as float32.
    params: pytree of the experts' weights, physical experts leading in every leaf.
    param_specs: ``PartitionSpec`` of each leaf: experts over ``spec.expert_axes``, widths over ``spec.expert_width_axes``.
    local_experts: ``(params, rows_ND, ids_NK, weights_NK) -> out_ND`` on one rank's shard of ``params``:
        ``out[n] = sum_k weights[n, k] * Expert_{ids[n, k]}(rows[n])``, ids local and -1 for none; a partial sum over
        the width where that is split.

    Returns ``y_TD`` in x's dtype, sharded over ``spec.token_axes``, and None.

    Raises:
        MeshError: tokens that do not divide over the DP ranks; experts that do not divide over the EP group.
    """
    tokens = x_TD.shape[0]
    if tokens % spec.dp_size:
        raise MeshError(
            f"{tokens} tokens do not divide over dp={spec.dp_size} ranks; pad each rank's tokens to the same number, "
            "with expert id -1"
        )
    experts = _experts_per_rank(params, spec)
    group = ExpertGroup.of(spec, mesh, experts)
    pad = partial(_pad_per_dp_rank, dp=spec.dp_size, multiple=spec.tp_size)
    inputs = pad(x_TD, fill=0), pad(slots_TK, fill=-1), pad(weights_TK.astype(jnp.float32), fill=0)
    tokens_spec = P(spec.token_axes)
    y = jax.shard_map(
        partial(_on_one_rank, group, config, local_experts),
        mesh=mesh,
        in_specs=(tokens_spec, tokens_spec, tokens_spec, param_specs),
        out_specs=tokens_spec,
        check_vma=False,
    )(*inputs, params)
    return _unpad_per_dp_rank(y, tokens, spec.dp_size), None


def _on_one_rank(
    group: ExpertGroup, config: DispatchConfig, local_experts: LocalExperts, x_TD, slots_TK, weights_TK, params
) -> jax.Array:
    product = partial(local_experts, params)
    if group.all_ranks == 1:
        return product(x_TD, slots_TK, weights_TK)
    tokens, top_k = slots_TK.shape
    wire = WireFormat(x_TD.shape[1], top_k, x_TD.dtype, config.wire == "fp8")
    if config.method in ("gather", "auto"):
        return gather_dispatch(group, wire, x_TD, slots_TK, weights_TK, product)
    capacity = min(tokens, config.capacity or default_capacity(tokens, top_k, group.size))
    return padded_dispatch(group, wire, capacity, x_TD, slots_TK, weights_TK, product)[0]


def _experts_per_rank(params: Any, spec: MeshSpec) -> int:
    counts = {leaf.shape[0] for leaf in jax.tree.leaves(params)}
    if len(counts) != 1:
        raise MeshError(f"expert parameters lead with {sorted(counts)} experts; expected the same number in every leaf")
    (experts,) = counts
    if experts % spec.ep_size:
        raise MeshError(
            f"{experts} physical experts are not divisible by ep={spec.ep_size}; add {-experts % spec.ep_size} redundant ones"
        )
    return experts // spec.ep_size


def _pad_per_dp_rank(array: jax.Array, *, dp: int, multiple: int, fill: int) -> jax.Array:
    """[dp * t, ...] with each DP rank's t padded to a multiple."""
    t = array.shape[0] // dp
    extra = -t % multiple
    if not extra:
        return array
    split = array.reshape(dp, t, *array.shape[1:])
    padded = jnp.pad(split, ((0, 0), (0, extra)) + ((0, 0),) * (array.ndim - 1), constant_values=fill)
    return padded.reshape(-1, *array.shape[1:])


def _unpad_per_dp_rank(array: jax.Array, tokens: int, dp: int) -> jax.Array:
    if array.shape[0] == tokens:
        return array
    return array.reshape(dp, -1, *array.shape[1:])[:, : tokens // dp].reshape(tokens, *array.shape[1:])
