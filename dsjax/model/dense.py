"""The model on whole sequences at once, without a cache: differentiable, for training and as the plain reference.

One device, causal attention in the naive form over the sequence itself. Experts are applied by a callable, so that
training brings a product that has a gradient, and a test the plainest loop. Products are XLA's, or those of ``native_products.py``,
which are the engine's to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from dsjax.config import ModelConfig
from dsjax.kernels.gate import gated
from dsjax.model.attention import expand
from dsjax.model.mla import MLA, Projections
from dsjax.model.moe import RoutedExperts
from dsjax.model.norm import normalise
from dsjax.model.parameters import ParameterTable, multiply
from dsjax.model.rope import Rotation
from dsjax.model.router import Routing
from dsjax.model.sparse import choose, index_scores
from dsjax.model.transformer import DecoderLayer, Transformer

ExpertsFunction = Callable[
    [RoutedExperts, Float[Array, "T D"], Int[Array, "T K"], Float[Array, "T K"]], Float[Array, "T D"]
]

Observe = Callable[[Projections, slice, Bool[Array, "*B Q S"], Float[Array, "B H Q S"]], Float[Array, ""]]
"""What is summed over the blocks of queries of one layer: of what the layer made of all tokens, which queries the block has, which of the
first S positions each of them sees, and how their heads share their attention."""

QUERY_BLOCK = 128
"""Queries that attend together: small enough that a block skips the keys after it, large enough for full products."""


class Output(NamedTuple):
    """What a pass gives: logits, the ``hidden`` states they are projected from, and all layers' routing."""

    logits: Float[Array, "B S V"]
    hidden: Float[Array, "B S D"]
    """After the final norm: what the head multiplies, and what the MTP module takes."""
    routing: Routing | None
    """Stacked over MoE layers: ids and weights ``[L, B, S, K]``, scores ``[L, B, S, E]``; None without experts."""
    observed: Float[Array, "L"] | None = None
    """What ``observe`` gave in each layer; None without it."""


def every_expert(experts: RoutedExperts, x_TD, ids_TK, weights_TK):
    """The plainest product: every expert on every token, weighted by 0 where it was not chosen."""
    gate_up, down = experts.gate_up.value(x_TD.dtype), experts.down.value(x_TD.dtype)
    hidden = jnp.einsum("td,edgf->tegf", x_TD, gate_up)
    out = jnp.einsum("tef,efd->ted", gated(hidden[:, :, 0], hidden[:, :, 1]), down)
    chosen = jax.nn.one_hot(ids_TK, down.shape[0], dtype=jnp.float32) * weights_TK[..., None]
    return jnp.einsum("ted,te->td", out.astype(jnp.float32), chosen.sum(axis=1)).astype(x_TD.dtype)


class XlaProducts:
    """The sums of a pass as XLA makes them: products with matrices, norms, attention, experts, and the head."""

    multiply = staticmethod(multiply)
    normalise = staticmethod(normalise)
    experts = staticmethod(every_expert)

    def attend(
        self, mla: MLA, p: Projections, observe: Observe | None = None
    ) -> tuple[Float[Array, "B S H U"], Float[Array, ""] | None]:
        """Causal attention of sequences to themselves, and the sum of what ``observe`` gives."""
        return attend(mla.config, p, *mla.key_value_weight(p.latent.dtype), observe)

    def project(self, model: Transformer, x: Float[Array, "B S D"]) -> Float[Array, "B S V"]:
        """Float32 logits."""
        return project_to_vocabulary(model, x)


def forward(
    params: Mapping[str, Array],
    table: ParameterTable,
    config: ModelConfig,
    tokens: Int[Array, "B S"],
    *,
    products: XlaProducts = XlaProducts(),
    experts: ExpertsFunction | None = None,
    dtype: jnp.dtype = jnp.float32,
    remat: bool = False,
    unroll: bool = False,
    observe: Observe | None = None,
) -> Output:
    """Logits of every position. ``table`` is the ``parameter_table`` that ``params`` belong to.

    products: how sums are made; ``NativeProducts`` for the engine's bits. experts: instead of ``products.experts``.
    remat: recompute each layer in the backward pass instead of keeping its activations. unroll: compile every layer for
    itself instead of a scan, which on CPU saves copying what the backward pass needs in and out of stacks. observe: what to sum over
    the queries of each layer.
    """
    model: Transformer = table.bind(params)
    rotation = _rotation(config, tokens.shape)
    x, routings, observed = model.embed(tokens, dtype), None, []
    for stack in model.stacks:
        x, (routing, own) = _run_stack(stack, x, rotation, products, experts, remat, unroll, observe)
        routings = routing if routing is not None else routings
        observed.append(own)
    hidden = products.normalise(model.final_norm, x)
    observed = None if observe is None else jnp.concatenate(observed)
    return Output(products.project(model, hidden), hidden, routings, observed)


