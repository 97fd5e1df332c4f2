"""Transformation of index queries and keys before their product (``--index-scores``).

DeepSeek's published inference code multiplies both by a Hadamard matrix, which preserves their products and spreads outliers, and
rounds both: V3.2's to FP8, V4's to FP4 (``dsjax/model/compressed/precision.py``). Transformers does neither.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dsjax.errors import UserError
from sharding import fp8


@dataclass(frozen=True)
class IndexScores:
    """Options of index scores."""

    fp8: bool = False  # rotate queries and keys, then round them to FP8
    powers: bool = False  # FP8 scales are powers of two (``scale_fmt`` "ue8m0" of the checkpoint)
    fp4: bool = False  # rotate queries and keys, then round them to FP4, as DeepSeek-V4 does

    @classmethod
    def parse(cls, name: str, width: int | None, powers: bool, published: str = "fp8") -> IndexScores:
        """Return the options for a value of ``--index-scores`` and index heads of ``width`` (None: the model has no indexer).

        published: the format to which DeepSeek's code rounds index queries and keys.

        Raises:
            UserError: rounding for a model without an indexer, to a format of another family, or for index heads whose width is not a
                power of two.
        """
        if name == "float":
            return cls(powers=powers)
        if width is None:
            raise UserError(
                f"--index-scores {name} is for models with sparse attention, and this one has no indexer; leave it out"
            )
        if name != published:
            raise UserError(
                f"--index-scores is {name}, and DeepSeek's code rounds this model's index queries and keys to {published}; "
                f"give {published}, or leave it out"
            )
        if width & (width - 1):
            raise UserError(
                f"--index-scores {name} rotates by a Hadamard matrix, which wants a power of two, and this model's index_head_dim is "
                f"{width}; leave it out"
            )
        return cls(name == "fp8", powers, name == "fp4")

    def rotate(self, x: Float[Array, "*b A"]) -> Float[Array, "*b A"]:
        """With FP8, multiply ``x`` by the Hadamard matrix."""
        return hadamard(x) if self.fp8 else x

    def query(self, x: Float[Array, "*b I A"]) -> Float[Array, "*b I A"]:
        """Return index queries as they enter the product. With FP8 they are float32 values dequantised from FP8."""
        x = self.rotate(x)
        return fp8.dequantise(*fp8.quantise(x, powers=self.powers)) if self.fp8 else x


def hadamard(x: Float[Array, "*b A"]) -> Float[Array, "*b A"]:
    """Multiply ``x`` by the Hadamard matrix ÷ √A in float32. Returns the dtype of ``x``. A is a power of two."""
    width, out = x.shape[-1], x.astype(jnp.float32)
    half = 1
    while half < width:  # Sylvester's construction: sums and differences of neighbours, then of neighbouring pairs, …
        pairs = out.reshape(*x.shape[:-1], width // (2 * half), 2, half)
        out = jnp.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], axis=-2)
        half *= 2
    return (out.reshape(x.shape) * np.float32(width**-0.5)).astype(x.dtype)
