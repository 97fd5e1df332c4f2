"""The indexer's weights, and its projections of each token: index queries, head weights, and the index key.

Source: the report of DeepSeek-V3.2-Exp, equation 1, and ``Indexer`` of its published ``inference/model.py``. ``I`` index heads of width
``A``; the first ``O`` values of each are rotated: in V3.2 in halves, unlike MLA's interleaved pairs; in GLM-5 in interleaved pairs, too.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float

from dsjax.config import ModelConfig
from dsjax.model.norm import LayerNorm, Normalise, normalise
from dsjax.model.parameters import Declaration, Matrix, Multiply
from dsjax.model.rope import Rotation

KEY_EPS = 1e-6
"""Epsilon of the key's LayerNorm, independent of ``rms_norm_eps``."""


@jax.tree_util.register_dataclass
@dataclass
class IndexProjections:
    """Index queries, weights and keys of tokens; leading dimensions ``*b`` are the caller's (``[B, T]`` in a step)."""

    query: Float[Array, "*b I A"]  # rotated
    weight: Float[Array, "*b I"]  # float32, with the factor I^-1/2
    key: Float[Array, "*b A"]  # normalised and rotated, as cached


class Indexer(nnx.Module):
    """The indexer of one attention layer. Its weights are replicated on the devices of a replica."""

    def __init__(self, declare: Declaration, config: ModelConfig):
        self.config = config
        D, Q, I, A = config.hidden_size, config.mla.q_lora_rank, config.mla.indexer.n_heads, config.mla.indexer.head_dim
        self.query = Matrix(declare, (Q, I * A), ("query_latent", None))
        self.key = Matrix(declare, (D, A), ("embed", None))
        self.key_norm = LayerNorm(declare, A, KEY_EPS)
        self.head_weights = Matrix(declare, (D, I), ("embed", None), quantise=False)

    def __call__(
        self,
        x: Float[Array, "*b D"],
        q_latent: Float[Array, "*b Q"],
        rotation: Rotation,
        multiply: Multiply,
        normalise: Normalise = normalise,
    ) -> IndexProjections:
        """Return index queries, weights and keys of tokens.

        rotation: MLA's, at the tokens' positions. multiply, normalise: functions for the matrices and the norm.

        Gradients do not flow to ``x`` and ``q_latent``: the indexer is trained to follow attention, not vice versa
        (arXiv 2512.02556, section 2.1.1).
        """
        x, q_latent = jax.lax.stop_gradient((x, q_latent))
        with jax.named_scope("index_project"):
            O, I = self.config.mla.qk_rope_head_dim, self.config.mla.indexer.n_heads
            turn = dataclasses.replace(rotation, interleave=self.config.family.index_interleave)

            def rotate(values: Array) -> Array:
                return jnp.concatenate([turn(values[..., :O]), values[..., O:]], axis=-1)

            query = rearrange(multiply(self.query, q_latent), "... (j w) -> ... j w", j=I)
            weight = multiply(self.head_weights, x.astype(jnp.float32)) * I**-0.5
            return IndexProjections(rotate(query), weight, rotate(normalise(self.key_norm, multiply(self.key, x))))
