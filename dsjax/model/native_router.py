"""The router's choice by the native kernel, on the CPU platform."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from jaxtyping import Array, Float

from dsjax.config import ModelConfig
from dsjax.kernels.native_calls import NativeKernels
from dsjax.kernels.table import Kernels
from dsjax.model.transformer import Routing, limits_groups, scored_experts, scores_of

METHODS = ("greedy", "group_limited_greedy", "noaux_tc")
"""``topk_method`` of the models whose choice the kernel makes; others are left to XLA."""


def native_choice(kernels: Kernels, config: ModelConfig) -> Callable[..., Routing] | None:
    """What ``ExpertRouter`` is to choose with; None where that is its own ``route``."""
    if kernels.name("router") != "native" or config.topk_method not in METHODS:
        return None
    return partial(_choose, kernels.native)


def _choose(
    kernels: NativeKernels, logits: Float[Array, "*b E"], bias: Float[Array, "E"] | None, config: ModelConfig
) -> Routing:
    """``route``, with the same ids and weights to the bit."""
    scores = scores_of(logits, config)
    *rows, E = scores.shape
    groups = config.n_group if limits_groups(config) else 1
    found = kernels.router(
        scores.reshape(-1, E),
        bias,
        config.num_experts_per_tok,
        groups=groups,
        kept=config.topk_group if groups > 1 else 1,
        best=scored_experts(config, E // groups),
        normalised=config.norm_topk_prob,
        factor=config.routed_scaling_factor,
    )
    return Routing(*(array.reshape(*rows, -1) for array in found), scores)
