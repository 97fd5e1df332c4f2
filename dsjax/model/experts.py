"""The routed experts' grouped SwiGLU product on one rank: each row goes through its own experts.

``ExpertProduct`` computes ``out[n] = sum_k weights[n, k] * Expert_{ids[n, k]}(rows[n])``; an id of -1 means no expert. Platforms have
different implementations, which ``tests/dsjax/model/test_experts.py`` compares with a plain loop.

Each sorts the (row, expert) pairs by expert, so its cost scales with the existing pairs, not with N × K. Rows are read only with
``rows.take``, so dispatch can pass packed rows, most of which may never be read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from dsjax.fp4 import rows as nvfp4_rows
from dsjax.kernels.pallas import activations, fp4_products, tpu_products
from dsjax.kernels.pallas.addressing import addressable
from dsjax.kernels.pallas.experts import combine, round_pairs
from dsjax.kernels.pallas.products import SLACK, Groups, down, gate_up
from dsjax.kernels.table import Kernels
from dsjax.model.expert_weights import Experts, Params, swiglu
from dsjax.model.fp4_matrix import PACKED
from dsjax.model.fp8_product import WIDEN, ActivationScheme
from sharding import fp8
from sharding.dispatch.wire import PackedRows
from sharding.indices import cut, pick, take
from sharding.sums import pieces_here

IMPLEMENTATIONS = ("auto", "tiles", "einsum")
ROUND_ROWS = 32_768
"""Maximum rows of one ``einsum`` round over all experts of a device. In DeepSeek-V3 a row takes 60 kB of buffers."""


@dataclass(frozen=True)
class ExpertProduct:
    """The grouped expert product as a callable, with its static options."""

    # ``tiles`` (CPU), ``einsum`` (accelerators), or ``auto``: a kernel of ``kernels`` if one can run, else the better of the two
    implementation: Literal["auto", "tiles", "einsum"] = "auto"
    # dtype of the weights; the CPU platform stores them as unsigned integers
    weight_dtype: np.dtype = np.dtype(np.float32)
    platform: str = "cpu"  # where the product runs (``cpu``, ``gpu``, ``tpu``)
    # (row, expert) pairs of an expert under even routing. None: from the size of ``ids_NK``, which is far too many if most ids are -1
    mean_load: float | None = None
    tile: int | None = None  # rows of a tile (``tiles``). None: ``default_tile``
    capacity: int | None = None  # rows per expert of a round (``einsum``). None: ``default_capacity``
    kernels: Kernels = Kernels()
    scheme: ActivationScheme = WIDEN  # how rows are quantised for products with FP8 weights; ``WIDEN``: not at all
    # devices that share the intermediate dimension of each expert. The native kernel splits its sums accordingly (``sharding.sums``)
    width_shares: int = 1
    limit: float | None = None  # see ``gated``
    # whether FP8 weights are ``gate_up.weight [X, 2, F, D]`` and ``down.weight [X, D, F]``, as GPUs store them
    depth_last: bool = False

    def __post_init__(self):
        if self.implementation not in IMPLEMENTATIONS:
            raise ValueError(f"expert product {self.implementation!r}; expected one of {IMPLEMENTATIONS}")

    def __call__(
        self, params: Params, rows_ND: Float[Array, "N D"], ids_NK: Int[Array, "N K"], weights_NK: Float[Array, "N K"]
    ) -> Float[Array, "N D"]:
        """Return the weighted sum of each row's experts in the dtype of ``rows_ND``, accumulated in float32."""
        with jax.named_scope("experts"):
            experts = Experts(params, self.weight_dtype, rows_ND.dtype, self.scheme, self.limit, self.depth_last)
            if self.is_native(rows_ND.dtype):
                return self._native(experts, rows_ND, ids_NK, weights_NK)
            mean_load = ids_NK.size / experts.count if self.mean_load is None else self.mean_load
            may_use_pallas = self.implementation == "auto" and self.scheme.experts is None  # XLA computes other schemes
            if self.kernels.name("experts") == "pallas" and may_use_pallas:
                stack = experts.stack()
                if self.kernels.pallas.platform == "tpu":
                    return self._mosaic(experts, stack, rows_ND, ids_NK, weights_NK, mean_load)
                if experts.fp4 is not None or all(map(addressable, stack.values())):
                    return self._pallas(experts, stack, rows_ND, ids_NK, weights_NK, mean_load)
            pairs = sort_pairs(ids_NK, weights_NK, experts.count)
            # ``tiles``, which copies each expert in use, is fastest on CPUs (docs/measurements/2026-11-22-grouped-products.csv).
            as_tiles = self.platform == "cpu" if self.implementation == "auto" else self.implementation == "tiles"
            if as_tiles:
                out = tiles(experts, rows_ND, pairs, self.tile or default_tile(mean_load))
            else:
                capacity = self.capacity or default_capacity(mean_load, experts.count)
                out = einsum(experts, rows_ND, pairs, min(capacity, rows_ND.shape[0]))
            return out.astype(rows_ND.dtype)

    def terms(
        self, params: Params, rows_ND: Float[Array, "N D"], ids_NK: Int[Array, "N K"], weights_NK: Float[Array, "N K"]
    ) -> Float[Array, "N K D"] | None:
        """Return the weighted result of each expert of a row, 0 for id -1; None if rows do not go through the native kernel."""
        if not self.is_native(rows_ND.dtype):
            return None
        experts = Experts(params, self.weight_dtype, rows_ND.dtype, self.scheme, self.limit, self.depth_last)
        return self._native(experts, rows_ND, ids_NK, weights_NK, terms=True)

    def is_native(self, dtype: np.dtype) -> bool:
        """Whether rows of ``dtype`` go through the native kernel."""
        native = self.kernels.name("experts") == "native" and dtype == jnp.float32
        # The kernel quantises rows only for FP8 and packed weights.
        can_quantise = not self.scheme.dynamic or self.weight_dtype in (fp8.E4M3, PACKED)
        return native and can_quantise and self.implementation == "auto"

    def together(
        self,
        params: Params,
        rows_ND: Float[Array, "N D"],
        slots_NK: Int[Array, "N K"],
        weights_NK: Float[Array, "N K"],
        place: Int[Array, ""],
        group: Int[Array, ""],
        *,
        ranks: int,
        held: int,
    ) -> tuple[Float[Array, "N D"], Int[Array, "X"], Int[Array, ""]]:
        """Like ``__call__``, over the experts of ``ranks`` devices in shared memory. See ``NativeKernels.experts_together``."""
        experts = Experts(params, self.weight_dtype, rows_ND.dtype, self.scheme, self.limit, self.depth_last)
        options = self._native_options(experts)
        rows_ND = self._rounded(rows_ND, options["hidden"])
        sizes = {"ranks": ranks, "held": held}
        arguments = experts.stack(), experts.layer, rows_ND, slots_NK, weights_NK, place, group
        return self.kernels.native.experts_together(*arguments, **sizes, **options)

    def _native(self, experts: Experts, rows_ND, ids_NK, weights_NK, terms: bool = False) -> Array:
        """Apply experts with the native kernel. terms: return each expert's result ``[N, K, D]`` instead of their sum."""
        options = self._native_options(experts)
        # Rows sent in FP8 are already rounded.
        if not (options["hidden"] == "fp8" and isinstance(rows_ND, PackedRows) and rows_ND.wire.fp8):
            rows_ND = self._rounded(rows_ND, options["hidden"])
        if isinstance(rows_ND, PackedRows):
            # A packed float32 row begins with its values, so the kernel reads the rows that it needs in place.
            rows_ND = rows_ND.words_NW if not rows_ND.wire.fp8 else rows_ND.take(jnp.arange(rows_ND.shape[0]))
        return self.kernels.native.experts(
            experts.stack(), experts.layer, rows_ND, ids_NK, weights_NK, terms=terms, **options
        )

    def _native_options(self, experts: Experts) -> dict[str, int | str | bool]:
        depth = experts.stack()["down.weight"].shape[2] * (2 if experts.fp4 is not None else 1)  # FP4: two a byte
        return {
            "pieces": pieces_here(depth * self.width_shares, self.width_shares),
            "fp4_block": experts.fp4.block if experts.fp4 is not None else 0,
            "hidden": (self.scheme.experts or "fp8") if self.scheme.dynamic else "float32",  # format of hidden values
            "powers": self.scheme.powers,
            "limit": self.limit,
        }

    def _rounded(self, rows_ND, hidden: str):
        """Round rows to the format ``hidden``, to which the kernel also rounds the experts' hidden values."""
        if hidden == "float32":
            return rows_ND
        rows_ND = rows_ND.take(jnp.arange(rows_ND.shape[0]), axis=0)
        return nvfp4_rows.round_trip(rows_ND) if hidden == "nvfp4" else fp8.dequantise(*self.scheme.quantise(rows_ND))

    def _pallas(self, experts: Experts, stack, rows_ND, ids_NK, weights_NK, mean_load: float) -> Float[Array, "N D"]:
        """Apply experts with the Triton kernels, in rounds of ``size`` sorted pairs. Even routing needs one round."""
        (N, K), X, interpret = ids_NK.shape, experts.count, self.kernels.pallas.interpret
        size = round_pairs(mean_load, X, N * min(K, X))
        own_load = min(mean_load, size / X)  # pairs per expert in a round
        pairs = sort_pairs(ids_NK, weights_NK, X)
        total = pairs.start_X[-1] + pairs.count_X[-1]  # pairs with an expert
        place_NK = jnp.zeros((N * K,), jnp.int32).at[pairs.pair_P].set(jnp.arange(N * K), unique_indices=True)
        place_NK = place_NK.reshape(N, K)  # index of each pair after sorting
        # Padding keeps the last round's slice from being clamped and gives the last tile all its rows.
        row_P = jnp.pad(pairs.row_P, (0, size + SLACK))

        def one_round(r: Array | int, out_ND: Array | None = None) -> Float[Array, "N D"]:
            first = r * size
            start_X = jnp.clip(pairs.start_X - first, 0, size)
            count_X = jnp.clip(pairs.start_X + pairs.count_X - first, 0, size) - start_X
            groups = Groups(start_X, count_X, own_load)
            x_PD = self._rows(rows_ND, lax.dynamic_slice_in_dim(row_P, first, size + SLACK))
            gate_options = {"powers": self.scheme.powers, "limit": self.limit}
            options = {"dtype": rows_ND.dtype, "interpret": interpret, "cores": self.kernels.pallas.cores}
            if experts.fp4 is not None:
                run_gate_up, run_down = fp4_products.gate_up, fp4_products.down
                weights = {name: (experts.fp4_stack(name), experts.fp4) for name in ("gate_up", "down")}
            else:
                run_gate_up, run_down = gate_up, down
                weights = {name: self._weights(stack, name) for name in ("gate_up", "down")}
                options |= {"tiles": self.kernels.pallas.tiles, "depth_last": self.depth_last}
            hidden_PF = run_gate_up(*weights["gate_up"], experts.layer, x_PD, groups, **gate_options, **options)
            y_PD = run_down(*weights["down"], experts.layer, hidden_PF, groups, **options)
            place = place_NK - first
            place = jnp.where((place >= 0) & (place < jnp.minimum(total - first, size)), place, -1)  # -1: not here
            round_ND = combine(y_PD, place, weights_NK, own_load * X, interpret=interpret)
            return round_ND if out_ND is None else out_ND + round_ND

        out_ND = one_round(0)
        if size < N * min(K, X):
            out_ND = lax.fori_loop(1, -(-total // size), one_round, out_ND)
        return out_ND

    def _mosaic(self, experts: Experts, stack, rows_ND, ids_NK, weights_NK, mean_load: float) -> Float[Array, "N D"]:
        """Apply experts with the TPU kernels, in rounds as above. Each expert starts a new tile; XLA adds each result to its row."""
        (N, K), X = ids_NK.shape, experts.count
        size = round_pairs(mean_load, X, N * min(K, X))
        own_load = min(mean_load, size / X)
        tile_sizes = tpu_products.TpuProductTiles.for_load(own_load)
        pairs = sort_pairs(ids_NK, weights_NK, X)
        options = {"mean_load": own_load, "tiles": tile_sizes, "interpret": self.kernels.pallas.interpret}

        def one_round(r: Array | int, out_ND: Array) -> Array:
            start_X = jnp.clip(pairs.start_X, r * size, (r + 1) * size)
            count_X = jnp.clip(pairs.start_X + pairs.count_X, r * size, (r + 1) * size) - start_X
            placed = tpu_products.tile_pairs(start_X, count_X, size, tile_sizes.rows)
            row_S = pairs.row_P.at[placed.pair_S].get(mode="promise_in_bounds")
            weight_S = pairs.weight_P.at[placed.pair_S].get(mode="promise_in_bounds")
            x_SD = rows_ND.take(row_S, axis=0, mode="clip")
            w_gate_up, w_down = (tpu_products.Stack(*self._weights(stack, name)) for name in ("gate_up", "down"))
            hidden_SF = tpu_products.gate_up(w_gate_up, experts.layer, x_SD, placed, limit=self.limit, **options)
            y_SD = tpu_products.down(w_down, experts.layer, hidden_SF, placed, **options)
            y_SD = jnp.where(placed.used_S[:, None], y_SD * weight_S[:, None], 0)
            return out_ND.at[row_S].add(y_SD, mode="promise_in_bounds")

        out_ND = one_round(0, jnp.zeros(rows_ND.shape, jnp.float32))
        if size < N * min(K, X):
            rounds = -(-(pairs.start_X[-1] + pairs.count_X[-1]) // size)
            out_ND = lax.fori_loop(1, rounds, one_round, out_ND)
        return out_ND.astype(rows_ND.dtype)

    def _rows(self, rows_ND, index_P: Int[Array, "P"]) -> Float[Array, "P D"] | fp8.Quantised:
        """Return the rows at `index_P` as input of the Triton kernels. A dynamic scheme quantises them, unless they were sent in FP8."""
        if self.scheme == ActivationScheme(dynamic=True) and isinstance(rows_ND, PackedRows) and rows_ND.wire.fp8:
            return rows_ND.take_quantised(index_P)
        x_PD = rows_ND.take(index_P, axis=0, mode="clip")
        if not self.scheme.dynamic:
            return x_PD
        return activations.quantise(x_PD, powers=self.scheme.powers, interpret=self.kernels.pallas.interpret)

    def _weights(self, stack: Mapping[str, Array], name: str):
        return stack[f"{name}.weight"], stack.get(f"{name}.scale"), self.weight_dtype


class SortedPairs(NamedTuple):
    """All P = N × K (row, expert) pairs sorted by expert, rows ascending within an expert; pairs without an expert are last."""

    pair_P: Int[Array, "P"]  # index of each pair before sorting
    row_P: Int[Array, "P"]  # its row
    weight_P: Float[Array, "P"]  # its routing weight
    start_X: Int[Array, "X"]  # first pair of each expert
    count_X: Int[Array, "X"]  # number of pairs of each expert


def sort_pairs(ids_NK: Int[Array, "N K"], weights_NK: Float[Array, "N K"], experts: int) -> SortedPairs:
    """Sort pairs by keys of expert and index. On CPU this takes a sixth of an ``argsort`` (2,048 pairs: 42 instead of 240 µs)."""
    pairs = ids_NK.size
    if (experts + 1) * pairs >= 2**32:
        raise ValueError(f"{pairs} pairs of {experts} experts do not fit a 32-bit sort key; dispatch in smaller chunks")
    expert_P = jnp.where(ids_NK < 0, experts, ids_NK).reshape(-1)
    key_P = expert_P.astype(jnp.uint32) * pairs + lax.iota(jnp.uint32, pairs)
    pair_P = (lax.sort(key_P, is_stable=False) % pairs).astype(jnp.int32)
    count_X = (
        jnp.zeros((experts + 1,), jnp.int32)
        .at[expert_P]
        .add(1, mode="promise_in_bounds", wrap_negative_indices=False)[:experts]
    )
    weight_P = take(weights_NK.reshape(-1), pair_P).astype(jnp.float32)
    return SortedPairs(pair_P, lax.div(pair_P, ids_NK.shape[1]), weight_P, jnp.cumsum(count_X) - count_X, count_X)


def tiles(experts: Experts, rows_ND: Float[Array, "N D"], pairs: SortedPairs, tile: int) -> Float[Array, "N D"]:
    """Loop over tiles of ``tile`` pairs, each of one expert. The trip count is the number of tiles in use.

    For any routing, the extra work is at most one tile per expert, and no array of size P × D is allocated.
    """
    next_tile_X = jnp.cumsum(lax.div(pairs.count_X + (tile - 1), tile))  # tile after the last one of each expert
    row_P = jnp.pad(pairs.row_P, (0, tile))  # keeps the last tile's slice from being clamped
    weight_P = jnp.pad(pairs.weight_P, (0, tile))

    def one_tile(t: Array, out_ND: Array) -> Array:
        expert = jnp.sum(next_tile_X <= t)
        offset = (t - jnp.where(expert > 0, pick(next_tile_X, jnp.maximum(expert - 1, 0)), 0)) * tile
        first_pair = pick(pairs.start_X, expert) + offset
        rows_C = cut(row_P, first_pair, tile)
        used_C = offset + jnp.arange(tile) < pick(pairs.count_X, expert)
        x_CD = rows_ND.take(rows_C, axis=0, mode="clip")
        y_CD = experts.swiglu(x_CD, expert) * cut(weight_P, first_pair, tile)[:, None]
        y_CD = jnp.where(used_C[:, None], y_CD, 0)
        return out_ND.at[rows_C].add(y_CD, mode="promise_in_bounds", wrap_negative_indices=False)

    return lax.fori_loop(0, next_tile_X[-1], one_tile, jnp.zeros(rows_ND.shape, jnp.float32))


def einsum(experts: Experts, rows_ND: Float[Array, "N D"], pairs: SortedPairs, capacity: int) -> Float[Array, "N D"]:
    """Run batched products of all experts with ``capacity`` rows each, in as many rounds as the most loaded expert needs."""
    if not experts.scheme.dynamic:
        apply = partial(swiglu, **dict(zip(("gate_up", "down"), experts.matrices(), strict=True)), limit=experts.limit)
    else:
        apply = experts.swiglu

    def one_round(r: Array | int, out_ND: Array) -> Array:
        place_C = r * capacity + jnp.arange(capacity)  # indices among the pairs of each expert
        used_XC = place_C < pairs.count_X[:, None]
        pair_XC = jnp.where(used_XC, pairs.start_X[:, None] + place_C, 0)
        row_XC = pairs.row_P.at[pair_XC].get(mode="promise_in_bounds")
        x_XCD = rows_ND.take(row_XC, axis=0, mode="clip")
        weight_XC = pairs.weight_P.at[pair_XC].get(mode="promise_in_bounds")
        y_XCD = apply(x_XCD) * weight_XC[:, :, None]
        return out_ND.at[row_XC].add(jnp.where(used_XC[:, :, None], y_XCD, 0), mode="promise_in_bounds")

    out_ND = one_round(0, jnp.zeros(rows_ND.shape, jnp.float32))
    if capacity >= rows_ND.shape[0]:  # a row uses an expert at most once
        return out_ND
    rounds = -(-jnp.max(pairs.count_X) // capacity)
    return lax.fori_loop(1, rounds, one_round, out_ND)


def default_tile(mean_load: float) -> int:
    """Return the rows of a tile: 4 to 64, by an expert's mean number of pairs (CPU: docs/measurements/2026-11-22-grouped-products.csv).

    A tile costs a copy of its expert's weights and the product of all its rows, used or not, so few rows suit small tiles.
    """
    return next((tile for tile, most in ((4, 1), (8, 8), (16, 64), (32, 256)) if mean_load <= most), 64)


def default_capacity(mean_load: float, experts: int) -> int:
    """Return rows per expert of an ``einsum`` round: the mean load plus four standard deviations, rounded up to a multiple of 8.

    A second round, which reads all weights again, is then rare under even routing. A round has at most ``ROUND_ROWS`` rows in total
    to bound its buffers; with that many rows per expert, reading the weights again costs comparatively little.
    """
    enough = 8 * math.ceil((mean_load + 4 * mean_load**0.5) / 8)
    return min(enough, max(8, ROUND_ROWS // experts))
