"""The model as described in its reports: MLA, the router, experts, decoder layers, MTP modules.

Each module declares its parameters, and its ``__call__`` is the plain forward pass: whole sequences, no cache, no mesh, differentiable.
Training runs it, and tests compare every layout, MLA form and dispatch with it. Serving runs the same parameters with ``step.py``.

Sources: the reports of DeepSeek-V2 (arXiv 2405.04434, §2.1) and DeepSeek-V3 (2412.19437, §2.1, §2.2). Letters: ``docs/glossary.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from dsjax.config import ModelConfig
from dsjax.config.layers import LayerKind, stacks
from dsjax.kernels.gate import gated
from dsjax.model.compressed.attention import CompressedAttention
from dsjax.model.compressed.rotations import Rotations
from dsjax.model.compressed.streams import Streams
from dsjax.model.fp4_matrix import FP4Matrix
from dsjax.model.norm import LATENT_EPS, Normalise, RMSNorm, normalise
from dsjax.model.parameters import Declaration, Matrix, Multiply, multiply, value_of
from dsjax.model.residual import Residual
from dsjax.model.rope import Rotation
from dsjax.model.router import ExpertRouter, HashRouter, Routing
from dsjax.model.sparse.choose import choose, index_scores
from dsjax.model.sparse.indexer import Indexer, IndexProjections

RESIDUALS: dict[str, type[Residual]] = {"addition": Residual, "streams": Streams}
"""Value of ``ModelConfig.residual`` → class."""
AnyRotation = Rotation | Rotations
QUERY_BLOCK = 128  # queries that attend together: few enough that a block skips most later keys


class MLP(nnx.Module):
    """SwiGLU MLP of a dense layer or of the shared experts. limit: see ``gated``."""

    def __init__(self, declare: Declaration, width: int, hidden: int, width_axis: str, limit: float | None = None):
        self.limit = limit
        self.gate_up = Matrix(declare, (width, 2, hidden), ("embed", "stack", width_axis))
        self.down = Matrix(declare, (hidden, width), (width_axis, "embed"))

    def __call__(self, x: Float[Array, "*b D"], multiply: Multiply = multiply) -> Float[Array, "*b D"]:
        """Return ``down(silu(gate(x)) × up(x))``."""
        with jax.named_scope("mlp"):
            gate_up = multiply(self.gate_up, x)
            return multiply(self.down, gated(gate_up[..., 0, :], gate_up[..., 1, :], self.limit))


# Attention (V2 report, equations 37 to 47)


@jax.tree_util.register_dataclass
@dataclass
class Projections:
    """Attention's projections of tokens; leading dimensions ``*b`` are the caller's (``[B, T]`` in a step)."""

    q_nope: Float[Array, "*b H N"]
    q_rope: Float[Array, "*b H O"]  # rotated
    q_latent: Float[Array, "*b Q"]  # input of the query heads: the query latent, or x without compression
    latent: Float[Array, "*b M"]  # normalised, as cached
    k_rope: Float[Array, "*b O"]  # rotated, shared by all heads
    index: IndexProjections | None = None  # of models with sparse attention


class MLA(nnx.Module):
    """Multi-head latent attention. ``attention.py`` attends over a paged cache, in the forms of ``forms.py``."""

    def __init__(self, declare: Declaration, config: ModelConfig):
        self.config = config
        D, H, own = config.hidden_size, config.num_attention_heads, config.mla
        M, Q, N, O, U = own.kv_lora_rank, own.q_lora_rank, own.qk_nope_head_dim, own.qk_rope_head_dim, own.v_head_dim
        if Q is None:
            self.q = Matrix(declare, (D, H * (N + O)), ("embed", "heads"))
        else:
            self.q_a = Matrix(declare, (D, Q), ("embed", "query_latent"))
            self.q_a_norm = RMSNorm(declare, Q, LATENT_EPS, "query_latent")
            self.q_b = Matrix(declare, (Q, H * (N + O)), ("query_latent", "heads"))
        self.kv_a = Matrix(declare, (D, M + O), ("embed", "latent"))
        self.kv_a_norm = RMSNorm(declare, M, LATENT_EPS, "latent")
        self.kv_b = Matrix(declare, (M, H * (N + U)), ("latent", "heads"), by_head=True)
        self.o = Matrix(declare, (H * U, D), ("heads", "embed"))
        if config.attention_bias:
            if Q is not None:
                self.q_a_bias = declare.parameter((Q,), ("query_latent",), init="zeros")
            self.kv_a_bias = declare.parameter((M + O,), ("latent",), init="zeros")
            self.o_bias = declare.parameter((D,), ("embed",), init="zeros")
        if own.indexer is not None:
            self.indexer = Indexer(declare, config)
        if declare.materialise:
            derived = {"init": "derived", "dtype": declare.derived_dtype}
            self.query_key = declare.parameter((Q or D, H, M), ("query_latent", "heads", "latent"), **derived)
            self.value_output = declare.parameter((H, M, D), ("heads", "latent", "embed"), **derived)

    def __call__(self, x: Float[Array, "B S D"], given: Pass):
        """Apply causal self-attention. Also return the value of ``XlaProducts.observe``."""
        p = self.project(x, given.rotation, multiply=given.products.multiply, normalise=given.products.normalise)
        heads, observed = given.products.attend(self, p)
        return self.output(heads, given.products.multiply), observed

    def project(
        self,
        x: Float[Array, "*b D"],
        rotation: Rotation,
        *,
        query_heads: bool = True,
        multiply: Multiply = multiply,
        normalise: Normalise = normalise,
    ) -> Projections:
        """Project tokens at the positions of ``rotation`` to queries, latent and rotary key. multiply, normalise: for matrices and norms.

        query_heads: False omits ``q_nope`` (shape ``[..., H, 0]``), which the form with materialised products does not need.
        """
        N, M = self.config.mla.qk_nope_head_dim, self.config.mla.kv_lora_rank
        with jax.named_scope("mla_project"):
            q_latent = x
            if self.config.mla.q_lora_rank is not None:
                q_latent = normalise(self.q_a_norm, _add_bias(multiply(self.q_a, x), self, "q_a_bias"))
            if query_heads:
                q = multiply(self._query_matrix, q_latent)
                q = rearrange(q, "... (h n) -> ... h n", h=self.config.num_attention_heads)
                q_nope, q_rope = q[..., :N], q[..., N:]
            else:
                q_rope = jnp.einsum("...q,qho->...ho", q_latent, self.query_weight(x.dtype)[..., N:])
                q_nope = q_rope[..., :0]
            kv = _add_bias(multiply(self.kv_a, x), self, "kv_a_bias")
            latent, k_rope = normalise(self.kv_a_norm, kv[..., :M]), rotation(kv[..., M:])
            index = None
            if self.config.mla.indexer is not None:
                index = self.indexer(x, q_latent, rotation, multiply, normalise)
            return Projections(q_nope, rotation(q_rope), q_latent, latent, k_rope, index)

    @property
    def _query_matrix(self) -> Matrix:
        return self.q if self.config.mla.q_lora_rank is None else self.q_b

    def query_weight(self, dtype: jnp.dtype) -> Float[Array, "Q H width"]:
        """Return ``W^UQ`` and ``W^QR`` by head, N + O wide (without query compression ``W^Q``, where Q is D)."""
        return rearrange(self._query_matrix.value(dtype), "q (h n) -> q h n", h=self.config.num_attention_heads)

    def key_value_weight(self, dtype: jnp.dtype) -> tuple[Float[Array, "M H N"], Float[Array, "M H U"]]:
        """Return ``W^UK`` and ``W^UV`` by head."""
        weight = rearrange(self.kv_b.value(dtype), "m (h n) -> m h n", h=self.config.num_attention_heads)
        N = self.config.mla.qk_nope_head_dim
        return weight[..., :N], weight[..., N:]

    def materialised(self, dtype: jnp.dtype) -> tuple[Float[Array, "Q H M"], Float[Array, "H M D"]]:
        """Return ``W^UQ·W^UK`` and ``W^UV·W^O`` by head, which must be declared."""
        return value_of(self.query_key).astype(dtype), value_of(self.value_output).astype(dtype)

    def output(self, heads: Float[Array, "*b H U"], multiply: Multiply = multiply) -> Float[Array, "*b D"]:
        """Apply ``W^O`` to the heads' values."""
        with jax.named_scope("mla_output"):
            return self.add_output_bias(multiply(self.o, rearrange(heads, "... h u -> ... (h u)")))

    def add_output_bias(self, out: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
        """Add the output projection's bias, if the model has one."""
        return _add_bias(out, self, "o_bias")


def _add_bias(out: Array, module: nnx.Module, name: str) -> Array:
    return out + value_of(getattr(module, name)).astype(out.dtype) if hasattr(module, name) else out


def expand(latent: Array, k_rope: Array, up_key: Array, up_value: Array) -> tuple[Array, Array]:
    """Expand latents ``[..., M]`` and rotary keys ``[..., O]`` to all heads' keys ``[..., H, N+O]`` and values ``[..., H, U]``."""
    k_nope = jnp.einsum("...m,mhn->...hn", latent, up_key)
    return with_rotary(k_nope, k_rope), jnp.einsum("...m,mhu->...hu", latent, up_value)


def with_rotary(k_nope: Float[Array, "*n H N"], k_rope: Float[Array, "*n O"]) -> Float[Array, "*n H N+O"]:
    """Return keys of all heads: each head's own part, followed by the shared rotary part."""
    shared = jnp.broadcast_to(k_rope[..., None, :], (*k_nope.shape[:-1], k_rope.shape[-1]))
    return jnp.concatenate([k_nope, shared], axis=-1)


Observe = Callable[[IndexProjections | None, slice, Bool[Array, "*B Q S"], Float[Array, "B H Q S"]], Float[Array, ""]]
"""Function of a block of queries, whose results are summed over a layer. Arguments: the indexer's projections of all tokens, the slice of
queries, the mask of the first S positions that each query sees, and the attention probabilities of its heads."""


def attend(
    config: ModelConfig, p: Projections, up_key: Float[Array, "M H N"], up_value: Float[Array, "M H U"], observe=None
) -> tuple[Float[Array, "B S H U"], Float[Array, ""] | None]:
    """Apply causal self-attention with the keys and values of each head. Also return the sum of ``observe``."""
    heads_first, length = partial(rearrange, pattern="b s h n -> b h s n"), p.latent.shape[1]
    queries = heads_first(jnp.concatenate([p.q_nope, p.q_rope], axis=-1))
    keys, values = map(heads_first, expand(p.latent, p.k_rope, up_key, up_value))
    heads, observed = [], []
    for start in range(0, length, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, length)
        blocks = queries[:, :, start:end], keys[:, :, :end]
        scores = jnp.einsum("bhqn,bhkn->bhqk", *blocks, preferred_element_type=jnp.float32)
        seen = jnp.arange(start, end)[:, None] >= jnp.arange(end)
        if p.index is not None and end > config.mla.indexer.topk:
            scored = index_scores(p.index.query[:, start:end], p.index.weight[:, start:end], p.index.key[:, :end])
            seen = choose(jnp.where(seen, scored, -jnp.inf), config.mla.indexer.topk)[:, None]
        scores = jnp.where(seen, scores * config.softmax_scale, -jnp.inf)
        probs = jax.nn.softmax(scores, axis=-1).astype(p.latent.dtype)
        heads.append(jnp.einsum("bhqk,bhku->bhqu", probs, values[:, :, :end]))
        if observe is not None:
            observed.append(observe(p.index, slice(start, end), seen, probs))
    out = rearrange(jnp.concatenate(heads, axis=2), "b h s u -> b s h u")
    return out, None if observe is None else sum(observed)


# The router (V3 report, equations 12 to 16; V2 report §2.1.2)


class RoutedExperts(nnx.Module):
    """Weights of the physical experts (V3 report, equation 12): SwiGLU MLPs, stacked."""

    def __init__(self, declare: Declaration, config: ModelConfig):
        P, D, F = declare.num_physical, config.hidden_size, config.moe_intermediate_size
        declare, self.limit = declare.for_experts, config.swiglu_limit
        matrix = Matrix if declare.format.packed is None else FP4Matrix
        self.gate_up = matrix(declare, (P, D, 2, F), ("experts", "embed", "stack", "expert_width"))
        self.down = matrix(declare, (P, F, D), ("experts", "expert_width", "embed"))

    def __call__(
        self, x: Float[Array, "T D"], ids: Int[Array, "T K"], weights: Float[Array, "T K"]
    ) -> Float[Array, "T D"]:
        """Return ``Σ_k w_k Expert_k(x)``. Every expert runs on every token, with weight 0 if it was not chosen."""
        return weighted_sum(x, ids, weights, self.gate_up.value(x.dtype), self.down.value(x.dtype), self.limit)


def weighted_sum(
    x, ids, weights, gate_up: Float[Array, "E D 2 F"], down: Float[Array, "E F D"], limit: float | None = None
) -> Float[Array, "T D"]:
    """Compute ``RoutedExperts`` with given matrices."""
    hidden = jnp.einsum("td,edgf->tegf", x, gate_up)
    out = jnp.einsum("tef,efd->ted", gated(hidden[:, :, 0], hidden[:, :, 1], limit), down)
    chosen = jax.nn.one_hot(ids, down.shape[0], dtype=jnp.float32) * weights[..., None]
    return jnp.einsum("ted,te->td", out.astype(jnp.float32), chosen.sum(axis=1)).astype(x.dtype)


class MoE(nnx.Module):
    """``x → Σ_k w_k Expert_k(x) + Shared(x)``."""

    def __init__(self, declare: Declaration, config: ModelConfig, *, hashed: bool = False):
        self.router = (HashRouter if hashed else config.router or ExpertRouter)(declare, config)
        self.experts = RoutedExperts(declare, config)
        if config.n_shared_experts:
            hidden = config.n_shared_experts * config.moe_intermediate_size
            self.shared = MLP(declare, config.hidden_size, hidden, "shared_width", config.swiglu_limit)

    def __call__(self, x: Float[Array, "B S D"], given: Pass) -> tuple[Float[Array, "B S D"], Routing]:
        """Return the weighted sum of each token's routed experts plus the shared experts, and the routing."""
        products, routing = given.products, self.router(x, given.tokens, given.products.multiply)
        with jax.named_scope("experts"):
            flat = (rearrange(a, "b s d -> (b s) d") for a in (x, routing.ids, routing.weights))
            y = rearrange(products.experts(self.experts, *flat), "(b s) d -> b s d", b=len(x))
        return (y + self.shared(x, products.multiply) if hasattr(self, "shared") else y), routing


@dataclass(frozen=True)
class XlaProducts:
    """XLA's operations of a forward pass: products with matrices, norms, attention, experts, and the head.

    experts: the product with routed experts. observe: function to sum over the queries of each layer.
    """

    experts: Callable[[RoutedExperts, Array, Array, Array], Array] = RoutedExperts.__call__
    observe: Observe | None = None
    multiply = staticmethod(multiply)
    normalise = staticmethod(normalise)

    def attend(self, mla: MLA, p: Projections) -> tuple[Float[Array, "B S H U"], Float[Array, ""] | None]:
        """Run ``attend`` with the layer's weights."""
        return attend(mla.config, p, *mla.key_value_weight(p.latent.dtype), self.observe)

    def project(self, model: Transformer, x: Float[Array, "B S D"]) -> Float[Array, "B S V"]:
        """Return float32 logits."""
        return jnp.einsum("bsd,dv->bsv", x, model.head_weight(x.dtype), preferred_element_type=jnp.float32)


class Pass(NamedTuple):
    """Inputs shared by all layers of a forward pass: token ids, the rotation of their positions, and the products."""

    tokens: Int[Array, "B S"]
    rotation: Rotation | Rotations
    products: XlaProducts


class Output(NamedTuple):
    """Result of a forward pass.

    hidden: input of the LM head, after the final norm. routing: stacked over MoE layers, ids and weights
    ``[L, B, S, K]``, scores ``[L, B, S, E]``; None without experts. observed: sum of ``XlaProducts.observe`` in each layer. passed: input
    of the MTP module: ``hidden``, or in V4 the streams before they are summed.
    """

    logits: Float[Array, "B S V"]
    hidden: Float[Array, "B S D"]
    routing: Routing | None
    observed: Float[Array, "L"] | None
    passed: Float[Array, "B S *n D"]


def attention_of(declare: Declaration, config: ModelConfig, attention: str) -> MLA | CompressedAttention:
    """Return the attention module of a layer. attention: see ``LayerKind``."""
    return MLA(declare, config) if attention == "mla" else CompressedAttention(declare, config, attention)


class DecoderLayer(nnx.Module):
    """Attention, then an MLP or experts. Each reads the normalised stream and adds its output to the stream (``residual.py``).

    Declared with a leading ``layers`` axis.
    """

    def __init__(self, declare: Declaration, config: ModelConfig, kind: LayerKind):
        D, residual = config.hidden_size, RESIDUALS[config.residual]
        self.attn_residual, self.mlp_residual = residual(declare, config), residual(declare, config)
        self.attn_norm = RMSNorm(declare, D, config.rms_norm_eps)
        self.attn = attention_of(declare, config, kind.attention)
        self.mlp_norm = RMSNorm(declare, D, config.rms_norm_eps)
        if kind.routed:
            self.moe = MoE(declare, config, hashed=kind.mlp == "hash")
        else:
            self.mlp = MLP(declare, D, config.intermediate_size, "mlp_width")

    def __call__(self, x: Float[Array, "B S *n D"], given: Pass):
        """Return the hidden states after the layer, its routing (None in a dense layer) and the observed value."""
        normalise = given.products.normalise
        read, mix = self.attn_residual.pre(x)
        y, observed = self.attn(normalise(self.attn_norm, read), given)
        x = self.attn_residual.post(x, mix, y)
        read, mix = self.mlp_residual.pre(x)
        normed, routing = normalise(self.mlp_norm, read), None
        if hasattr(self, "mlp"):
            y = self.mlp(normed, given.products.multiply)
        else:
            y, routing = self.moe(normed, given)
        return self.mlp_residual.post(x, mix, y), (routing, observed)


class Embedding(nnx.Module):
    """Token embedding table."""

    def __init__(self, declare: Declaration, config: ModelConfig):
        self.weight = declare.parameter((config.vocab_size, config.hidden_size), ("embedded_vocab", "embed"))

    def __call__(self, tokens: Int[Array, "*b"], dtype: jnp.dtype) -> Float[Array, "*b D"]:
        """Return rows of the table in ``dtype``."""
        return value_of(self.weight)[tokens].astype(dtype)


class MTP(nnx.Module):
    """Multi-token prediction modules (V3 report §2.2), without the embedding and head that they share with the model."""

    def __init__(self, declare: Declaration, config: ModelConfig):
        D, stacked = config.hidden_size, declare.stacked(config.num_nextn_predict_layers)
        self.embed_norm = RMSNorm(stacked, D, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(stacked, D, config.rms_norm_eps)
        if config.v4 is None:
            self.eh_proj = Matrix(stacked, (2 * D, D), (None, "embed"), quantise=False)
        else:
            self.embed_proj, self.hidden_proj = (Matrix(stacked, (D, D), (None, "embed")) for _ in range(2))
        self.layers = DecoderLayer(stacked, config, config.mtp_kind)
        self.residual = RESIDUALS[config.residual](stacked, config, ends=True)
        self.final_norm = RMSNorm(stacked, D, config.rms_norm_eps)

    def __call__(self, hidden: Float[Array, "B S *n D"], embedded: Float[Array, "B S D"], given: Pass):
        """Run one module, sliced from the stack: ``join``, a decoder layer, a final norm. given: for ``t_{i+1}``.

        Returns hidden states for the LM head; ``hidden`` for the next module; and (routing, observed) as ``DecoderLayer`` does.
        """
        normalise = given.products.normalise
        x, seen = self.layers(self.join(hidden, embedded, given.products.multiply, normalise), given)
        found = normalise(self.final_norm, self.residual.leave(x))
        return found, x if hasattr(self, "hidden_proj") else found, seen

    def join(
        self, hidden: Float[Array, "*b D"], embedded: Float[Array, "B T D"], multiply: Multiply, normalise: Normalise
    ) -> Float[Array, "B T *n D"]:
        """Return the layer's input ``M [RMSNorm(Emb(t_{i+1})) ; RMSNorm(h_i)]``, in the order of the released weights (equation 21).

        In V4 ``hidden`` is the main model's streams ``[B, T, n, D]`` before they are summed, and each half has a separate matrix.
        """
        embedded, hidden = normalise(self.embed_norm, embedded), normalise(self.hidden_norm, hidden)
        if hasattr(self, "hidden_proj"):
            return multiply(self.embed_proj, embedded)[..., None, :] + multiply(self.hidden_proj, hidden)
        return self.residual.enter(multiply(self.eh_proj, jnp.concatenate([embedded, hidden], axis=-1)))


class Transformer(nnx.Module):
    """All parameters of a model, and its forward pass.

    begins, ends: whether it has the model's first and last layers. A pipeline stage without them has no embedding or no LM head.
    """

    def __init__(self, declare: Declaration, config: ModelConfig, *, mtp: bool, begins: bool = True, ends: bool = True):
        self.config = config
        self.residual = RESIDUALS[config.residual](declare, config, ends=True)
        mtp = mtp and config.num_nextn_predict_layers > 0
        if begins or (ends and (mtp or config.tie_word_embeddings)):
            self.embed = Embedding(declare, config)
        for kind, numbers in stacks(config.layer_runs).items():
            setattr(self, kind.stack, DecoderLayer(declare.stacked(len(numbers)), config, kind))
        if not ends:
            return
        self.final_norm = RMSNorm(declare, config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.head = Matrix(declare, (config.hidden_size, config.vocab_size), ("embed", "vocab"), quantise=False)
        if mtp:
            self.mtp = MTP(declare, config)

    def __call__(self, tokens: Int[Array, "B S"], dtype=jnp.float32, products=XlaProducts(), *, unroll=False) -> Output:
        """Return logits of every position.

        products: implementation of products; ``NativeProducts`` gives the engine's bits. unroll: compile each layer separately, which
        avoids copying the values saved for the backward pass on a CPU.
        """
        given = self._given(tokens, products)
        x, runs = self.residual.enter(self.embed(tokens, dtype)), []
        for run in self.config.layer_runs:
            graphs, weights = zip(*(nnx.split(getattr(self, kind.stack)) for kind in run.kinds), strict=True)

            def body(x, weights, graphs=graphs):
                seen = []
                for graph, own in zip(graphs, weights, strict=True):
                    x, one = nnx.merge(graph, own)(x, given)
                    seen.append(one)
                return x, seen

            x, seen = jax.lax.scan(body, x, weights, unroll=unroll)
            runs.append(seen)
        hidden = products.normalise(self.final_norm, self.residual.leave(x))
        seen = (by_layer([[one[i] for one in kinds if one[i] is not None] for kinds in runs]) for i in range(2))
        return Output(products.project(self, hidden), hidden, *seen, x if self.config.streams else hidden)

    def predict_further(
        self, hidden: Float[Array, "B S *n D"], next_tokens: Int[Array, "B S"], products=XlaProducts(), *, depth=0
    ) -> Output:
        """Run MTP module ``depth``. From hidden states and their next tokens, it predicts the tokens after those.

        hidden: ``passed`` of ``__call__`` or of the previous module; positions are unchanged.
        """
        graph, weights = nnx.split(self.mtp)
        module = nnx.merge(graph, jax.tree.map(lambda a: a[depth], weights))
        embedded = self.embed(next_tokens, hidden.dtype)
        further, passed, (routing, observed) = module(hidden, embedded, self._given(next_tokens, products))
        observed = None if observed is None else observed[None]
        return Output(products.project(self, further), further, routing, observed, passed)

    def _given(self, tokens: Int[Array, "B S"], products: XlaProducts) -> Pass:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return Pass(tokens, rotation_at(self.config, positions), products)

    def head_weight(self, dtype) -> Float[Array, "D V"]:
        """Return the output projection ``[D, V]``: the transposed embedding if the two are tied."""
        if self.config.tie_word_embeddings:
            return value_of(self.embed.weight).astype(dtype).T
        return self.head.value(dtype)


def first_module(stack: MTP) -> MTP:
    """Return the first of the stacked modules. Its experts stay stacked for the expert product."""
    graph, experts, weights = nnx.split(stack, lambda path, _: "experts" in path, ...)
    return nnx.merge(graph, experts, jax.tree.map(lambda array: array[0], weights))


def rotation_at(config: ModelConfig, positions: Int[Array, "*b"]) -> AnyRotation:
    """Return the rotation of tokens at ``positions`` for the model's attention."""
    if config.v4 is not None:
        return Rotations.at(positions, config)
    return Rotation.at(positions, config.rope, config.mla.qk_rope_head_dim)


def by_layer(runs: Sequence[Sequence[Any]]) -> Any:
    """Stack the arrays ``[count, ...]`` of each run's kinds over all layers, in layer order. Return None if there are none."""
    merge = lambda *kinds: rearrange(list(kinds), "kind count ... -> (count kind) ...")  # noqa: E731
    merged = [jax.tree.map(merge, *kinds) for kinds in runs if kinds]
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *merged) if merged else None
