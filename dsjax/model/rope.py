"""Rotary position embedding, plain and YaRN (arXiv 2104.09864; 2309.00071 §3).

`O` is the rotary width of a head. Frequencies are computed on the host from `RopeConfig`, in float32 and in transformers' order of
operations. At position 4,096, an error of one unit in the last place of a frequency turns a pair by 2e-4 radians, so a more exact
computation would move logits away from the reference. YaRN's correction of the softmax scale is in `ModelConfig.softmax_scale`.
"""

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dsjax.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, dim: int) -> Float[np.ndarray, "{dim//2}"]:
    """Return the radians per position of each rotated pair, float32: `theta^(-2i/dim)`, stretched by YaRN if set.

    YaRN keeps a frequency (extrapolation) if its pair turns at least `beta_fast` times within `original_max_position_embeddings` positions,
    divides it by `factor` (interpolation) if the pair turns at most `beta_slow` times, and blends both on a linear ramp in between.
    """
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    # Only the power is computed in float64 and rounded once: NumPy's float32 power is a unit off for some values.
    powers = (rope.theta ** exponents.astype(np.float64)).astype(np.float32)
    plain = np.float32(1) / powers
    if rope.type == "default":
        return plain
    stretched = np.float32(1) / (np.float32(rope.factor) * powers)
    plain_share = np.float32(1) - _ramp(rope, dim)
    return stretched * (np.float32(1) - plain_share) + plain * plain_share


def _ramp(rope: RopeConfig, dim: int) -> Float[np.ndarray, "{dim//2}"]:
    """Return each pair's share of the stretched frequency: 0 for fast pairs, 1 for slow ones, linear in the pair's index in between."""

    def pair_turning(turns: float) -> float:
        """Return the fractional index of the pair that turns this many times within the original context."""
        context = rope.original_max_position_embeddings
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # A step instead of a ramp; the same tiny width as in the reference.
    pairs = np.arange(dim // 2, dtype=np.float32)
    return np.clip((pairs - np.float32(low)) / np.float32(high - low), 0, 1).astype(np.float32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of some tokens' positions: computed once a step, applied in every layer.

    ``Rotation.at(positions, rope, O)(x)`` turns each pair of ``x`` by ``position × frequency``, in float32, and returns
    it in the dtype of ``x``. ``x`` has the leading dimensions of ``positions``, then possibly a heads axis.

    ``rope.interleave`` says which elements of the *input* form a pair: (0, 1), (2, 3), … or (0, O/2), (1, O/2 + 1), …
    The *output* has all first elements, then all second ones, in both cases. Queries and keys are permuted alike, so attention scores equal
    those of transformers' V3 class, which permutes too, and of its V2 class, which does not.
    """

    cos: Float[Array, "*b pairs"]
    sin: Float[Array, "*b pairs"]
    interleave: bool = field(metadata={"static": True})

    @classmethod
    def at(cls, positions: Int[Array, "*b"], rope: RopeConfig, dim: int) -> "Rotation":
        """Return the rotation of tokens at ``positions``, for rotary parts of width ``dim``."""
        angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(rope, dim)
        return cls(jnp.cos(angles) * rope.cos_sin_scale, jnp.sin(angles) * rope.cos_sin_scale, rope.interleave)

    def __call__(self, x: Float[Array, "*batch O"]) -> Float[Array, "*batch O"]:
        """Rotate each pair of ``x`` by the angle of its token. Keep the shape and dtype; order the pairs as described above."""
        heads = (1,) * (x.ndim - self.cos.ndim)
        shape = (*self.cos.shape[:-1], *heads, self.cos.shape[-1])
        cos, sin = self.cos.reshape(shape), self.sin.reshape(shape)
        first, second = _pairs(x.astype(jnp.float32), self.interleave)
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return turned.astype(x.dtype)


def _pairs(x: Float[Array, "*batch O"], interleave: bool) -> tuple[Array, Array]:
    """Return the first and the second elements of the pairs, each `[..., O/2]`."""
    if interleave:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]