def predict_further(
    params: Mapping[str, Array],
    table: ParameterTable,
    config: ModelConfig,
    hidden: Float[Array, "B S D"],
    next_tokens: Int[Array, "B S"],
    *,
    depth: int = 0,
    products: XlaProducts = XlaProducts(),
    experts: ExpertsFunction | None = None,
    observe: Observe | None = None,
) -> Output:
    """The MTP module ``depth``: from hidden states and the tokens after them, logits one token further.

    ``h' = M [RMSNorm(Emb(t_{i+1})) ; RMSNorm(h_i)]``, one decoder layer, its own final norm, the shared head (V3 report
    §2.2, equations 21 to 23; the two halves in the order of the released weights, embedding first). ``hidden`` comes
    from ``forward`` or from the module before; its positions are kept.
    """
    model: Transformer = table.bind(params)
    mtp = _slice_layer(model.mtp, depth)
    embedded = products.normalise(mtp.embed_norm, model.embed(next_tokens, hidden.dtype))
    joined = jnp.concatenate([embedded, products.normalise(mtp.hidden_norm, hidden)], axis=-1)
    x = products.multiply(mtp.eh_proj, joined)
    rotation = _rotation(config, next_tokens.shape)
    x, (routing, observed) = _layer(mtp.layers, x, rotation, products, experts, observe)
    further = products.normalise(mtp.final_norm, x)
    observed = None if observed is None else observed[None]
    return Output(products.project(model, further), further, routing, observed)


def project_to_vocabulary(model: Transformer, x: Float[Array, "B S D"]) -> Float[Array, "B S V"]:
    """Float32 logits."""
    return jnp.einsum("bsd,dv->bsv", x, model.head_weight(x.dtype), preferred_element_type=jnp.float32)


def _rotation(config: ModelConfig, shape: tuple[int, int]) -> Rotation:
    positions = jnp.broadcast_to(jnp.arange(shape[1]), shape)
    return Rotation.at(positions, config.rope, config.qk_rope_head_dim)


def _slice_layer(stack: nnx.Module, index: int) -> nnx.Module:
    graph, weights = nnx.split(stack)
    return nnx.merge(graph, jax.tree.map(lambda a: a[index], weights))


def _run_stack(stack: DecoderLayer, x, rotation, products: XlaProducts, experts, remat: bool, unroll: bool, observe):
    graph, weights = nnx.split(stack)

    def body(x, weights):
        return _layer(nnx.merge(graph, weights), x, rotation, products, experts, observe)

    return jax.lax.scan(jax.checkpoint(body) if remat else body, x, weights, unroll=unroll)


def _layer(
    block: DecoderLayer,
    x,
    rotation: Rotation,
    products: XlaProducts,
    experts: ExpertsFunction | None,
    observe: Observe | None,
):
    mla, normed = block.attn, products.normalise(block.attn_norm, x)
    p = mla.project(normed, rotation, multiply=products.multiply, normalise=products.normalise)
    heads, observed = products.attend(mla, p, observe)
    x = x + mla.output(heads, products.multiply)
    normed = products.normalise(block.mlp_norm, x)
    if hasattr(block, "mlp"):
        return x + block.mlp(normed, products.multiply), (None, observed)

    def apply(weights, x, routing):
        flat = (rearrange(a, "b s d -> (b s) d") for a in (x, routing.ids, routing.weights))
        return (experts or products.experts)(weights, *flat).reshape(x.shape), None

    y, routing, _ = block.moe(normed, apply, multiply=products.multiply)
    return x + y, (routing, observed)


def attend(
    config: ModelConfig,
    p: Projections,
    up_key: Float[Array, "M H N"],
    up_value: Float[Array, "M H U"],
    observe: Observe | None = None,
) -> tuple[Float[Array, "B S H U"], Float[Array, ""] | None]:
    """Causal attention of sequences to themselves, keys and values expanded per head, and the sum of what ``observe`` gives.

    Queries go in blocks, each against the keys up to its end: of the scores that the mask would throw away, most are
    never computed.
    """
    heads_first, length = partial(rearrange, pattern="b s h n -> b h s n"), p.latent.shape[1]
    queries = heads_first(jnp.concatenate([p.q_nope, p.q_rope], axis=-1))
    keys, values = map(heads_first, expand(p.latent, p.k_rope, up_key, up_value))
    heads, observed = [], []
    for start in range(0, length, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, length)
        scores = jnp.einsum(
            "bhqn,bhkn->bhqk", queries[:, :, start:end], keys[:, :, :end], preferred_element_type=jnp.float32
        )
        seen = jnp.arange(start, end)[:, None] >= jnp.arange(end)
        if p.index is not None and end > config.index_topk:
            scored = index_scores(p.index.query[:, start:end], p.index.weight[:, start:end], p.index.key[:, :end])
            seen = choose(jnp.where(seen, scored, -jnp.inf), config.index_topk)[:, None]
        scores = jnp.where(seen, scores * config.softmax_scale, -jnp.inf)
        probs = jax.nn.softmax(scores, axis=-1).astype(p.latent.dtype)
        heads.append(jnp.einsum("bhqk,bhku->bhqu", probs, values[:, :, :end]))
        if observe is not None:
            observed.append(observe(p, slice(start, end), seen, probs))
    out = rearrange(jnp.concatenate(heads, axis=2), "b h s u -> b s h u")
    return out, None if observe is None else sum(observed)
