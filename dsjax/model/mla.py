"""Multi-head latent attention: its weights, and what each token contributes before and after attending.

Equations (37) to (47) of the DeepSeek-V2 report (arXiv 2405.04434 §2.1), with the letters of ``docs/glossary.md``:
``M`` the key-value latent, ``Q`` the query latent, ``N`` and ``O`` a head's non-rotary and rotary widths, ``U`` its
value width. Attending itself, in its five forms, is ``attention.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float

from dsjax.config import ModelConfig
from dsjax.model.norm import LATENT_EPS, Normalise, RMSNorm, normalise
from dsjax.model.parameters import Declaration, Matrix, Multiply, multiply, value_of
from dsjax.model.rope import Rotation
from dsjax.model.sparse.indexer import Indexer, IndexProjections


@jax.tree_util.register_dataclass
@dataclass
class Projections:
    """What attention needs of each token; leading dimensions ``*b`` are the caller's (``[B, T]`` in a step)."""

    q_nope: Float[Array, "*b H N"]
    q_rope: Float[Array, "*b H O"]  # rotated
    q_latent: Float[Array, "*b Q"]  # what the query heads are made from: the query latent, or x without compression
    latent: Float[Array, "*b M"]  # normalised: what the cache keeps
    k_rope: Float[Array, "*b O"]  # rotated, shared by all heads
    index: IndexProjections | None = None  # of models with sparse attention


class MLA(nnx.Module):
    """The weights of one attention layer."""

    def __init__(self, declare: Declaration, config: ModelConfig, *, materialise: bool = False):
        self.config = config
        D, H, M = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
        N, O, U = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        Q = config.q_lora_rank
        if Q is None:
            self.q = Matrix(declare, (D, H * (N + O)), ("embed", "heads"))
        else:
            self.q_a = Matrix(declare, (D, Q), ("embed", "query_latent"))
            self.q_a_norm = RMSNorm(declare, Q, LATENT_EPS, "query_latent")
            self.q_b = Matrix(declare, (Q, H * (N + O)), ("query_latent", "heads"))
        self.kv_a = Matrix(declare, (D, M + O), ("embed", "latent"))
        self.kv_a_norm = RMSNorm(declare, M, LATENT_EPS, "latent")
        self.kv_b = Matrix(declare, (M, H * (N + U)), ("latent", "heads"))
        self.o = Matrix(declare, (H * U, D), ("heads", "embed"))
        if config.attention_bias:
            if Q is not None:
                self.q_a_bias = declare.parameter((Q,), ("query_latent",), init="zeros")
            self.kv_a_bias = declare.parameter((M + O,), ("latent",), init="zeros")
            self.o_bias = declare.parameter((D,), ("embed",), init="zeros")
        if config.index_topk is not None:
            self.indexer = Indexer(declare, config)
        if materialise:
            heads_over = ("query_latent", "heads", "latent")
            derived = {"init": "derived", "dtype": declare.derived_dtype}
            self.query_key = declare.parameter((Q or D, H, M), heads_over, **derived)
            self.value_output = declare.parameter((H, M, D), ("heads", "latent", "embed"), **derived)

    def project(
        self,
        x: Float[Array, "*b D"],
        rotation: Rotation,
        *,
        query_heads: bool = True,
        multiply: Multiply = multiply,
        normalise: Normalise = normalise,
    ) -> Projections:
        """Queries, latent and rotary key of tokens, whose positions are in ``rotation``. multiply, normalise: for its matrices and norms.

        Without ``query_heads``, ``q_nope`` is left out (shape ``[..., H, 0]``): the form with materialised products never
        makes it.
        """
        config = self.config
        N, M = config.qk_nope_head_dim, config.kv_lora_rank
        with jax.named_scope("mla_project"):
            q_latent = self.query_latent(x, multiply, normalise)
            if query_heads:
                q = multiply(self.q if config.q_lora_rank is None else self.q_b, q_latent)
                q = rearrange(q, "... (h n) -> ... h n", h=config.num_attention_heads)
                q_nope, q_rope = q[..., :N], q[..., N:]
            else:
                q_rope = jnp.einsum("...q,qho->...ho", q_latent, self.query_weight(x.dtype)[..., N:])
                q_nope = q_rope[..., :0]
            kv = multiply(self.kv_a, x)
            if config.attention_bias:
                kv = kv + value_of(self.kv_a_bias).astype(x.dtype)
            latent = normalise(self.kv_a_norm, kv[..., :M])
            return Projections(
                q_nope,
                rotation(q_rope),
                q_latent,
                latent,
                rotation(kv[..., M:]),
                None if config.index_topk is None else self.indexer(x, q_latent, rotation, multiply, normalise),
            )

    def query_latent(
        self, x: Float[Array, "*b D"], multiply: Multiply = multiply, normalise: Normalise = normalise
    ) -> Float[Array, "*b Q"]:
        """``c^Q``, normalised; ``x`` itself where queries are not compressed."""
        if self.config.q_lora_rank is None:
            return x
        latent = multiply(self.q_a, x)
        if self.config.attention_bias:
            latent = latent + value_of(self.q_a_bias).astype(x.dtype)
        return normalise(self.q_a_norm, latent)

    def query_weight(self, dtype: jnp.dtype) -> Float[Array, "Q H N+O"]:
        """``W^UQ`` and ``W^QR`` by head (``W^Q`` without compression, then Q is D)."""
        matrix = self.q if self.config.q_lora_rank is None else self.q_b
        return rearrange(matrix.value(dtype), "q (h n) -> q h n", h=self.config.num_attention_heads)

    def key_value_weight(self, dtype: jnp.dtype) -> tuple[Float[Array, "M H N"], Float[Array, "M H U"]]:
        """``W^UK`` and ``W^UV`` by head."""
        weight = rearrange(self.kv_b.value(dtype), "m (h n) -> m h n", h=self.config.num_attention_heads)
        N = self.config.qk_nope_head_dim
        return weight[..., :N], weight[..., N:]

    def output_weight(self, dtype: jnp.dtype) -> Float[Array, "H U D"]:
        """``W^O`` by head."""
        return rearrange(self.o.value(dtype), "(h u) d -> h u d", h=self.config.num_attention_heads)

    def output(self, heads: Float[Array, "*b H U"], multiply: Multiply = multiply) -> Float[Array, "*b D"]:
        """``W^O`` applied to the heads' values."""
        with jax.named_scope("mla_output"):
            out = multiply(self.o, rearrange(heads, "... h u -> ... (h u)"))
            return self.add_output_bias(out)

    def add_output_bias(self, out: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
        """The output projection's bias, where the model has one."""
        if not self.config.attention_bias:
            return out
        return out + value_of(self.o_bias).astype(out.dtype)

    def materialise(self, dtype: jnp.dtype) -> tuple[Float[Array, "Q H M"], Float[Array, "H M D"]]:
        """``W^UQ·W^UK`` and ``W^UV·W^O`` by head: what ``AM_CC_ME`` multiplies with."""
        up_key, up_value = self.key_value_weight(jnp.float32)
        query = self.query_weight(jnp.float32)[..., : self.config.qk_nope_head_dim]
        query_key = jnp.einsum("qhn,mhn->qhm", query, up_key)
        value_output = jnp.einsum("mhu,hud->hmd", up_value, self.output_weight(jnp.float32))
        return query_key.astype(dtype), value_output.astype(dtype)
