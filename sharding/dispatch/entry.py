"""``dispatch``: the one call a model makes; opens ``shard_map`` and hands this rank's tokens to the chosen method."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from sharding.dispatch.choice import choose_method
from sharding.dispatch.config import DispatchConfig, default_capacity
from sharding.dispatch.gather import gather_dispatch
from sharding.dispatch.group import ExpertGroup
from sharding.dispatch.local import Counts, LocalExperts, RankExperts
from sharding.dispatch.padded import padded_dispatch
from sharding.dispatch.ragged import ragged_dispatch
from sharding.dispatch.wire import WireFormat
from sharding.errors import MeshError
from sharding.mesh import MeshSpec


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
    experts: int | None = None,
    home: bool = False,
) -> tuple[Float[Array, "T D"], Counts | None]:
    """Send every token to the ranks that hold its experts and return the weighted sums, inside ``jit``.

    x_TD: all tokens of the step, DP rank by DP rank. T must be a multiple of ``spec.dp_size``; a DP rank's tokens are
        padded to a multiple of ``tp`` here, and split over its ``tp`` ranks.
    slots_TK: physical experts of each token, distinct in a row; -1: none (padding, or an idle rank's tokens).
    weights_TK: their routing weights; used as float32.
    params: pytree of what ``local_experts`` needs; param_specs: ``PartitionSpec`` of each leaf, experts over
        ``spec.expert_axes``, widths over ``spec.expert_width_axes``.
    local_experts: ``(params, rows_ND, ids_NK, weights_NK) -> out_ND`` on one rank's shard of ``params``:
        ``out[n] = sum_k weights[n, k] * Expert_{ids[n, k]}(rows[n])``, ids local and -1 for none; a partial sum over
        the width where that is split. Rows may come as ``PackedRows``: read them by ``rows.take(indices, axis=0)``.
    experts: physical experts over all ranks; None: the leading dimension of every leaf of ``params``.
    home: whether each rank holds one expert more, behind its physical ones, that its own tokens all use, with weight 1: no row
        leaves its rank for it. ``experts`` does not count it, nor does the report. A token without any slot does not use it.

    Returns ``y_TD`` in x's dtype, sharded over ``spec.token_axes``; and with ``config.report`` a dict of int32 counts, one
    row per rank in the order of ``spec.token_axes`` (``DispatchStatistics.of`` reads it), else None:
        ``tokens_per_expert [ranks, experts on a rank]``, ``rows_sent [ranks]``, ``rows_received [ranks]``, ``rounds [ranks]``.

    Raises:
        MeshError: tokens that do not divide over the DP ranks; experts that do not divide over the EP group.
    """
    tokens = x_TD.shape[0]
    if tokens % spec.dp_size:
        raise MeshError(
            f"{tokens} tokens do not divide over dp={spec.dp_size} ranks; pad each rank's tokens to the same number, "
            "with expert id -1"
        )
    experts = _leading_dimension(params) if experts is None else experts
    if experts % spec.ep_size:
        raise MeshError(
            f"{experts} physical experts are not divisible by ep={spec.ep_size}; add {-experts % spec.ep_size} redundant ones"
        )
    group = ExpertGroup.of(spec, experts, mesh.devices.flat[0].platform)
    pad = partial(_pad_per_dp_rank, dp=spec.dp_size, multiple=spec.tp_size)
    inputs = pad(x_TD, fill=0), pad(slots_TK, fill=-1), pad(weights_TK.astype(jnp.float32), fill=0)
    over_ranks = P(spec.token_axes)
    with jax.named_scope("dispatch"):
        y, counts = jax.shard_map(
            partial(_on_one_rank, group, config, local_experts, home),
            mesh=mesh,
            in_specs=(over_ranks, over_ranks, over_ranks, param_specs),
            out_specs=(over_ranks, over_ranks),
            check_vma=False,
        )(*inputs, params)
    return _unpad_per_dp_rank(y, tokens, spec.dp_size), counts if config.report else None


def exchange_plan(config: DispatchConfig, tokens: int, top_k: int, group: ExpertGroup) -> tuple[str, int, int, int]:
    """``(method, tokens of a chunk, chunks, capacity)`` that ``config`` means for a rank's ``tokens``.

    The method is ``local`` where the group is this rank alone: no collective at all.
    """
    chunk = min(tokens, config.chunk_tokens or tokens)
    chunks = -(-tokens // chunk)
    chunk = -(-tokens // chunks)  # even chunks, so that the padding is less than one row a chunk
    capacity = min(chunk, config.capacity or default_capacity(chunk, top_k, group.size))
    if group.all_ranks == 1:
        return "local", chunk, chunks, capacity
    method = config.method
    if method == "auto":
        method = choose_method(chunk, top_k, group.size, group.platform)
    return method, chunk, chunks, capacity


def resolved_method(
    spec: MeshSpec, config: DispatchConfig, *, tokens: int, top_k: int, experts: int, platform: str
) -> str:
    """What ``dispatch`` does where a DP rank has ``tokens`` tokens: ``gather``, ``padded``, ``ragged``, or ``local``.

    ``local`` is said of a mesh where one device holds all experts, so that nothing is sent, whatever ``config`` asks for.

    Args:
        top_k: experts that a token uses.
        experts: physical experts in all.
        platform: of the mesh's devices: ``cpu``, ``gpu`` or ``tpu``.
    """
    group = ExpertGroup.of(spec, experts, platform)
    return exchange_plan(config, -(-tokens // spec.tp_size), top_k, group)[0]


def _on_one_rank(
    group: ExpertGroup,
    config: DispatchConfig,
    local_experts: LocalExperts,
    home: bool,
    x_TD,
    slots_TK,
    weights_TK,
    params,
) -> tuple[jax.Array, Counts]:
    tokens, top_k = slots_TK.shape
    method, chunk, chunks, capacity = exchange_plan(config, tokens, top_k, group)
    wire = WireFormat(x_TD.shape[1], top_k, x_TD.dtype, config.wire == "fp8")
    experts = RankExperts(group, local_experts, params, config.report, home)

    def exchange(x_TD, slots_TK, weights_TK) -> tuple[jax.Array, Counts]:
        if method == "local":
            if home:
                own_TK, one_TK = experts.home_slots(slots_TK)
                slots_TK, weights_TK = (
                    jnp.concatenate(pair, axis=1) for pair in ((slots_TK, own_TK[:, :1]), (weights_TK, one_TK[:, :1]))
                )
            y_TD, seen = experts(x_TD, slots_TK, weights_TK)
            nothing = jnp.int32(0)
            return y_TD, seen and seen | {"rows_sent": nothing, "rows_received": nothing, "rounds": nothing}
        if method == "gather":
            return gather_dispatch(group, wire, x_TD, slots_TK, weights_TK, experts)
        if method == "padded":
            return padded_dispatch(group, wire, capacity, x_TD, slots_TK, weights_TK, experts)
        return ragged_dispatch(group, wire, x_TD, slots_TK, weights_TK, experts)

    if chunks == 1:
        y_TD, counts = exchange(x_TD, slots_TK, weights_TK)
    else:
        pad = partial(_pad_rows, rows=chunks * chunk)
        inputs = pad(x_TD, fill=0), pad(slots_TK, fill=-1), pad(weights_TK, fill=0)
        split = [array.reshape(chunks, chunk, -1) for array in inputs]
        _, (y, counts) = lax.scan(lambda _, inputs: (None, exchange(*inputs)), None, split)
        y_TD = y.reshape(chunks * chunk, -1)[:tokens]
        counts = jax.tree.map(lambda count: jnp.sum(count, axis=0), counts)
    return y_TD, jax.tree.map(lambda count: count[None], counts)


def _leading_dimension(params: Any) -> int:
    counts = {leaf.shape[0] if leaf.ndim else 0 for leaf in jax.tree.leaves(params)}
    if len(counts) != 1:
        raise MeshError(
            f"expert parameters lead with {sorted(counts)} experts; expected the same number in every leaf, or the "
            "number given as `experts`"
        )
    return counts.pop()


def _pad_rows(array: jax.Array, *, rows: int, fill: int) -> jax.Array:
    return jnp.pad(array, ((0, rows - array.shape[0]), (0, 0)), constant_values=fill)


def _pad_per_dp_rank(array: jax.Array, *, dp: int, multiple: int, fill: int) -> jax.Array:
    """[dp * t, ...] with each DP rank's t padded to a multiple."""
    t = array.shape[0] // dp
    extra = -t % multiple
    if not extra:
        return array
    split = rearrange(array, "(dp t) ... -> dp t ...", dp=dp)
    padded = jnp.pad(split, ((0, 0), (0, extra)) + ((0, 0),) * (array.ndim - 1), constant_values=fill)
    return rearrange(padded, "dp t ... -> (dp t) ...")


def _unpad_per_dp_rank(array: jax.Array, tokens: int, dp: int) -> jax.Array:
    if array.shape[0] == tokens:
        return array
    whole = rearrange(array, "(dp t) ... -> dp t ...", dp=dp)
    return rearrange(whole[:, : tokens // dp], "dp t ... -> (dp t) ...")
