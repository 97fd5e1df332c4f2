"""Sums whose order does not depend on the mesh: a long sum is split into pieces, which can be on several devices, and added as a tree.

A device with an equal share of the pieces adds them as its branch of the tree, and `tree_sum` adds the branches of all devices. One device
and eight devices therefore give the same bits. With a reducing collective, the platform chooses the order.
"""

from __future__ import annotations

import jax
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

MOST_PIECES = 8
"""Maximum number of devices that can share a sum and give the same bits as one device."""
LEAST_ROWS = 8
"""Minimum number of rows per device for the second collective of `tree_sum` to cost less than the bytes it saves."""


def pieces_of(depth: int) -> int:
    """Return the number of pieces of a sum over ``depth`` products, independent of the mesh: a power of two that divides ``depth``."""
    return next(pieces for pieces in (8, 4, 2, 1) if depth % pieces == 0)


def pieces_here(depth: int, shares: int) -> int:
    """Return the number of pieces per device, for a sum over a total of ``depth`` products on ``shares`` devices.

    1 if a device has less than a piece or the pieces do not divide; the sum's bits then depend on ``shares``.
    """
    pieces = pieces_of(depth)
    return pieces // shares if pieces % shares == 0 else 1


def add_as_tree(branches: Float[Array, "S *b"]) -> Float[Array, "*b"]:
    """Return the sum over the leading axis as a tree: add neighbours pairwise until one is left. An odd last entry moves up unchanged."""
    parts = list(branches)
    while len(parts) > 1:
        paired = [left + right for left, right in zip(parts[::2], parts[1::2], strict=False)]
        parts = paired + parts[len(paired) * 2 :]
    return parts[0]


def tree_sum(
    branch: Float[Array, "N *b"],
    axes: str | tuple[str, ...],
    shares: int,
    *,
    split: bool = False,
    dtype: DTypeLike | None = None,
) -> Array:
    """Return the sum of all devices' branches along ``axes``, with the same bits on each device. Inside ``shard_map``.

    shares: number of devices along ``axes``. dtype: dtype to round the sum to before gathering it; None: that of ``branch``.
    split: return only this device's part of the leading dimension, which ``shares`` must divide.
    If the rows divide into parts of at least ``LEAST_ROWS``, each device sums one part and the parts are gathered. These two collectives
    move two rows per row instead of ``shares``.
    """
    dtype = branch.dtype if dtype is None else dtype
    if shares == 1:
        return branch.astype(dtype)
    if split or (branch.shape[0] % shares == 0 and branch.shape[0] >= LEAST_ROWS * shares):
        parts = branch.reshape(shares, branch.shape[0] // shares, *branch.shape[1:])
        own = add_as_tree(lax.all_to_all(parts, axes, split_axis=0, concat_axis=0, tiled=True)).astype(dtype)
        return own if split else lax.all_gather(own, axes, axis=0, tiled=True)
    return add_as_tree(lax.all_gather(branch, axes, axis=0)).astype(dtype)


def add_in_order(terms: Float[Array, "*b K *c"], axis: int = -1) -> Float[Array, "*b *c"]:
    """Return the sum over a short axis, added from first to last in every program: ``((t_0 + t_1) + t_2) + …``."""
    first, *others = (lax.index_in_dim(terms, k, axis, keepdims=False) for k in range(terms.shape[axis]))
    for term in others:
        first = first + term
    return first


def add_by_halves(terms: Float[Array, "*b K"]) -> Float[Array, "*b"]:
    """Return the sum over a long last axis as a fixed tree: repeatedly add the second half to the first, element by element."""
    width = terms.shape[-1]
    full = 1 << (width - 1).bit_length()
    if full != width:
        terms = jax.numpy.pad(terms, [(0, 0)] * (terms.ndim - 1) + [(0, full - width)])
    while terms.shape[-1] > 1:
        half = terms.shape[-1] // 2
        terms = terms[..., :half] + terms[..., half:]
    return terms[..., 0]
