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

    For another router, subclass this, override ``choose`` and set ``ModelConfig.router`` to the class (``docs/examples/hash_router.py``).
    """

    def __init__(self, declare: Declaration, config: ModelConfig):
        self.config = config
        E = config.n_routed_experts
        self.weight = declare.parameter((config.hidden_size, E), ("embed", "router_experts"))
        self.scored = 2 if config.topk_method == "noaux_tc" else 1  # best experts whose scores sum to a group's score
        if config.topk_method == "noaux_tc":
            self.bias = declare.parameter((E,), ("router_experts",), init="zeros", dtype=jnp.dtype(jnp.float32))

    def __call__(self, x: Float[Array, "*b D"], tokens: Int[Array, "*b"], multiply: Multiply = multiply) -> Routing:
        """Route each token, in float32 whatever the dtype of ``x``. tokens: their ids. multiply: computes ``product`` of this router."""
        with jax.named_scope("router"):
            return self.choose(multiply(self, x.astype(jnp.float32)), tokens)

    def choose(self, logits: Float[Array, "*b E"], tokens: Int[Array, "*b"]) -> Routing:
        """Return experts and weights from each token's logits and id. The bias affects which experts are chosen, never their weights."""
        scores = self.scores(logits)
        choice = scores + value_of(self.bias) if hasattr(self, "bias") else scores
        if self.config.routed_groups is not None:
            choice = self._mask_groups(choice)
        return self.weigh(scores, jax.lax.top_k(choice, self.config.num_experts_per_tok)[1])

    def weigh(self, scores: Float[Array, "*b E"], ids: Int[Array, "*b K"]) -> Routing:
        """Return these experts with weights from their scores."""
        weights = jnp.take_along_axis(scores, ids, axis=-1)
        if self.config.norm_topk_prob:
            weights = weights / (add_in_order(weights)[..., None] + 1e-20)
        return Routing(ids, weights * self.config.routed_scaling_factor, scores)

    def scores(self, logits: Float[Array, "*b E"]) -> Float[Array, "*b E"]:
        """Return sigmoid, √softplus (V4) or softmax scores; softmax sums in an order that does not depend on the number of rows."""
        if self.config.scoring_func == "sigmoid":
            return jax.nn.sigmoid(logits)
        if self.config.scoring_func == "sqrtsoftplus":
            return jnp.sqrt(jax.nn.softplus(logits))
        exponentials = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
        return exponentials / add_by_halves(exponentials)[..., None]

    def _mask_groups(self, choice: Float[Array, "*b E"]) -> Float[Array, "*b E"]:
        """Set experts outside the best groups to −inf, not 0: with a negative bias, all scores of a chosen group may be below 0."""
        grouped = rearrange(choice, "... (g e) -> ... g e", g=self.config.n_group)
        # Two terms have only one order. Slicing them, as ``add_in_order`` does, would make XLA sort instead of using top-k.
        best_scores = jax.lax.top_k(grouped, self.scored)[0]
        chosen_groups = jax.lax.top_k(jnp.sum(best_scores, axis=-1), self.config.topk_group)[1]
        keep = jnp.any(chosen_groups[..., None] == jnp.arange(self.config.n_group), axis=-2)
        return rearrange(jnp.where(keep[..., None], grouped, -jnp.inf), "... g e -> ... (g e)")

    def product(self, x: Float[Array, "*b D"]) -> Float[Array, "*b E"]:
        """Return each token's logits of all experts: this router's ``Matrix.product``, which ``multiply`` calls."""
        weight = value_of(self.weight).astype(jnp.float32)
        return jnp.einsum("...d,de->...e", x, weight, precision=jax.lax.Precision.HIGHEST)


class HashRouter(ExpertRouter):
    """Router that looks up a token's experts by its id; their scores give the weights (V4's report, section 2.1)."""

    def __init__(self, declare: Declaration, config: ModelConfig):
        super().__init__(declare, config)
        del self.bias  # the choice is not biased
        table_shape = (config.vocab_size, config.num_experts_per_tok)
        self.experts_of_token = declare.parameter(table_shape, (None, None), init="zeros", dtype=jnp.dtype(jnp.int32))

    def choose(self, logits: Float[Array, "*b E"], tokens: Int[Array, "*b"]) -> Routing:
        """Look up each token's experts in the table."""
        return self.weigh(self.scores(logits), value_of(self.experts_of_token)[tokens])
