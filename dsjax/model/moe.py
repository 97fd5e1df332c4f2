"""A mixture-of-experts layer: the router, the routed experts' weights, and the experts that every token uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from dsjax.config import ModelConfig
from dsjax.model.fp4_matrix import FP4Matrix
from dsjax.model.mlp import MLP
from dsjax.model.parameters import Declaration, Matrix, Multiply, multiply
from dsjax.model.router import ExpertRouter, Routing


class RoutedExperts(nnx.Module):
    """Weights of the physical experts: SwiGLU MLPs, stacked."""

    def __init__(self, declare: Declaration, config: ModelConfig, num_physical: int):
        D, F = config.hidden_size, config.moe_intermediate_size
        declare = declare.for_experts
        matrix = Matrix if declare.format.packed is None else FP4Matrix
        self.gate_up = matrix(declare, (num_physical, D, 2, F), ("experts", "embed", "stack", "expert_width"))
        self.down = matrix(declare, (num_physical, F, D), ("experts", "expert_width", "embed"))

    def stored(self) -> dict[str, Array]:
        """The arrays as they lie in memory: ``gate_up.weight``, ``down.weight``, and the like for ``scale`` and ``global_scale``."""
        return {
            f"{name}.{part}": getattr(matrix, part)[...]
            for part in ("weight", "scale", "global_scale")
            for name, matrix in {"gate_up": self.gate_up, "down": self.down}.items()
            if hasattr(matrix, part)
        }


ApplyExperts = Callable[[RoutedExperts, Float[Array, "*b D"], Routing], tuple[Float[Array, "*b D"], Any]]
"""Sends tokens to their experts: ``(experts, x, routing) -> (y, report)``."""


class MoE(nnx.Module):
    """``x → Σ_k w_k Expert_k(x) + Shared(x)`` (V3 report, equation 12)."""

    def __init__(self, declare: Declaration, config: ModelConfig, num_physical: int):
        self.router = ExpertRouter(declare, config)
        self.experts = RoutedExperts(declare, config, num_physical)
        if config.n_shared_experts:
            hidden = config.n_shared_experts * config.moe_intermediate_size
            self.shared = MLP(declare, config.hidden_size, hidden, "shared_width")

    def __call__(
        self,
        x: Float[Array, "*b D"],
        apply: ApplyExperts,
        spread: Callable[[Callable], Callable] = lambda choose: choose,
        multiply: Multiply = multiply,
    ) -> tuple[Float[Array, "*b D"], Routing, Any]:
        """Choose each token's experts, let ``apply`` compute them, and add the shared experts.

        Args:
            apply: sends tokens to their routed experts and gives their weighted sums.
            spread: as in ``ExpertRouter``. multiply: for the router's matrix and the shared experts'.

        Returns the sums in the shape of ``x``, the routing, and what ``apply`` reported.
        """
        routing = self.router(x, spread, multiply)
        with jax.named_scope("experts"):
            y, report = apply(self.experts, x, routing)
        return (y + self.shared(x, multiply) if hasattr(self, "shared") else y), routing, report
