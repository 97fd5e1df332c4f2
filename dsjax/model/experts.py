"""The routed experts' product on one rank: rows, each with its own experts, through grouped SwiGLU MLPs.

``local_experts(params, rows_ND, ids_NK, weights_NK) -> out_ND`` with
``out[n] = sum_k weights[n, k] * Expert_{ids[n, k]}(rows[n])``, ids -1 for none. It exists several times, for machines
that want it differently; all give the same numbers, and ``tests/dsjax/model/test_experts.py`` holds them to a plain loop.

All of them first sort the (row, expert) pairs by expert. Cost then follows the pairs that exist, not N × K.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from dsjax.model.parameters import dequantise, reinterpret

Params = Mapping[str, Array]
"""``gate_up.weight [X, D, 2, F]``, ``down.weight [X, F, D]`` in storage dtype; with FP8 also ``gate_up.scale`` and ``down.scale``."""


@dataclass(frozen=True)
class ExpertProduct:
    """The grouped expert product as a callable, with the choices that shape its program.

    implementation: ``tiles`` (CPU), ``einsum`` (few rows per expert), ``ragged_dot`` (accelerators, many rows), or
        ``auto``, which decides by ``platform`` and static shapes.
    weight_dtype: what the stored weights mean; they are stored as unsigned integers on the CPU platform.
    platform: where the product runs (``cpu``, ``gpu``, ``tpu``).
    tile: rows of a tile (``tiles``). capacity: rows per expert of a round (``einsum``). None: the rule's choice.
    """

    implementation: Literal["auto", "tiles", "einsum", "ragged_dot"] = "auto"
    weight_dtype: np.dtype = np.dtype(np.float32)
    platform: str = "cpu"
    tile: int | None = None
    capacity: int | None = None

    def __post_init__(self):
        known = ("auto", "tiles", "einsum", "ragged_dot")
        if self.implementation not in known:
            raise ValueError(f"expert product {self.implementation!r}; expected one of {known}")

    def __call__(
        self, params: Params, rows_ND: Float[Array, "N D"], ids_NK: Int[Array, "N K"], weights_NK: Float[Array, "N K"]
    ) -> Float[Array, "N D"]:
        """Weighted sum of each row's experts, accumulated in float32, in the dtype of ``rows_ND``."""
        with jax.named_scope("experts"):
            experts = Experts(params, self.weight_dtype, rows_ND.dtype)
            pairs = sort_pairs(ids_NK, weights_NK, experts.count)
            chosen = self.implementation
            if chosen == "auto":
                chosen = "tiles" if self.platform == "cpu" else "einsum"
            if chosen == "tiles":
                out = tiles(experts, rows_ND, pairs, self.tile or 16)
            elif chosen == "einsum":
                capacity = self.capacity or default_capacity(ids_NK.size, experts.count)
                out = einsum(experts, rows_ND, pairs, min(capacity, rows_ND.shape[0]))
            else:
                out = ragged_dot(experts, rows_ND, pairs)
            return out.astype(rows_ND.dtype)


@dataclass(frozen=True)
class Experts:
    """A rank's expert weights, made ready for products one expert at a time or all at once."""

    params: Params
    weight_dtype: np.dtype
    compute_dtype: jnp.dtype

    @property
    def count(self) -> int:
        """X: physical experts on this rank."""
        return self.params["down.weight"].shape[0]

    def matrices(self, index: Int[Array, ""] | None = None) -> tuple[Array, Array]:
        """Gate and up ``[D, 2F]`` and down ``[F, D]`` of one expert, or with None of all, ``[X, D, 2F]`` and ``[X, F, D]``."""
        gate_up, down = self._matrix("gate_up", index), self._matrix("down", index)
        return gate_up.reshape(*gate_up.shape[:-2], -1), down

    def _matrix(self, name: str, index: Int[Array, ""] | None) -> Array:
        def pick(key: str) -> Array:
            stack = self.params[key]
            return stack if index is None else lax.dynamic_index_in_dim(stack, index, 0, keepdims=False)

        weight = reinterpret(pick(f"{name}.weight"), self.weight_dtype)
        if f"{name}.scale" in self.params:
            return dequantise(weight, pick(f"{name}.scale"), self.compute_dtype)
        return weight.astype(self.compute_dtype)


class SortedPairs(NamedTuple):
    """All (row, expert) pairs by expert, rows ascending within one; pairs without an expert stand last.

    ``row_P`` and ``weight_P`` of each pair; ``start_X`` and ``count_X``: where an expert's pairs are. P = N × K.
    """

    row_P: Int[Array, "P"]
    weight_P: Float[Array, "P"]
    start_X: Int[Array, "X"]
    count_X: Int[Array, "X"]


