"""Sums whose order does not depend on the mesh: a long sum is cut into pieces that devices may share, and the pieces are added as a tree.

A device that holds an equal share of the pieces adds them as its branch of the tree, and `tree_sum` adds the branches of all devices.
So one device and eight give the same bits. A collective's own sum has whatever order the platform chooses.
"""

from __future__ import annotations

import jax
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

MOST_PIECES = 8
"""Devices that can share a sum and still give the bits of one."""
LEAST_ROWS = 8
"""Rows of a device's part of a sum, below which another collective costs more than the bytes that it saves."""


def pieces_of(depth: int) -> int:
    """Into how many pieces a sum over ``depth`` products is cut, wherever it is computed: a power of two that divides it."""
    return next(pieces for pieces in (8, 4, 2, 1) if depth % pieces == 0)


def pieces_here(depth: int, shares: int) -> int:
    """How many of the pieces of a sum over ``depth`` products in all one of ``shares`` devices has.

    1 where a device has less than a piece, or pieces do not divide: the sum's bits then depend on ``shares``.
    """
    pieces = pieces_of(depth)
    return pieces // shares if pieces % shares == 0 else 1


def add_as_tree(branches: Float[Array, "S *b"]) -> Float[Array, "*b"]:
    """The sum over the leading axis: neighbours are added, then neighbours of those, and so on. What has no neighbour waits."""
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
    """Inside ``shard_map``: the sum of all devices' branches along ``axes``, the same bits on each.

    shares: devices along ``axes``. dtype: what the sum is rounded to, before it is gathered; None: that of ``branch``.
    split: each device gets its part of the leading dimension alone, which ``shares`` divides.
    Where the rows divide, and a part has ``LEAST_ROWS``, a device adds up its part and the parts are gathered: two rows move for each, and
    not ``shares``, in two collectives.
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
    """The sum over a short axis, term after term: ``((t_0 + t_1) + t_2) + …``, in every program."""
    first, *others = (lax.index_in_dim(terms, k, axis, keepdims=False) for k in range(terms.shape[axis]))
    for term in others:
        first = first + term
    return first


def add_by_halves(terms: Float[Array, "*b K"]) -> Float[Array, "*b"]:
    """The sum over a long last axis as a fixed tree: the first half plus the second, element by element, again and again."""
    width = terms.shape[-1]
    full = 1 << (width - 1).bit_length()
    if full != width:
        terms = jax.numpy.pad(terms, [(0, 0)] * (terms.ndim - 1) + [(0, full - width)])
    while terms.shape[-1] > 1:
        half = terms.shape[-1] // 2
        terms = terms[..., :half] + terms[..., half:]
    return terms[..., 0]
