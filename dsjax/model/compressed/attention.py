"""DeepSeek-V4's attention of one layer: weights, projections, and the plain forward pass over whole sequences.

Source: DeepSeek-V4's report, section 2.3. A token's entry of width ``M`` is both key and value of all heads. The last ``O`` values of
queries and entries are rotated; the output's last ``O`` values are rotated back by the query's position. Letters: ``docs/glossary.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from dsjax.config import ModelConfig
from dsjax.model.compressed.rotations import Rotations, entry_rotation, rotate, rotate_back
from dsjax.model.norm import HeadNorm, Normalise, RMSNorm, normalise, unweighted
from dsjax.model.parameters import Declaration, GroupedMatrix, Matrix, Multiply, multiply, value_of
from dsjax.model.rope import Rotation
from dsjax.model.sparse.choose import choose, index_scores
from dsjax.model.sparse.indexer import IndexProjections

QUERY_BLOCK = 128  # queries that attend together


@jax.tree_util.register_dataclass
@dataclass
class CompressedProjections:
    """Projections of tokens; leading dimensions ``*b`` are the caller's.

    gates, values: inputs of the compressors, float32; gates include the bias of the token's position in its window. "hca" layers have one
    series of M values. "csa" layers have two series of M + A values, the first for the next window, the second for the token's own; the
    last A are for index keys. index_query, index_weight: only in "csa" layers; the weights are float32 and include the factor I^-1/2.
    """

    query: Float[Array, "*b H M"]  # normed and rotated
    entry: Float[Array, "*b M"]  # normed and rotated
    rotation: Rotation  # of the tokens' positions, to rotate the output back
    gates: Float[Array, "*b series Y"] | None = None
    values: Float[Array, "*b series Y"] | None = None
    index_query: Float[Array, "*b I A"] | None = None  # rotated
    index_weight: Float[Array, "*b I"] | None = None


class Compressor(nnx.Module):
    """Weights that compress ``rate`` tokens to one entry of width ``width``."""

    def __init__(self, declare: Declaration, config: ModelConfig, width: int, rate: int, series: int):
        self.rate, self.series, columns = rate, series, series * width
        self.kv = Matrix(declare, (config.hidden_size, columns), ("embed", None), quantise=False)
        self.gate = Matrix(declare, (config.hidden_size, columns), ("embed", None), quantise=False)
        self.bias = declare.parameter((rate, columns), (None, None), init="zeros", dtype=jnp.dtype(jnp.float32))
        self.norm = RMSNorm(declare, width, config.rms_norm_eps, "latent")

    def __call__(
        self, x: Float[Array, "*b D"], rotations: Rotations, multiply: Multiply
    ) -> tuple[Float[Array, "*b series M"], Float[Array, "*b series M"]]:
        """Project tokens to gates and values, in float32."""
        x, bias = x.astype(jnp.float32), value_of(self.bias)[rotations.positions % self.rate]
        gates, values = multiply(self.gate, x) + bias, multiply(self.kv, x)
        return tuple(rearrange(array, "... (s w) -> ... s w", s=self.series) for array in (gates, values))


class EntryIndexer(nnx.Module):
    """Indexer of a "csa" layer: ``I`` index queries of width ``A``, and a separate compressor for the index keys."""

    def __init__(self, declare: Declaration, config: ModelConfig, rate: int):
        I, A = config.v4.indexer.n_heads, config.v4.indexer.head_dim
        self.query = Matrix(declare, (config.v4.q_lora_rank, I * A), ("query_latent", None))
        self.head_weights = Matrix(declare, (config.hidden_size, I), ("embed", None), quantise=False)
        self.compressor = Compressor(declare, config, A, rate, series=2)


class CompressedAttention(nnx.Module):
    """Attention of one layer. attention: "window", "csa" or "hca" (``dsjax/config/deepseek_v4.py``)."""

    def __init__(self, declare: Declaration, config: ModelConfig, attention: str):
        self.config, self.attention, v4 = config, attention, config.v4
        D, H, Q, M, G = config.hidden_size, config.num_attention_heads, v4.q_lora_rank, v4.head_dim, v4.o_groups
        self.q_a = Matrix(declare, (D, Q), ("embed", "query_latent"))
        self.q_a_norm = RMSNorm(declare, Q, config.rms_norm_eps, "query_latent")
        self.q_b = Matrix(declare, (Q, H * M), ("query_latent", "heads"))
        self.kv = Matrix(declare, (D, M), ("embed", "latent"))
        self.kv_norm = RMSNorm(declare, M, config.rms_norm_eps, "latent")
        self.sink = declare.parameter((H,), ("heads",), init="zeros", dtype=jnp.dtype(jnp.float32))
        self.o_a = GroupedMatrix(declare, G, H // G * M, v4.o_lora_rank, (None, "heads"))
        self.o_b = Matrix(declare, (G * v4.o_lora_rank, D), ("heads", "embed"))
        rate = v4.rate(attention)
        if rate is not None:
            self.compressor = Compressor(declare, config, M, rate, series=2 if attention == "csa" else 1)
        if attention == "csa":
            self.indexer = EntryIndexer(declare, config, rate)

    def __call__(self, x: Float[Array, "B S D"], given) -> tuple[Float[Array, "B S D"], Float[Array, ""] | None]:
        """Apply causal self-attention. Also return the observed value in "csa" layers. given: a ``transformer.Pass``."""
        p = self.project(x, given.rotation, multiply=given.products.multiply, normalise=given.products.normalise)
        heads, observed = self.attend_observed(p, given.products.observe)
        return self.output(heads, given.products.multiply), observed

    def project(
        self,
        x: Float[Array, "*b D"],
        rotations: Rotations,
        *,
        multiply: Multiply = multiply,
        normalise: Normalise = normalise,
    ) -> CompressedProjections:
        """Project tokens to queries, entries, and the inputs of the compressors and the indexer."""
        with jax.named_scope("compressed_project"):
            rotation, eps = rotations.of(self.attention), self.config.rms_norm_eps
            latent = normalise(self.q_a_norm, multiply(self.q_a, x))
            query = rearrange(multiply(self.q_b, latent), "... (h w) -> ... h w", h=self.config.num_attention_heads)
            query, entry = normalise(HeadNorm(eps), query), normalise(self.kv_norm, multiply(self.kv, x))
            p = CompressedProjections(rotate(rotation, query), rotate(rotation, entry), rotation)
            if self.attention != "window":
                p.gates, p.values = self.compressor(x, rotations, multiply)
            if self.attention == "csa":
                indexer, I = self.indexer, self.config.v4.indexer.n_heads
                x, latent = jax.lax.stop_gradient((x, latent))  # as in `sparse.indexer`
                gates, values = indexer.compressor(x, rotations, multiply)
                p.gates = jnp.concatenate([p.gates, gates], axis=-1)
                p.values = jnp.concatenate([p.values, values], axis=-1)
                p.index_query = rotate(
                    rotation, rearrange(multiply(indexer.query, latent), "... (i a) -> ... i a", i=I)
                )
                p.index_weight = multiply(indexer.head_weights, x.astype(jnp.float32)) * I**-0.5
            return p

    @property
    def entry_norms(self) -> dict[str, Float[Array, "M"]]:
        """Norm scales of compressed entries, and of index keys in "csa" layers."""
        norms = {"entry": value_of(self.compressor.norm.scale)} if self.attention != "window" else {}
        return norms | ({"index": value_of(self.indexer.compressor.norm.scale)} if self.attention == "csa" else {})

    def attend(self, p: CompressedProjections) -> Float[Array, "B S H M"]:
        """Attend to windows and compressed entries, for sequences that start at position 0. The result is rotated back."""
        return self.attend_observed(p, None)[0]

    def attend_observed(
        self, p: CompressedProjections, observe
    ) -> tuple[Float[Array, "B S H M"], Float[Array, ""] | None]:
        """Run ``attend``. Also return the sum of a ``transformer.Observe`` over the compressed entries of a "csa" layer."""
        config, length, rate = self.config, p.entry.shape[1], self.config.v4.rate(self.attention)
        window, compressed = config.v4.sliding_window, {}
        if rate is not None:
            starts = jnp.broadcast_to(jnp.arange(length // rate) * rate, (len(p.entry), length // rate))
            compressed = entries(config, self.entry_norms, compress(p.gates, p.values, rate), starts, p.entry.dtype)
        heads, observed = [], []
        for start in range(0, length, QUERY_BLOCK):
            end, first = min(start + QUERY_BLOCK, length), max(start - window + 1, 0)
            query_at, key_at = jnp.arange(start, end)[:, None], jnp.arange(first, end)
            context, masks = [p.entry[:, first:end]], [(key_at <= query_at) & (key_at > query_at - window)]
            if rate is not None and end >= rate:
                context.append(compressed["entry"][:, : end // rate])
                masks.append(self._visible_entries(p, compressed, start, end))
            context = jnp.concatenate(context, axis=1)
            mask = jnp.concatenate([jnp.broadcast_to(m, (len(context), *m.shape[-2:])) for m in masks], axis=-1)
            values, probs = self._attend_block(p.query[:, start:end], context, mask)
            heads.append(values)
            if observe is not None and "index" in compressed and end >= rate:
                index = IndexProjections(p.index_query, p.index_weight, compressed["index"])
                entry_probs = rearrange(probs[..., end - first :], "b q h s -> b h q s")
                observed.append(observe(index, slice(start, end), mask[..., end - first :], entry_probs))
        return rotate_back(p.rotation, jnp.concatenate(heads, axis=1)), sum(observed) if observed else None

    def _visible_entries(
        self, p: CompressedProjections, compressed: Mapping[str, Array], start: int, end: int
    ) -> Bool[Array, "*b Q S"]:
        """Return which compressed entries the queries of a block attend to: of all past windows, in "csa" layers the top k."""
        rate, topk = self.config.v4.rate(self.attention), self.config.v4.indexer.topk
        count = end // rate
        visible = (jnp.arange(start, end)[:, None] + 1) // rate > jnp.arange(count)
        if self.attention != "csa" or count <= topk:
            return visible
        scores = index_scores(p.index_query[:, start:end], p.index_weight[:, start:end], compressed["index"][:, :count])
        return choose(jnp.where(visible, scores, -jnp.inf), topk)

    def _attend_block(
        self, query: Float[Array, "B Q H M"], context: Float[Array, "B S M"], mask: Bool[Array, "B Q S"]
    ) -> tuple[Float[Array, "B Q H M"], Float[Array, "B Q H S"]]:
        """Return attention's values and probabilities for a masked context. The softmax includes each head's sink, which has no value."""
        scores = jnp.einsum("bqhw,bsw->bqhs", query, context, preferred_element_type=jnp.float32)
        scores = jnp.where(mask[:, :, None], scores * self.config.softmax_scale, -jnp.inf)
        sink = jnp.broadcast_to(value_of(self.sink)[:, None], (*scores.shape[:-1], 1))
        probs = jax.nn.softmax(jnp.concatenate([sink, scores], axis=-1), axis=-1)[..., 1:]
        return jnp.einsum("bqhs,bsw->bqhw", probs.astype(context.dtype), context), probs

    def output(self, heads: Float[Array, "*b H M"], multiply: Multiply = multiply) -> Float[Array, "*b D"]:
        """Project the heads' values to ``o_lora_rank`` per group of heads, then all groups to D."""
        with jax.named_scope("compressed_output"):
            G = self.config.v4.o_groups
            grouped = rearrange(heads, "... (g h) w -> ... g (h w)", g=G)
            return multiply(self.o_b, rearrange(multiply(self.o_a, grouped), "... g r -> ... (g r)"))