def sort_pairs(ids_NK: Int[Array, "N K"], weights_NK: Float[Array, "N K"], experts: int) -> SortedPairs:
    """Sort by expert. One packed key: on CPU a one-operand sort takes a sixth of an ``argsort`` (2,048 pairs: 42 against 240 µs)."""
    pairs = ids_NK.size
    if (experts + 1) * pairs >= 2**32:
        raise ValueError(f"{pairs} pairs of {experts} experts do not fit a 32-bit sort key; dispatch in smaller chunks")
    group_P = jnp.where(ids_NK < 0, experts, ids_NK).reshape(-1)
    key_P = group_P.astype(jnp.uint32) * pairs + lax.iota(jnp.uint32, pairs)
    pair_P = (lax.sort(key_P, is_stable=False) % pairs).astype(jnp.int32)
    count_X = jnp.zeros((experts + 1,), jnp.int32).at[group_P].add(1, mode="promise_in_bounds")[:experts]
    weight_P = weights_NK.reshape(-1).at[pair_P].get(mode="promise_in_bounds").astype(jnp.float32)
    return SortedPairs(pair_P // ids_NK.shape[1], weight_P, jnp.cumsum(count_X) - count_X, count_X)


def swiglu(x: Array, gate_up: Array, down: Array) -> Array:
    """``down(silu(gate) × up)`` over the last two axes, any leading expert axis; float32 results."""
    hidden = jnp.matmul(x, gate_up, preferred_element_type=jnp.float32)
    gate, up = jnp.split(hidden, 2, axis=-1)
    return jnp.matmul((jax.nn.silu(gate) * up).astype(x.dtype), down, preferred_element_type=jnp.float32)


def tiles(experts: Experts, rows_ND: Float[Array, "N D"], pairs: SortedPairs, tile: int) -> Float[Array, "N D"]:
    """A loop over tiles of ``tile`` pairs that never cross an expert; its trip count is the number of tiles in use.

    Work is within a tile per expert of the least possible, however skewed, and nothing of size P × D exists.
    """
    last_tile_X = jnp.cumsum(-(-pairs.count_X // tile))
    row_P = jnp.pad(pairs.row_P, (0, tile))  # so that the slice of the last tile is not shifted back
    weight_P = jnp.pad(pairs.weight_P, (0, tile))

    def one_tile(t: Array, out_ND: Array) -> Array:
        expert = jnp.sum(last_tile_X <= t)
        in_expert = (t - jnp.where(expert > 0, last_tile_X[expert - 1], 0)) * tile
        at = pairs.start_X[expert] + in_expert
        rows_C = lax.dynamic_slice_in_dim(row_P, at, tile)
        used_C = in_expert + jnp.arange(tile) < pairs.count_X[expert]
        x_CD = rows_ND.at[rows_C].get(mode="promise_in_bounds")
        y_CD = swiglu(x_CD, *experts.matrices(expert)) * lax.dynamic_slice_in_dim(weight_P, at, tile)[:, None]
        return out_ND.at[rows_C].add(jnp.where(used_C[:, None], y_CD, 0), mode="promise_in_bounds")

    return lax.fori_loop(0, last_tile_X[-1], one_tile, jnp.zeros(rows_ND.shape, jnp.float32))


def einsum(experts: Experts, rows_ND: Float[Array, "N D"], pairs: SortedPairs, capacity: int) -> Float[Array, "N D"]:
    """All experts in one batched product over ``capacity`` rows each, in as many rounds as the fullest expert needs."""
    gate_up, down = experts.matrices()

    def one_round(r: Array | int, out_ND: Array) -> Array:
        place_C = r * capacity + jnp.arange(capacity)
        used_XC = place_C < pairs.count_X[:, None]
        pair_XC = jnp.where(used_XC, pairs.start_X[:, None] + place_C, 0)
        row_XC = pairs.row_P.at[pair_XC].get(mode="promise_in_bounds")
        x_XCD = rows_ND.at[row_XC].get(mode="promise_in_bounds")
        weight_XC = pairs.weight_P.at[pair_XC].get(mode="promise_in_bounds")
        y_XCD = swiglu(x_XCD, gate_up, down) * weight_XC[:, :, None]
        return out_ND.at[row_XC].add(jnp.where(used_XC[:, :, None], y_XCD, 0), mode="promise_in_bounds")

    out_ND = one_round(0, jnp.zeros(rows_ND.shape, jnp.float32))
    if capacity >= rows_ND.shape[0]:  # a row uses an expert once at most
        return out_ND
    rounds = -(-jnp.max(pairs.count_X) // capacity)
    return lax.fori_loop(1, rounds, one_round, out_ND)


def ragged_dot(experts: Experts, rows_ND: Float[Array, "N D"], pairs: SortedPairs) -> Float[Array, "N D"]:
    """``lax.ragged_dot`` over the sorted pairs: accelerators have kernels for it (on CPU it is a dense masked product)."""
    gate_up, down = experts.matrices()
    x_PD = rows_ND.at[pairs.row_P].get(mode="promise_in_bounds")
    hidden = lax.ragged_dot(x_PD, gate_up, pairs.count_X, preferred_element_type=jnp.float32)
    gate, up = jnp.split(hidden, 2, axis=-1)
    hidden_PF = (jax.nn.silu(gate) * up).astype(x_PD.dtype)
    y_PD = lax.ragged_dot(hidden_PF, down, pairs.count_X, preferred_element_type=jnp.float32)
    used_P = jnp.arange(y_PD.shape[0]) < jnp.sum(pairs.count_X)
    weighted_PD = jnp.where(used_P[:, None], y_PD * pairs.weight_P[:, None], 0)
    return jnp.zeros(rows_ND.shape, jnp.float32).at[pairs.row_P].add(weighted_PD, mode="promise_in_bounds")


def default_capacity(pairs: int, experts: int) -> int:
    """Rows per expert of an ``einsum`` round: the mean load, rounded up to a multiple of 8."""
    return 8 * -(-pairs // (8 * experts))
