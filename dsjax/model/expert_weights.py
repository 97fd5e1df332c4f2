"""A rank's expert weights as stored, and the SwiGLU product in plain JAX, with one expert or all at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float, Int

from dsjax.fp4.formats import PackedFormat
from dsjax.kernels.gate import gated
from dsjax.model import fp8_product
from dsjax.model.fp4_matrix import PARTS, decoded, format_of, meant, swiglu_w4a4, swiglu_w4a8
from dsjax.model.fp8_product import WIDEN, ActivationScheme
from dsjax.model.parameters import depth_from_end, dequantise, reinterpret

Params = Mapping[str, Array]
"""``gate_up.weight [X, D, 2, F]``, ``down.weight [X, F, D]`` in storage dtype. FP8 also has ``gate_up.scale`` and ``down.scale``; packed
weights also have these and, in NVFP4, ``global_scale`` (``fp4_matrix``).

With an int32 scalar ``layer`` the other arrays are stacks with a leading layers axis, and the product uses that layer. ``tiles`` then
copies only the experts in use; a scan over the stack would first copy every expert of each layer, which takes a third of the experts'
time in a decode step on a CPU.
"""


@dataclass(frozen=True)
class Experts:
    """A rank's expert weights, for products with one expert at a time or with all at once."""

    params: Params
    weight_dtype: np.dtype
    compute_dtype: jnp.dtype
    scheme: ActivationScheme = WIDEN
    limit: float | None = None
    depth_last: bool = False

    @property
    def stacked(self) -> bool:
        """Whether the arrays have a leading layers axis."""
        return "layer" in self.params

    @property
    def fp4(self) -> PackedFormat | None:
        """Format of packed weights; None for other weights."""
        return format_of(self.params, self.weight_dtype)

    @property
    def count(self) -> int:
        """X: physical experts on this rank."""
        return self.params["down.weight"].shape[1 if self.stacked else 0]

    @property
    def layer(self) -> Int[Array, ""]:
        """Index of the layer in ``stack()``."""
        return self.params.get("layer", jnp.int32(0))

    def stack(self) -> dict[str, Array]:
        """Return the arrays as stacks of layers."""
        return {name: array if self.stacked else array[None] for name, array in self.params.items() if name != "layer"}

    def fp4_stack(self, name: str) -> dict[str, Array]:
        """Return the packed arrays of ``gate_up`` or ``down`` by part, as stacks of layers."""
        stack = self.stack()
        return {part: stack[f"{name}.{part}"] for part in PARTS if f"{name}.{part}" in stack}

    def matrices(self, index: Int[Array, ""] | None = None) -> tuple[Array, Array]:
        """Return gate and up ``[D, 2F]`` and down ``[F, D]`` of one expert; ``[X, D, 2F]`` and ``[X, F, D]`` of all if None."""
        gate_up, down = self._matrix("gate_up", index), self._matrix("down", index)
        return rearrange(gate_up, "... d stack f -> ... d (stack f)"), down

    def swiglu(self, x: Float[Array, "*x N D"], index: Int[Array, ""] | None = None) -> Float[Array, "*x N D"]:
        """Apply one expert to rows ``[N, D]``, or if None each expert to its own rows ``[X, N, D]``. Returns float32."""
        if not self.scheme.dynamic:
            return swiglu(x, *self.matrices(index), self.limit)
        if self.fp4 is not None:
            gate_up, down = (self._fp4_arrays(name, index) for name in ("gate_up", "down"))
            if self.scheme.experts is not None:
                return swiglu_w4a4(x, gate_up, down, self.limit)
            apply = partial(swiglu_w4a8, scheme=self.scheme, limit=self.limit)
            return (apply if index is not None else jax.vmap(apply))(x, gate_up, down)
        weights = [(self._stored(name, index), self._pick(f"{name}.scale", index)) for name in ("gate_up", "down")]
        apply = partial(fp8_product.swiglu, scheme=self.scheme, limit=self.limit)
        return (apply if index is not None else jax.vmap(apply))(x, *weights)

    def _matrix(self, name: str, index: Int[Array, ""] | None) -> Array:
        if self.fp4 is not None:
            return decoded(self._fp4_arrays(name, index), name == "gate_up", self.compute_dtype)
        weight = self._stored(name, index)
        if f"{name}.scale" in self.params:
            return dequantise(weight, self._pick(f"{name}.scale", index), self.compute_dtype)
        return weight.astype(self.compute_dtype)

    def _fp4_arrays(self, name: str, index: Int[Array, ""] | None) -> dict[str, Array]:
        parts = {part: self._pick(f"{name}.{part}", index) for part in PARTS if f"{name}.{part}" in self.params}
        return meant(parts, self.fp4)

    def _stored(self, name: str, index: Int[Array, ""] | None) -> Array:
        weight = reinterpret(self._pick(f"{name}.weight", index), self.weight_dtype)
        return depth_from_end(weight, name == "gate_up") if self.depth_last else weight

    def _pick(self, key: str, index: Int[Array, ""] | None) -> Array:
        """Return one array of the layer, for all experts or for one. Takes a single slice, because on a CPU each slice is a copy."""
        array = self.params[key]
        where = ([self.params["layer"]] if self.stacked else []) + ([] if index is None else [index])
        if not where:
            return array
        rest = array.shape[len(where) :]
        start = (*where, *[0] * len(rest))
        sizes = (1,) * len(where) + rest
        return lax.dynamic_slice(array, start, sizes, allow_negative_indices=False).reshape(rest)


def swiglu(x: Array, gate_up: Array, down: Array, limit: float | None = None) -> Array:
    """Return ``down(silu(gate) × up)`` over the last two axes in float32; a leading expert axis is allowed."""
    hidden = jnp.matmul(x, gate_up, preferred_element_type=jnp.float32)
    gate, up = jnp.split(hidden, 2, axis=-1)
    return jnp.matmul(gated(gate, up, limit).astype(x.dtype), down, preferred_element_type=jnp.float32)
