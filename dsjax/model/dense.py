"""The model on whole sequences at once, without a cache: differentiable, for training and as the plain reference.

One device, causal attention in the naive form over the sequence itself. Experts are applied by a callable, so that
training brings a product that has a gradient, and a test the plainest loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float, Int

from dsjax.config import ModelConfig
from dsjax.model.attention import expand
from dsjax.model.mla import MLA
from dsjax.model.moe import RoutedExperts
from dsjax.model.parameters import ParameterTable
from dsjax.model.rope import Rotation
from dsjax.model.router import Routing
from dsjax.model.transformer import DecoderLayer, Transformer

ExpertsFunction = Callable[
    [RoutedExperts, Float[Array, "T D"], Int[Array, "T K"], Float[Array, "T K"]], Float[Array, "T D"]
]

QUERY_BLOCK = 128
"""Queries that attend together: small enough that a block skips the keys after it, large enough for full products."""


class Output(NamedTuple):
    """What a pass gives: logits, the ``hidden`` states they are projected from, and all layers' routing."""

    logits: Float[Array, "B S V"]
    hidden: Float[Array, "B S D"]
    """After the final norm: what the head multiplies, and what the MTP module takes."""
    routing: Routing | None
    """Stacked over MoE layers: ids and weights ``[L, B, S, K]``, scores ``[L, B, S, E]``; None without experts."""


def every_expert(experts: RoutedExperts, x_TD, ids_TK, weights_TK):
    """The plainest product: every expert on every token, weighted by 0 where it was not chosen."""
    gate_up, down = experts.gate_up.value(x_TD.dtype), experts.down.value(x_TD.dtype)
    hidden = jnp.einsum("td,edgf->tegf", x_TD, gate_up)
    out = jnp.einsum("tef,efd->ted", jax.nn.silu(hidden[:, :, 0]) * hidden[:, :, 1], down)
    chosen = jax.nn.one_hot(ids_TK, down.shape[0], dtype=jnp.float32) * weights_TK[..., None]
    return jnp.einsum("ted,te->td", out.astype(jnp.float32), chosen.sum(axis=1)).astype(x_TD.dtype)


def forward(
    params: Mapping[str, Array],
    table: ParameterTable,
    config: ModelConfig,
    tokens: Int[Array, "B S"],
    *,
    experts: ExpertsFunction = every_expert,
    dtype: jnp.dtype = jnp.float32,
    remat: bool = False,
    unroll: bool = False,
) -> Output:
    """Logits of every position. ``table`` is the ``parameter_table`` that ``params`` belong to.

    remat: recompute each layer in the backward pass instead of keeping its activations. unroll: compile every layer for
    itself instead of a scan, which on CPU saves copying what the backward pass needs in and out of stacks.
    """
    model: Transformer = table.bind(params)
    rotation = _rotation(config, tokens.shape)
    x, routings = model.embed(tokens, dtype), None
    for stack in model.stacks:
        x, routing = _run_stack(stack, x, rotation, experts, remat, unroll)
        routings = routing if routing is not None else routings
    hidden = model.final_norm(x)
    return Output(project_to_vocabulary(model, hidden), hidden, routings)


def predict_further(
    params: Mapping[str, Array],
    table: ParameterTable,
    config: ModelConfig,
    hidden: Float[Array, "B S D"],
    next_tokens: Int[Array, "B S"],
    *,
    depth: int = 0,
    experts: ExpertsFunction = every_expert,
) -> Output:
    """The MTP module ``depth``: from hidden states and the tokens after them, logits one token further.

    ``h' = M [RMSNorm(Emb(t_{i+1})) ; RMSNorm(h_i)]``, one decoder layer, its own final norm, the shared head (V3 report
    §2.2, equations 21 to 23; the two halves in the order of the released weights, embedding first). ``hidden`` comes
    from ``forward`` or from the module before; its positions are kept.
    """
    model: Transformer = table.bind(params)
    mtp = _slice_layer(model.mtp, depth)
    embedded = mtp.embed_norm(model.embed(next_tokens, hidden.dtype))
    joined = jnp.concatenate([embedded, mtp.hidden_norm(hidden)], axis=-1)
    x = joined @ mtp.eh_proj.value(hidden.dtype)
    x, routing = _layer(mtp.layers, x, _rotation(config, next_tokens.shape), experts)
    further = mtp.final_norm(x)
    return Output(project_to_vocabulary(model, further), further, routing)


def project_to_vocabulary(model: Transformer, x: Float[Array, "B S D"]) -> Float[Array, "B S V"]:
    """Float32 logits."""
    return jnp.einsum("bsd,dv->bsv", x, model.head_weight(x.dtype), preferred_element_type=jnp.float32)


def _rotation(config: ModelConfig, shape: tuple[int, int]) -> Rotation:
    positions = jnp.broadcast_to(jnp.arange(shape[1]), shape)
    return Rotation.at(positions, config.rope, config.qk_rope_head_dim)


def _slice_layer(stack: nnx.Module, index: int) -> nnx.Module:
    graph, weights = nnx.split(stack)
    return nnx.merge(graph, jax.tree.map(lambda a: a[index], weights))


def _run_stack(stack: DecoderLayer, x, rotation, experts, remat: bool, unroll: bool):
    graph, weights = nnx.split(stack)

    def body(x, weights):
        return _layer(nnx.merge(graph, weights), x, rotation, experts)

    return jax.lax.scan(jax.checkpoint(body) if remat else body, x, weights, unroll=unroll)


def _layer(block: DecoderLayer, x, rotation: Rotation, experts: ExpertsFunction):
    x = x + _attend(block.attn, block.attn_norm(x), rotation)
    normed = block.mlp_norm(x)
    if hasattr(block, "mlp"):
        return x + block.mlp(normed), None

    def apply(weights, x, routing):
        flat = (rearrange(a, "b s d -> (b s) d") for a in (x, routing.ids, routing.weights))
        return experts(weights, *flat).reshape(x.shape), None

    y, routing, _ = block.moe(normed, apply)
    return x + y, routing


def _attend(mla: MLA, x: Float[Array, "B S D"], rotation: Rotation) -> Float[Array, "B S D"]:
    """Causal attention of a sequence to itself, keys and values expanded per head.

    Queries go in blocks, each against the keys up to its end: of the scores that the mask would throw away, most are
    never computed.
    """
    p = mla.project(x, rotation)
    heads_first = partial(rearrange, pattern="b s h n -> b h s n")
    queries = heads_first(jnp.concatenate([p.q_nope, p.q_rope], axis=-1))
    keys, values = map(heads_first, expand(p.latent, p.k_rope, *mla.key_value_weight(x.dtype)))
    heads = []
    for start in range(0, x.shape[1], QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, x.shape[1])
        scores = jnp.einsum(
            "bhqn,bhkn->bhqk", queries[:, :, start:end], keys[:, :, :end], preferred_element_type=jnp.float32
        )
        seen = jnp.arange(start, end)[:, None] >= jnp.arange(end)
        probs = jax.nn.softmax(jnp.where(seen, scores * mla.config.softmax_scale, -jnp.inf), axis=-1).astype(x.dtype)
        heads.append(jnp.einsum("bhqk,bhku->bhqu", probs, values[:, :, :end]))
    return mla.output(rearrange(jnp.concatenate(heads, axis=2), "b h s u -> b s h u"))
