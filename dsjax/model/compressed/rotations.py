"""Rotation of the last values of queries and entries, and its inverse. Window layers and compressing layers use different RoPE bases."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsjax.config import ModelConfig
from dsjax.model.rope import Rotation


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rotations:
    """Token positions and their rotations, computed once per step and applied in every layer."""

    positions: Int[Array, "*b"]
    window: Rotation
    compressing: Rotation

    @classmethod
    def at(cls, positions: Int[Array, "*b"], config: ModelConfig) -> Rotations:
        """Return the rotations of tokens at ``positions``."""
        width = config.v4.qk_rope_head_dim
        return cls(positions, Rotation.at(positions, config.rope, width), entry_rotation(config, positions))

    def of(self, attention: str) -> Rotation:
        """Return the rotation of a layer's queries and of its tokens' own entries."""
        return self.window if attention == "window" else self.compressing


def entry_rotation(config: ModelConfig, positions: Int[Array, "*b"]) -> Rotation:
    """Return the rotation of compressed entries. positions: first position of each entry's window."""
    return Rotation.at(positions, config.v4.compress_rope, config.v4.qk_rope_head_dim)


def rotate(rotation: Rotation, x: Float[Array, "*n M"]) -> Float[Array, "*n M"]:
    """Rotate the last values of ``x``. The first values of all pairs then precede the second ones."""
    fixed = x.shape[-1] - 2 * rotation.cos.shape[-1]
    return jnp.concatenate([x[..., :fixed], rotation(x[..., fixed:])], axis=-1)


def rotate_back(rotation: Rotation, x: Float[Array, "*n M"]) -> Float[Array, "*n M"]:
    """Invert ``rotate``, and interleave the pairs again."""
    pairs = rotation.cos.shape[-1]
    back = Rotation(rotation.cos, -rotation.sin, interleave=False)(x[..., -2 * pairs :])
    return interleave(jnp.concatenate([x[..., : -2 * pairs], back], axis=-1), 2 * pairs)


def interleave(x: Float[Array, "*n M"], rotated: int) -> Float[Array, "*n M"]:
    """Return ``x`` with both values of each pair side by side again, in its last ``rotated`` values."""
    pairs, last = rotated // 2, x[..., -rotated:]
    joined = jnp.stack([last[..., :pairs], last[..., pairs:]], axis=-1).reshape(last.shape)
    return jnp.concatenate([x[..., :-rotated], joined], axis=-1)
