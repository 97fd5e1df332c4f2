"""A router of one's own: experts by a hash of the token's id (Hash Layers, arXiv 2106.04426), weights by their sigmoid scores.

LLM(model="demo", mesh="dp=8", router=HashRouter)
parameter_table(dataclasses.replace(config, router=HashRouter))      # the plain forward pass
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dsjax.model.router import ExpertRouter, Routing
from sharding.sums import add_in_order


class HashRouter(ExpertRouter):
    """Has the parameters of ``ExpertRouter``; token ids alone decide which experts are chosen."""

    def choose(self, logits, tokens):
        K, E = self.config.num_experts_per_tok, self.config.n_routed_experts
        first_T = (tokens.astype(jnp.uint32) * jnp.uint32(2654435761)) >> 16  # Knuth's multiplicative hash
        ids_TK = (first_T[..., None] + E // K * jnp.arange(K, dtype=jnp.uint32)) % E
        scores_TE = jax.nn.sigmoid(logits)
        weights_TK = jnp.take_along_axis(scores_TE, ids_TK, axis=-1)
        weights_TK = weights_TK / add_in_order(weights_TK)[..., None] * self.config.routed_scaling_factor
        return Routing(ids_TK.astype(jnp.int32), weights_TK, scores_TE)
