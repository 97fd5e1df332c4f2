"""The paged cache, and reading and writing it inside ``shard_map``, where every array holds one DP rank's part.

A cache array is ``[L, P_all, G, ...]``: layers, pages of this rank, slots of a page. All layers are one array, so that a
scan over layers can carry it and update it in place.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, Int, Shaped

from sharding.indices import put, take

Cache = dict[str, Array]


@jax.tree_util.register_dataclass
@dataclass
class Rows:
    """Positions of a row group's tokens, and the pages that hold their context.

    A row's positions are consecutive. ``length``: number of its tokens that are not padding; None: all. Attention of padding is
    meaningless; native kernels skip padding and give zeros.
    """

    positions: Int[Array, "B R C"]
    tables: Int[Array, "B R Pr"]
    length: Int[Array, "B R"] | None = None
    # mask of the cache slots that hold an entry, over all pages; a token attends to those and to itself. None: all do. With window pages,
    # the mask is over their slots
    filled: Bool[Array, "P G"] | None = None
    # ring of window pages, for a model that has them: page ``p // page_size % Pw`` holds position ``p``. Only the pages of the row's
    # positions and of the ``page_size - 1`` before them belong to the row; others must not be read
    windows: Int[Array, "B R Pw"] | None = None


def write(
    cache: Shaped[Array, "L P G *w"], layer: Int[Array, ""], slots: Int[Array, "T"], values: Shaped[Array, "T *w"]
) -> Shaped[Array, "L P G *w"]:
    """Write each token's entry to its slot (``page × G + offset``); slot −1 writes nothing that is read."""
    pages, G = cache.shape[1:3]
    if slots.shape[0] == 1:
        # XLA turns a scatter of one entry into a conditional update of the whole array, which it then copies: seconds
        # instead of microseconds for a cache of a gigabyte. This one writes −1's entry to page 0, which nothing reads.
        slot, entry = jnp.maximum(slots[0], 0), values.astype(cache.dtype)
        at = (layer, slot // G, slot % G, *[0] * (cache.ndim - 3))
        return lax.dynamic_update_slice(cache, entry[None, None], at, allow_negative_indices=False)
    page = jnp.where(slots < 0, pages, slots // G)
    return put(cache, (jnp.broadcast_to(layer, page.shape), page, slots % G), values.astype(cache.dtype))


def read(
    cache: Shaped[Array, "L P G *w"], layer: Int[Array, ""], tables: Int[Array, "R Pr"]
) -> Shaped[Array, "R S *w"]:
    """Return the entries of each row's pages, in order: ``S = Pr × G`` context positions."""
    pages, G = cache.shape[1:3]
    # One row a page: XLA's CPU backend copies rows of a matrix several times faster than blocks of a larger array.
    flat = rearrange(cache, "l p g ... -> (l p) (g ...)")
    entries = take(flat, (layer * pages + tables).reshape(-1))
    return entries.reshape(tables.shape[0], tables.shape[1] * G, *cache.shape[3:])


def read_tokens(
    cache: Shaped[Array, "L P G *w"], layer: Int[Array, ""], tables: Int[Array, "R Pr"], positions: Int[Array, "R N"]
) -> Shaped[Array, "R N *w"]:
    """Return the entries at single positions of each row's context; a position past its table gives an arbitrary entry."""
    pages, G = cache.shape[1:3]
    page = jnp.take_along_axis(tables, jnp.minimum(positions // G, tables.shape[1] - 1), axis=1)
    slots = (layer * pages + page) * G + positions % G
    flat = rearrange(cache, "l p g ... -> (l p g) (...)")
    entries = take(flat, slots.reshape(-1))
    return entries.reshape(*positions.shape, *cache.shape[3:])


def mark(filled: Bool[Array, "P G"], slots: Int[Array, "T"], value: bool) -> Bool[Array, "P G"]:
    """Set the flag of each slot to ``value``; −1 is dropped."""
    return write(filled[None], jnp.int32(0), slots, jnp.full(slots.shape, value))[0]


def read_filled(filled: Bool[Array, "P G"], tables: Int[Array, "R Pr"]) -> Bool[Array, "R S"]:
    """Return the flag of each context position of the rows' pages."""
    return read(filled[None], jnp.int32(0), tables)