def compress(
    gates: Float[Array, "B S series Y"], values: Float[Array, "B S series Y"], rate: int
) -> Float[Array, "B windows Y"]:
    """Return the mean of each full window's values, weighted by a softmax of the gates (equations 9 to 12 and 20 to 23).

    With two series a window combines the last series of its own tokens with the first series of the preceding window.
    """

    def by_window(array: Array, fill: float) -> Float[Array, "B windows tokens Y"]:
        windows = rearrange(array[:, : array.shape[1] // rate * rate], "b (w r) s v -> b w r s v", r=rate)
        own = windows[..., -1, :]
        if windows.shape[3] == 1:
            return own
        preceding = jnp.concatenate([jnp.full_like(own[:, :1], fill), windows[:, :-1, :, 0]], axis=1)
        return jnp.concatenate([preceding, own], axis=2)

    return jnp.sum(jax.nn.softmax(by_window(gates, -jnp.inf), axis=2) * by_window(values, 0), axis=2)


def entries(
    config: ModelConfig,
    norms: Mapping[str, Float[Array, "M"]],
    means: Float[Array, "*b Y"],
    starts: Int[Array, "*b"],
    dtype,
    normalise: Callable[[Array, float], Array] = unweighted,
) -> dict[str, Array]:
    """Return compressed entries ``[*b, M]``, and index keys ``[*b, A]`` in "csa" layers, as the cache stores them.

    norms: ``entry_norms``. means: of each window; entries first, then index keys. starts: first position of each window.
    """
    M, rotation, found = config.v4.head_dim, entry_rotation(config, starts), {}
    for name, part in (("entry", means[..., :M]), ("index", means[..., M:])):
        if name in norms:
            normed = normalise(part.astype(dtype), config.rms_norm_eps)
            found[name] = rotate(rotation, norms[name].astype(dtype) * normed)
    return found
