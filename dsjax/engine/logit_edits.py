"""Logits changed on the device as the host prepared it: single tokens by *edits*, sets of tokens by packed masks.

An edit names a row and a token; a launch has at most one for each pair. So a list of any length can be applied in pieces of
one width, in any order, by one compiled program a row count: nobody's long history makes a shape that was not warmed up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

EDITS_PER_ROW = 256
"""Edits that one run of the program has room for, times its rows. A row's share of 4 kB is sent even where it is not used."""


class Penalties(NamedTuple):
    """Per-row penalties: vLLM's names, and values that change nothing in rows that want none."""

    presence: Float[Array, "B R"]
    frequency: Float[Array, "B R"]
    repetition: Float[Array, "B R"]

    @classmethod
    def none(cls, ranks: int, rows: int) -> Penalties:
        """Penalties, to be filled in on the host, that change nothing."""
        shape = (ranks, rows)
        return cls(np.zeros(shape, np.float32), np.zeros(shape, np.float32), np.ones(shape, np.float32))


def edit_width(num_rows: int) -> int:
    """Edits of a rank that one run takes, for launches of ``num_rows`` rows a rank."""
    return EDITS_PER_ROW * num_rows


def mask_words(vocab_size: int) -> int:
    """int32 words of a packed mask."""
    return -(-vocab_size // 32)


def pieces(edits: Sequence[np.ndarray], num_rows: int) -> Iterator[np.ndarray]:
    """``[B, N, 4]`` int32 pieces of each rank's ``[n, 4]`` edits; what is left of a piece names row −1, which none is."""
    width = edit_width(num_rows)
    for start in range(0, max((len(own) for own in edits), default=0), width):
        piece = np.full((len(edits), width, 4), -1, np.int32)
        for rank, own in enumerate(edits):
            part = own[start : start + width]
            piece[rank, : len(part)] = part
        yield piece


def change(
    logits: Float[Array, "B R V"],
    penalties: Penalties,
    edits: Int[Array, "B N 4"],
    mask: Int[Array, "B R W"],
    first: Int[Array, ""] | int = 0,
) -> Float[Array, "B R V"]:
    """Logits after edits and mask. A token that may not be taken has −∞.

    edits: row, token, bits of a float32 bias, and 2 × (times in the output) + (1 if in the prompt). The bias is added; then,
        as vLLM and OpenAI define them: with a count or in the prompt, the logit is divided by ``repetition`` where positive
        and else multiplied; ``frequency`` × times is subtracted; and ``presence`` if there is any time.
    mask: bit ``t % 32`` of word ``t // 32`` says that token t may be taken.
    first: the token that ``logits[..., 0]`` belongs to, where the vocabulary is spread over devices.
    """
    changed = jax.vmap(lambda *one: _edit(*one, first))(logits, penalties, edits)
    bits = (mask[..., None] >> jnp.arange(32)) & 1
    allowed = bits.reshape(*mask.shape[:-1], -1)
    allowed = lax.dynamic_slice_in_dim(allowed, first, logits.shape[-1], axis=-1)
    return jnp.where(allowed != 0, changed, -jnp.inf)


def _edit(logits: Float[Array, "R V"], penalties: Penalties, edits: Int[Array, "N 4"], first) -> Float[Array, "R V"]:
    R, V = logits.shape
    row, token, bits, code = edits.T
    here = (row >= 0) & (token >= first) & (token < first + V)
    at = (jnp.where(here, row, R), jnp.where(here, token - first, V))  # beyond the end: dropped
    presence, frequency, repetition = (values.at[row].get(mode="clip") for values in penalties)
    times = code >> 1
    x = logits.at[at].get(mode="clip") + lax.bitcast_convert_type(bits, jnp.float32)
    x = jnp.where(code > 0, jnp.where(x > 0, x / repetition, x * repetition), x)
    x = x - frequency * times - jnp.where(times > 0, presence, 0.0)
    return logits.at[at].set(x, mode="drop")
