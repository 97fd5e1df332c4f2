"""The router: which experts a token uses, and with what weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float, Int

from dsjax.config import ModelConfig
from dsjax.kernels.native_calls import NativeKernels
from dsjax.model.parameters import Declaration, Multiply, multiply, value_of
from sharding.sums import add_by_halves, add_in_order


class Routing(NamedTuple):
    """A token's experts: ``ids`` and ``weights`` ``[..., K]``, and all experts' ``scores`` ``[..., E]`` in float32."""

    ids: Int[Array, "*b K"]
    weights: Float[Array, "*b K"]
    scores: Float[Array, "*b E"]


class ExpertRouter(nnx.Module):
    """Sigmoid routing with a correction bias (V3: ``noaux_tc``), or softmax routing (V2), limited to groups of experts."""

    def __init__(self, declare: Declaration, config: ModelConfig):
        self.config = config
        self.weight = declare.parameter((config.hidden_size, config.n_routed_experts), ("embed", "router_experts"))
        if config.topk_method == "noaux_tc":
            self.bias = declare.parameter(
                (config.n_routed_experts,), ("router_experts",), init="zeros", dtype=jnp.dtype(jnp.float32)
            )

    def __call__(
        self,
        x: Float[Array, "*b D"],
        spread: Callable[[Callable], Callable] = lambda choose: choose,
        multiply: Multiply = multiply,
        kernels: NativeKernels | None = None,
    ) -> Routing:
        """Route each token, in float32 whatever the dtype of ``x``.

        spread: on a mesh, wraps the choice of experts, which is a function ``(logits, bias) -> Routing``, so that each DP rank
            chooses for its own tokens. XLA cannot partition
        ``top_k`` and would gather all tokens' scores on every device, three times a layer.
        kernels: by which experts are chosen, on the CPU platform; None: by XLA. Both choose the same, with the same weights.
        """
        with jax.named_scope("router"):
            logits = multiply(self, x.astype(jnp.float32))
            bias = value_of(self.bias) if self.config.topk_method == "noaux_tc" else None
            return spread(lambda logits, bias: route(logits, bias, self.config, kernels))(logits, bias)

    def product(self, x: Float[Array, "*b D"]) -> Float[Array, "*b E"]:
        """Every expert's logit of each token: what ``Matrix.product`` is of a matrix."""
        weight = value_of(self.weight).astype(jnp.float32)
        return jnp.einsum("...d,de->...e", x, weight, precision=jax.lax.Precision.HIGHEST)


def route(
    logits: Float[Array, "*b E"],
    bias: Float[Array, "E"] | None,
    config: ModelConfig,
    kernels: NativeKernels | None = None,
) -> Routing:
    """Experts and weights from router logits (V3 report, equations 12 to 16; V2 report §2.1.2).

    The bias decides which experts are chosen, never their weights. Groups that are not chosen are masked with −inf:
    with a negative bias every choice score of a chosen group may be below 0.
    """
    scores = jax.nn.sigmoid(logits) if config.scoring_func == "sigmoid" else softmax(logits)
    if kernels is not None:
        return Routing(*_choose_natively(scores, bias, config, kernels), scores)
    choice = scores if bias is None else scores + bias
    if _limits_groups(config):
        choice = _mask_groups(choice, config)
    ids = jax.lax.top_k(choice, config.num_experts_per_tok)[1]
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if config.norm_topk_prob:
        weights = weights / (add_in_order(weights)[..., None] + 1e-20)
    return Routing(ids, weights * config.routed_scaling_factor, scores)


def _choose_natively(scores, bias, config: ModelConfig, kernels: NativeKernels) -> tuple[Array, Array]:
    """The rest of ``route`` by the native kernel: ids and weights, the same to the bit."""
    groups = config.n_group if _limits_groups(config) else 1
    found = kernels.router(
        scores.reshape(-1, scores.shape[-1]),
        bias,
        config.num_experts_per_tok,
        groups=groups,
        kept=config.topk_group if groups > 1 else 1,
        best=_scored(config, scores.shape[-1] // groups),
        normalised=config.norm_topk_prob,
        factor=config.routed_scaling_factor,
    )
    ids, weights = (array.reshape(*scores.shape[:-1], -1) for array in found)
    return ids, weights


def _limits_groups(config: ModelConfig) -> bool:
    return config.topk_method != "greedy" and config.n_group > 1


def _scored(config: ModelConfig, members: int) -> int:
    """How many of a group's best experts make its score."""
    return min(2, members) if config.topk_method == "noaux_tc" else 1


def softmax(logits: Float[Array, "*b E"]) -> Float[Array, "*b E"]:
    """``jax.nn.softmax`` over the last axis, added up in an order that does not depend on how many rows there are."""
    powers = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    return powers / add_by_halves(powers)[..., None]


def _mask_groups(choice: Float[Array, "*b E"], config: ModelConfig) -> Float[Array, "*b E"]:
    """−inf for experts outside the ``topk_group`` best groups.

    A group's score is the sum of its two best experts' (``noaux_tc``), or its best expert's (``group_limited_greedy``).
    """
    grouped = rearrange(choice, "... (g e) -> ... g e", g=config.n_group)
    best = _scored(config, grouped.shape[-1])
    # Of at most two terms, which have one order. Terms read out one by one would make XLA sort instead of taking the best.
    group_scores = jnp.sum(jax.lax.top_k(grouped, best)[0], axis=-1)
    chosen = jax.lax.top_k(group_scores, config.topk_group)[1]
    keep = jnp.any(chosen[..., None] == jnp.arange(config.n_group), axis=-2)
    return rearrange(jnp.where(keep[..., None], grouped, -jnp.inf), "... g e -> ... (g e)")
