"""Routers: which experts a token goes to, and with which weights (V3 report, equations 13 to 16)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float, Int

from dsjax.config import ModelConfig
from dsjax.model.parameters import Declaration, Multiply, multiply, value_of
from sharding.sums import add_by_halves, add_in_order


class Routing(NamedTuple):
    """A token's experts: ``ids`` and ``weights`` ``[..., K]``, and all experts' ``scores`` ``[..., E]`` in float32."""

    ids: Int[Array, "*b K"]
    weights: Float[Array, "*b K"]
    scores: Float[Array, "*b E"]


class ExpertRouter(nnx.Module):
    """Sigmoid routing with a correction bias (V3: ``noaux_tc``), or softmax routing (V2), limited to groups of experts.

    Another router inherits it and overrides ``choose``: ``ModelConfig.router`` has its class (``docs/examples/hash_router.py``).
    """

    def __init__(self, declare: Declaration, config: ModelConfig):
        self.config = config
        E = config.n_routed_experts
        self.weight = declare.parameter((config.hidden_size, E), ("embed", "router_experts"))
        self.scored = 2 if config.topk_method == "noaux_tc" else 1  # best experts of a group, which add up to its score
        if config.topk_method == "noaux_tc":
            self.bias = declare.parameter((E,), ("router_experts",), init="zeros", dtype=jnp.dtype(jnp.float32))

    def __call__(self, x: Float[Array, "*b D"], tokens: Int[Array, "*b"], multiply: Multiply = multiply) -> Routing:
        """Route each token, in float32 whatever the dtype of ``x``. tokens: their ids."""
        with jax.named_scope("router"):
            return self.choose(multiply(self, x.astype(jnp.float32)), tokens)

    def choose(self, logits: Float[Array, "*b E"], tokens: Int[Array, "*b"]) -> Routing:
        """Experts and weights from each token's logits and id. The bias decides which experts are chosen, never their weights."""
        scores = self.scores(logits)
        choice = scores + value_of(self.bias) if hasattr(self, "bias") else scores
        if self.config.routed_groups is not None:
            choice = self._mask_groups(choice)
        return self.weigh(scores, jax.lax.top_k(choice, self.config.num_experts_per_tok)[1])

    def weigh(self, scores: Float[Array, "*b E"], ids: Int[Array, "*b K"]) -> Routing:
        """These experts with the weights that their scores give them."""
        weights = jnp.take_along_axis(scores, ids, axis=-1)
        if self.config.norm_topk_prob:
            weights = weights / (add_in_order(weights)[..., None] + 1e-20)
        return Routing(ids, weights * self.config.routed_scaling_factor, scores)

    def scores(self, logits: Float[Array, "*b E"]) -> Float[Array, "*b E"]:
        """Sigmoid, √softplus (V4), or softmax, added up in an order that does not depend on how many rows there are."""
        if self.config.scoring_func == "sigmoid":
            return jax.nn.sigmoid(logits)
        if self.config.scoring_func == "sqrtsoftplus":
            return jnp.sqrt(jax.nn.softplus(logits))
        powers = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
        return powers / add_by_halves(powers)[..., None]

    def _mask_groups(self, choice: Float[Array, "*b E"]) -> Float[Array, "*b E"]:
        """−inf for experts outside the best groups: with a negative bias, every score of a chosen group may be below 0."""
        grouped = rearrange(choice, "... (g e) -> ... g e", g=self.config.n_group)
        # Of at most two terms, which have one order. Terms read out one by one would make XLA sort instead of taking the best.
        best = jax.lax.top_k(grouped, self.scored)[0]
        chosen = jax.lax.top_k(jnp.sum(best, axis=-1), self.config.topk_group)[1]
        keep = jnp.any(chosen[..., None] == jnp.arange(self.config.n_group), axis=-2)
        return rearrange(jnp.where(keep[..., None], grouped, -jnp.inf), "... g e -> ... (g e)")

    def product(self, x: Float[Array, "*b D"]) -> Float[Array, "*b E"]:
        """Every expert's logit of each token: what ``Matrix.product`` is of a matrix."""
        weight = value_of(self.weight).astype(jnp.float32)
        return jnp.einsum("...d,de->...e", x, weight, precision=jax.lax.Precision.HIGHEST)


class HashRouter(ExpertRouter):
    """A token's id decides on its experts, and their scores on the weights (V4's report, section 2.1)."""

    def __init__(self, declare: Declaration, config: ModelConfig):
        super().__init__(declare, config)
        del self.bias
        chosen = (config.vocab_size, config.num_experts_per_tok)
        self.experts_of_token = declare.parameter(chosen, (None, None), init="zeros", dtype=jnp.dtype(jnp.int32))

    def choose(self, logits: Float[Array, "*b E"], tokens: Int[Array, "*b"]) -> Routing:
        """The token's row of the table."""
        return self.weigh(self.scores(logits), value_of(self.experts_of_token)[tokens])
