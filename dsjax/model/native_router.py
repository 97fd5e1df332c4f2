"""Expert choice of the router with the native kernel, on the CPU platform."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from einops import pack, unpack
from jaxtyping import Array, Float, Int

from dsjax.kernels.native_calls import NativeKernels
from dsjax.kernels.table import Kernels
from dsjax.model.parameters import value_of
from dsjax.model.router import ExpertRouter, Routing

METHODS = ("greedy", "group_limited_greedy", "noaux_tc")
"""Values of ``topk_method`` that the kernel supports. XLA computes others, and routers that override ``choose``."""


def native_choice(kernels: Kernels, router: ExpertRouter) -> Callable[..., Routing] | None:
    """Return the kernel's version of ``router.choose``; None if the kernel does not support the router."""
    has_kernel = type(router).choose is ExpertRouter.choose and router.config.topk_method in METHODS
    return partial(_choose, kernels.native, router) if has_kernel and kernels.name("router") == "native" else None


def _choose(
    kernels: NativeKernels, router: ExpertRouter, logits: Float[Array, "*b E"], tokens: Int[Array, "*b"]
) -> Routing:
    """Compute ``ExpertRouter.choose`` with bitwise equal ids and weights."""
    scores, config = router.scores(logits), router.config
    groups, kept = config.routed_groups or (1, 1)
    rows, leading = pack([scores], "* e")
    found = kernels.router(
        rows,
        value_of(router.bias) if hasattr(router, "bias") else None,
        config.num_experts_per_tok,
        groups=groups,
        kept=kept,
        best=router.scored,
        normalised=config.norm_topk_prob,
        factor=config.routed_scaling_factor,
    )
    return Routing(*(unpack(array, leading, "* k")[0] for array in found), scores)
