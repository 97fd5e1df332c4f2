"""The SwiGLU MLP: that of the dense layers, and that of the shared experts, which every token passes through."""

import jax
from flax import nnx
from jaxtyping import Array, Float

from dsjax.kernels.gate import gated
from dsjax.model.parameters import Declaration, Matrix, Multiply, multiply


class MLP(nnx.Module):
    """``down(silu(gate(x)) × up(x))``, gate and up fused into one product."""

    def __init__(self, declare: Declaration, width: int, hidden: int, width_axis: str):
        self.gate_up = Matrix(declare, (width, 2, hidden), ("embed", "stack", width_axis))
        self.down = Matrix(declare, (hidden, width), (width_axis, "embed"))

    def __call__(self, x: Float[Array, "*b D"], multiply: Multiply = multiply) -> Float[Array, "*b D"]:
        """Apply to each token."""
        with jax.named_scope("mlp"):
            gate_up = multiply(self.gate_up, x)
            hidden = gated(gate_up[..., 0, :], gate_up[..., 1, :])
            return multiply(self.down, hidden)
