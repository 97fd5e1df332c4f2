"""Index scores, and the choice of the top k: exact, without a sort, ties broken by position."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32


def index_scores(
    query: Float[Array, "R C I A"], weight: Float[Array, "R C I"], key: Float[Array, "R S A"]
) -> Float[Array, "R C S"]:
    """Compute ``Σ_j weight_j · ReLU(query_j · key · A^-½)`` in float32: equation 1 of the report of DeepSeek-V3.2-Exp."""
    products = jnp.einsum("rcjw,rsw->rcjs", query, key, preferred_element_type=jnp.float32)
    return jnp.einsum("rcj,rcjs->rcs", weight, jax.nn.relu(products * key.shape[-1] ** -0.5))


def choose(scores: Float[Array, "*b S"], k: int, bits: int = 1) -> Bool[Array, "*b S"]:
    """Return a mask of the ``k`` highest scores of each row; ties go to lower positions. −inf is never chosen.

    A row with fewer than ``k`` scores above −inf chooses all of them. The ``k``-th highest is the largest number that at least ``k``
    scores reach, found from its first bit to its last on integers that sort like the floats. bits: number of bits found in one pass
    over the scores by ``2 ** bits - 1`` counts. Passes cost time on accelerators (one launch each), counts on CPUs.
    """
    ordered = _ordered(scores)
    digits = jnp.arange(1, 2**bits, dtype=jnp.uint32)

    def set_bits(index, threshold):
        shift = (32 - bits * (index + 1)).astype(jnp.uint32)
        raised = threshold[..., None] | (digits << shift)
        reached = jnp.sum(ordered[..., None, :] >= raised[..., None], axis=-1, dtype=jnp.int32)
        return threshold | (jnp.sum(reached >= k, axis=-1).astype(jnp.uint32) << shift)

    passes = 32 // bits
    threshold = jnp.zeros(scores.shape[:-1], jnp.uint32)
    threshold = jax.lax.fori_loop(0, passes, set_bits, threshold, unroll=bits > 1)[..., None]
    above, equal = ordered > threshold, ordered == threshold
    places = k - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    chosen = above | (equal & (jnp.cumsum(equal, axis=-1, dtype=jnp.int32) <= places))
    return chosen & (scores > -jnp.inf)


def positions_of(chosen: Bool[Array, "*b S"], k: int) -> tuple[Int[Array, "*b k"], Int[Array, "*b"]]:
    """Return the chosen positions in ascending order, padded with ``S`` (no valid position), and their number."""
    ranks = jnp.cumsum(chosen, axis=-1, dtype=jnp.int32)
    flat = ranks.reshape(-1, ranks.shape[-1])
    # The n-th chosen position is the first whose rank is n.
    found = jax.vmap(lambda row: jnp.searchsorted(row, jnp.arange(1, k + 1), method="scan_unrolled"))(flat)
    return found.reshape(*ranks.shape[:-1], k).astype(jnp.int32), ranks[..., -1]


def pack(chosen: Bool[Array, "*b S"]) -> UInt32[Array, "*b words"]:
    """Pack one bit per position, 32 to a word; S is rounded up to whole words."""
    padded = jnp.pad(chosen, [(0, 0)] * (chosen.ndim - 1) + [(0, -chosen.shape[-1] % 32)])
    words = padded.reshape(*chosen.shape[:-1], -1, 32).astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32)
    return jnp.sum(words, axis=-1, dtype=jnp.uint32)


def unpack(words: UInt32[Array, "*b N"], start: Int[Array, ""], size: int) -> Bool[Array, "*b size"]:
    """Return the bits of ``size`` positions from ``start`` on; positions past the last word are not chosen."""
    at = start + jnp.arange(size)
    word = jnp.take(words, at // 32, axis=-1, mode="fill", fill_value=0)
    return ((word >> (at % 32).astype(jnp.uint32)) & 1).astype(bool)


def _ordered(scores: Float[Array, "*b S"]) -> UInt32[Array, "*b S"]:
    """Return integers that sort like the scores; 0 and −0 give the same integer."""
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores.astype(jnp.float32)), jnp.int32)
    # Flip all bits of a negative float, because a larger magnitude is less. Set the first bit of a positive one.
    turned = jnp.where(bits < 0, ~bits, bits | jnp.int32(-(2**31)))
    return jax.lax.bitcast_convert_type(turned, jnp.uint32)
