"""The native kernels as functions of JAX arrays, for use inside ``jax.jit`` on the CPU platform, on one device's arrays."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from sharding.cores import most_threads
from sharding.dispatch.group import Parts, places_in

TARGETS = (
    "experts", "experts_together", "dense", "norm", "router", "absorbed_attention", "expanded_attention", "index_choice",
    "compressed_attention", "streams", "streams_after", "exchange",
)  # fmt: skip
HIDDEN_FORMATS = ("float32", "fp8", "nvfp4")
"""Formats to which an expert's hidden values can be rounded, in the order of the enum ``Hidden`` in ``native/experts.h``."""

PATIENCE = 300
"""Seconds, as `--step-timeout`. Devices that share a few cores reach an exchange one by one, each after computing a whole layer."""


@dataclass(frozen=True)
class NativeKernels:
    """The kernels of a loaded library."""

    path: Path  # of the library
    # of the library; part of the kernels' names in XLA, so that a program in JAX's compilation cache never runs another version's kernels
    name: str
    threads: int  # maximum number of threads of a call; results do not depend on it
    # seconds within which all devices must reach an in-memory exchange; otherwise the program fails on those that have reached it
    patience: int = PATIENCE

    @classmethod
    def load(cls, path: Path, threads: int) -> NativeKernels:
        """Load a library that ``build`` has verified, and register its kernels with XLA.

        Raises:
            Exception: the library has changed since it was verified, or JAX rejects it. None of its kernels are used then.
        """
        _library(path.resolve())
        return cls(path.resolve(), path.stem, threads)

    def experts(
        self,
        stack: Mapping[str, Array],
        layer: Int[Array, ""],
        rows: Array,
        ids_NK: Int[Array, "N K"],
        weights_NK: Float[Array, "N K"],
        *,
        pieces: int = 1,
        terms: bool = False,
        fp4_block: int = 0,
        hidden: str = "float32",
        powers: bool = False,
        limit: float | None = None,
    ) -> Float[Array, "N D"] | Float[Array, "N K D"]:
        """Return ``out[n] = sum_k weights[n, k] * Expert_{ids[n, k]}(rows[n])`` in float32, added in the order of k. Id -1: no expert.

        stack: ``gate_up.weight [L, X, D, 2, F]`` and ``down.weight [L, X, F, D]``, which are float32; or the bits of bfloat16; or the bits
            of e4m3, with ``gate_up.scale`` and ``down.scale``; or packed, two values per byte along D of ``gate_up`` and F of ``down``,
            with scales (of two bytes for INT4), and for NVFP4 also ``gate_up.global_scale`` and ``down.global_scale``.
        layer: of the stack. rows: ``[N, W]`` of four-byte elements, whose first D columns are float32, so that ``PackedRows`` are read in
            place. They are not rounded.
        pieces: number of partial sums over F (``sharding.sums``). terms: return the terms over k, zero for no expert, instead of their sum.
        fp4_block: values that share a scale in a packed format; 0: not packed. limit: as in ``dsjax.kernels.gate.gated``.
        hidden: from ``HIDDEN_FORMATS``: ``fp8`` as in ``sharding.fp8.quantise`` with ``powers``, or ``nvfp4`` as in ``dsjax.fp4.rows``.
        """
        options = {"pieces": pieces, "fp4_block": fp4_block, "hidden": hidden, "powers": powers, "limit": limit}
        arguments, settings = _expert_inputs(stack, layer, rows, ids_NK, weights_NK, **options)
        gate_up, D = stack["gate_up.weight"], stack["down.weight"].shape[-1]
        out = jax.ShapeDtypeStruct((*ids_NK.shape, D) if terms else (ids_NK.shape[0], D), jnp.float32)
        sizes = (gate_up.shape[1], D, gate_up.shape[-1], *ids_NK.shape, gate_up.dtype.itemsize, terms)
        return self._call("experts", out, sizes, *arguments, **settings)[0]

    def experts_together(
        self,
        stack: Mapping[str, Array],
        layer: Int[Array, ""],
        rows: Float[Array, "N D"],
        ids_NK: Int[Array, "N K"],
        weights_NK: Float[Array, "N K"],
        place: Int[Array, ""],
        group: Int[Array, ""],
        *,
        ranks: int,
        held: int,
        **options: Any,
    ) -> tuple[Float[Array, "N D"], Int[Array, "X"], Int[Array, ""]]:
        """Compute ``experts`` on a group of ``ranks`` devices of this process without an exchange: they read each other's rows in place.

        ids_NK: ids over the experts of all devices, ``held`` per device; further experts in ``stack`` are not used. place: this device's
            index in its group. group: index of the group. Other arguments and options as in ``experts``.

        Returns the sums of this device's tokens; for each of its experts, the number of tokens from all devices; and the number of tokens
        that have any of these experts. Two such calls in a program with the same ``group`` must differ in N, unless the same devices make
        both, one after the other.
        """
        arguments, settings = _expert_inputs(stack, layer, rows, ids_NK, weights_NK, **options)
        (N, K), D = ids_NK.shape, stack["down.weight"].shape[-1]
        out = [jax.ShapeDtypeStruct((N, D), jnp.float32), jax.ShapeDtypeStruct((held + 1,), jnp.int32)]
        # `together`: most threads that compute for the group
        settings |= {"ranks": ranks, "held": held, "together": min(ranks, most_threads()), "patience": self.patience}
        sums, tokens = self._call("experts_together", out, (N, K, D), *arguments, place, group, **settings)
        return sums, tokens[:-1], tokens[-1]

    def dense(
        self,
        weight: Array,
        scale: Float[Array, "L ..."] | None,
        layer: Int[Array, ""],
        rows: Float[Array, "N K"],
        *,
        pieces: int = 1,
        transposed: bool = False,
        grouped: bool = False,
    ) -> Float[Array, "N *columns"]:
        """Return rows times one layer's matrix, in float32. A row's result is bitwise independent of the other rows and columns.

        weight: ``[L, K, J]`` or ``[L, K, 2, J]`` in float32, or as the bits of bfloat16 or e4m3. scale: for e4m3, one per 128 × 128 values.
        transposed: the weight is ``[L, J, K]``, and not in e4m3. pieces: number of partial sums over K (``sharding.sums``).
        grouped: rows ``[N, G, K]`` times ``[L, K, G, J]``, each group's values times its own columns, gives ``[N, G, J]``.
        """
        columns = (weight.shape[1],) if transposed else weight.shape[2:]
        out = jax.ShapeDtypeStruct((rows.shape[0], *columns), jnp.float32)
        arrays, settings = (weight, _or_empty(scale), layer.astype(jnp.int32), rows), {"transposed": transposed}
        return self._call("dense", out, (rows.shape[0],), *arrays, pieces=pieces, grouped=grouped, **settings)[0]

    def norm(
        self, rows: Float[Array, "N W"], scale: Float[Array, "W"], eps: float, bias: Float[Array, "W"] | None = None
    ) -> Float[Array, "N W"]:
        """Return RMS norms of rows: ``scale × (x / sqrt(mean(x²) + eps))``. A row's result is bitwise independent of the other rows.

        With a bias, return layer norms: ``x - mean(x)`` replaces x, and the bias is added.
        """
        out = jax.ShapeDtypeStruct(rows.shape, jnp.float32)
        return self._call("norm", out, (), rows, scale, _or_empty(bias), eps=float(eps))[0]

    def router(
        self,
        scores_NE: Float[Array, "N E"],
        bias_E: Float[Array, "E"] | None,
        k: int,
        *,
        groups: int,
        kept: int,
        best: int,
        normalised: bool,
        factor: float,
    ) -> tuple[Int[Array, "N k"], Float[Array, "N k"]]:
        """Return each row's ``k`` experts with the highest scores plus bias (best first, ties to the lower number) and their weights.

        groups: number of groups of experts; only experts of the ``kept`` best are chosen. A group's score is the sum of the ``best`` (1 or
            2) highest in it.
        normalised: divide the weights, which are the scores without bias, by their sum. factor: multiplies the weights.
        """
        shape = scores_NE.shape[0], k
        outs = [jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)]
        settings = {"groups": groups, "kept": kept, "best": best, "normalised": normalised, "factor": float(factor)}
        return self._call("router", outs, (scores_NE.shape[1], groups), scores_NE, _or_empty(bias_E), **settings)

    def exchange(
        self, rows_NW: Array, place: Int[Array, ""], group: Int[Array, ""], *, ranks: int, gathers: bool
    ) -> Array:
        """Exchange rows in memory between ``ranks`` devices of this process: ``all_gather`` or, in equal blocks, ``all_to_all``.

        place: this device's index in its group. group: index of the group. gathers: every device gets all rows, ``[ranks * N, W]``;
            otherwise block r of the N rows goes to device r, and block s of the result is from device s.

        Raises:
            ValueError: the rows do not form equal blocks. If two devices have the same place or a place is not in 0 to ``ranks - 1``, the
                program fails on every device of the group; if a device does not arrive in ``patience`` seconds, on all that have arrived.

        Two exchanges in a program with the same ``group`` must differ in the bytes of a block or in ``gathers``, unless the same devices
        make both, one after the other.
        """
        rows, *width = rows_NW.shape
        if not gathers and rows % ranks:
            raise ValueError(f"{rows} rows are exchanged between {ranks} devices; expected a multiple of {ranks}")
        out = jax.ShapeDtypeStruct((rows * ranks if gathers else rows, *width), rows_NW.dtype)
        settings = {"ranks": ranks, "gathers": gathers, "patience": self.patience}
        return self._call("exchange", out, (), rows_NW, place, group, **settings)[0]

    def index_choice(
        self,
        query: Float[Array, "R C I A"],
        weight: Float[Array, "R C I"],
        cache: Mapping[str, Array],
        layer: Int[Array, ""],
        positions: Int[Array, "R C"],
        tables: Int[Array, "R Pr"],
        filled: Bool[Array, "P G"] | None,
        k: int,
    ) -> tuple[Int[Array, "R C k"], Int[Array, "R C"], UInt32[Array, "R C _"]]:
        """Return the ``k`` positions of each query's context with the highest index scores, in ascending order and padded with zeros; their
        number; and the same choice as one bit per position.

        cache: ``index [L, P, G, A]`` in float32, as the bits of bfloat16, or of e4m3 with ``index_scale [L, P, G, A / 128]``; or
            ``index_packed [L, P, G, A / 2 + A / 32]``, bytes of ``dsjax.model.compressed.precision``. filled: as in ``attention``.
        """
        packed = "index_packed" in cache
        keys = cache["index_packed" if packed else "index"]
        (R, C, I, A), (Pr, G) = query.shape, (tables.shape[1], keys.shape[2])
        shapes = (((R, C, k), jnp.int32), ((R, C), jnp.int32), ((R, C, -(-Pr * G // 32)), jnp.uint32))
        outs = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
        scale, filled = _or_empty(cache.get("index_scale")), _or_empty(filled, jnp.uint8)
        rows = (array.astype(jnp.int32) for array in (layer, positions, tables))
        sizes = (R, C, I, A, Pr, G)
        return self._call("index_choice", outs, sizes, query, weight, keys, scale, *rows, filled, packed=packed)

    def attention(
        self,
        name: str,
        q_nope: Float[Array, "R C H N"],
        q_rope: Float[Array, "R C H O"],
        weights: Mapping[str, Array],
        index: Int[Array, ""],
        cache: Mapping[str, Array],
        layer: Int[Array, ""],
        start: Int[Array, "R"],
        length: Int[Array, "R"],
        tables: Int[Array, "R Pr"],
        filled: Bool[Array, "P G"] | None = None,
        chosen: UInt32[Array, "R C _"] | None = None,
        *,
        scale: float,
    ) -> Float[Array, "R C H U"]:
        """Return causal attention of each row's ``length`` queries from ``start`` on over the cache; zero for the other queries.

        weights: ``weight [L, M, H (N + U)]``, ``W^UK`` and ``W^UV`` side by side for each head, in float32, or as the bits of bfloat16 or
            e4m3; e4m3 also needs ``scale [L, M / 128, H (N + U) / 128]``. index: layer of the weights.
        name: ``absorbed_attention``, in latent space; or ``expanded_attention``, with each head's keys and values by blocks of the context.
        cache: ``latent [L, P, G, M]`` and ``rope [L, P, G, O]``, float32 or the bits of bfloat16. Or ``latent`` as the bits of e4m3, with
            ``scale [L, P, G, M / 128]``, and ``rope`` of bfloat16.
        filled: which cache slots hold an entry; a query sees these and its own. None: all slots.
        chosen: only for expanded attention, one bit per position that a query attends to; None: all positions that it sees.
        scale: of the scores.
        """
        latent, (*lead, H, N) = cache["latent"], q_nope.shape
        U = weights["weight"].shape[-1] // H - N
        out = jax.ShapeDtypeStruct((*lead, H, U), jnp.float32)
        sizes = (*lead, H, N, q_rope.shape[-1], U, latent.shape[-1], latent.dtype.itemsize)
        own_weights = weights["weight"], _or_empty(weights.get("scale")), index.astype(jnp.int32)
        cached = latent, cache["rope"], _or_empty(cache.get("scale"))
        rows = (array.astype(jnp.int32) for array in (layer, start, length, tables))
        masks = _or_empty(filled, jnp.uint8), _or_empty(chosen, jnp.uint32)
        arrays = q_nope, q_rope, *own_weights, *cached, *rows, *masks
        return self._call(name, out, sizes, *arrays, scale=float(scale))[0]

    def compressed_attention(
        self,
        query: Float[Array, "R C H M"],
        sink: Float[Array, "H"],
        window: Shaped[Array, "L W G _"],
        entries: Shaped[Array, "L P E _"] | None,
        layers: tuple[Int[Array, ""], Int[Array, ""]],
        positions: Int[Array, "R C"],
        ring: Int[Array, "R Pw"],
        tables: Int[Array, "R Pr"],
        filled: Bool[Array, "W G"] | None,
        chosen: Int[Array, "R C k"] | None,
        count: Int[Array, "R C"],
        *,
        span: int,
        scale: float,
        rotated: int = 0,
    ) -> Float[Array, "R C H M"]:
        """Return attention to a sink, a window of ``span`` tokens and compressed entries (``dsjax/model/compressed``).

        window, entries: pages of vectors, each both the key and the value of the only head: M values in float32, or the bytes of FP8
            entries (``dsjax.model.compressed.precision``) with ``rotated`` rotated values, if ``rotated`` is not 0.
        layers: of ``window`` and of ``entries``. positions: a query at −1 gives zeros. tables: each row's pages of entries.
        ring: each row's window pages; position ``p`` lies on page ``p // G % Pw``. filled: as in ``attention``, for the window.
        count: number of entries that a query attends to. chosen: which ones, ascending; None: the first ``count``.
        """
        out = jax.ShapeDtypeStruct(query.shape, jnp.float32)
        rows = (array.astype(jnp.int32) for array in (*layers, positions, ring, tables))
        seen = _or_empty(filled, jnp.uint8), _or_empty(chosen, jnp.int32), count.astype(jnp.int32)
        arrays, sizes = (query, sink, window, _or_empty(entries), *rows, *seen), (*query.shape[2:], rotated)
        settings = {"span": span, "scale": float(scale), "rotated": rotated}
        return self._call("compressed_attention", out, sizes, *arrays, **settings)[0]

    def streams(
        self,
        x: Float[Array, "N n D"],
        weight: Float[Array, "nD w"],
        base: Float[Array, "w"],
        scale: Float[Array, "_"],
        *,
        rounds: int,
        norm_eps: float,
        eps: float,
    ) -> list[Array]:
        """Return a block's input ``[N, D]``, its output's weight in each stream ``[N, n]``, and the mixing ``[N, n, n]`` of the streams.

        With n columns of weights, return only the first, the sum after the last block. rounds: Sinkhorn–Knopp iterations.
        """
        (N, n, D), w = x.shape, weight.shape[1]
        shapes = ((N, D), (N, n), (N, n, n))[: 1 if w == n else 3]
        settings = {"rounds": rounds, "norm_eps": float(norm_eps), "eps": float(eps)}
        outs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        return self._call("streams", outs, (n, D, w), x, weight, base, scale, **settings)

    def streams_after(
        self,
        x: Float[Array, "N n D"],
        spread: Float[Array, "N n"],
        mixing: Float[Array, "N n n"],
        y: Float[Array, "N D"],
    ) -> Float[Array, "N n D"]:
        """Return the streams after a block with result ``y``: ``spread ⊗ y + mixingᵀ x``."""
        out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
        return self._call("streams_after", out, (), x, spread, mixing, y)[0]

    def _call(self, kernel: str, out, sizes: tuple[int, ...], *arrays: Array, **settings: bool | int | float):
        """Return the results of the custom call ``kernel``, described by ``out``, one or a list of ``jax.ShapeDtypeStruct``.

        sizes: what the size of its scratch memory depends on, which is the call's last result.
        """
        numbers = (ctypes.c_int64 * (len(sizes) + 1))(*sizes, self.threads)
        scratch = jax.ShapeDtypeStruct((getattr(_library(self.path), f"dsjax_{kernel}_scratch")(numbers),), jnp.uint8)
        call = jax.ffi.ffi_call(_target(kernel, self.name), (*(out if isinstance(out, list) else [out]), scratch))
        settings = {"threads": self.threads} | settings
        return call(*arrays, **{name: _scalar(value) for name, value in settings.items()})[:-1]


def _expert_inputs(
    stack, layer, rows, ids_NK, weights_NK, *, pieces=1, fp4_block=0, hidden="float32", powers=False, limit=None
):
    """Return the arguments and the settings that ``experts`` and ``experts_together`` have in common."""
    parts = ("weight", "scale", "global_scale")
    weights = [_or_empty(stack.get(f"{name}.{part}")) for part in parts for name in ("gate_up", "down")]
    routed = layer.astype(jnp.int32), rows, ids_NK.astype(jnp.int32), weights_NK.astype(jnp.float32)
    settings = {"pieces": pieces, "fp4_block": fp4_block, "powers": powers, "limit": float(limit or 0)}
    return (*weights, *routed), settings | {"hidden": HIDDEN_FORMATS.index(hidden)}


def _scalar(value: bool | int | float) -> bool | np.int64 | np.float32:
    if isinstance(value, bool):
        return value
    return np.float32(value) if isinstance(value, float) else np.int64(value)


def _or_empty(array: Array | None, dtype=None) -> Array:
    """Return an array as ``dtype``, or, for one that a kernel can do without, an array without elements."""
    if array is None:
        return jnp.zeros((0,), dtype or jnp.float32)
    return array if dtype is None else array.astype(dtype)


@dataclass(frozen=True)
class ExchangeInMemory:
    """``sharding.dispatch.group.InMemory`` with the native kernels: devices of this process exchange rows without a collective."""

    kernels: NativeKernels
    mesh_axes: tuple[str, ...]  # all axes of the mesh
    # whether the experts' kernels are native too, and can read the tokens of all ranks in place instead of exchanging them
    experts_read_tokens: bool = False

    def __call__(
        self, rows_NW: Array, axes: tuple[str, ...], ranks: int, gathers: bool, parts: Parts | None = None
    ) -> Array:
        """Inside ``shard_map``: exchange rows over ``axes``, which have ``ranks`` devices, or within ``parts`` of ``ranks`` devices."""
        group, place = self.meeting(axes)
        if parts is not None:
            # Other parts may share ranks with these and must have other numbers. No two parts share two ranks, so a part's first two
            # ranks identify it.
            size = len(parts) * ranks
            numbers = {rank: part[0] * size + part[1] for part in parts for rank in part}
            number = jnp.asarray([numbers[rank] for rank in range(size)], jnp.int32)[place]
            group += lax.axis_size(self._others(axes)) * number
            place = places_in(parts)[place]
        return self.kernels.exchange(rows_NW, place, group, ranks=ranks, gathers=gathers)

    def meeting(self, axes: tuple[str, ...]) -> tuple[Int[Array, ""], Int[Array, ""]]:
        """Inside ``shard_map``: return the number of this device's group along ``axes``, and its place in the group.

        Groups along different axes have different numbers, because a device may reach its next exchange, along other axes, while others
        are still at the previous one.
        """
        axes_number = sum(1 << i for i, axis in enumerate(self.mesh_axes) if axis in axes)
        # `__call__` adds less than the square of the number of all devices, for parts.
        first = axes_number * lax.axis_size(self.mesh_axes) ** 2
        return first + lax.axis_index(self._others(axes)), lax.axis_index(axes)

    def _others(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in self.mesh_axes if axis not in axes)


@functools.cache
def _libraries() -> dict[str, ctypes.CDLL]:
    """Return the loaded libraries of this process, by name."""
    return {}


def _library(path: Path) -> ctypes.CDLL:
    """Return the library at ``path``, with its kernels registered with XLA once per process.

    A copy of a loaded library is not loaded again: its name identifies its contents, and XLA refuses a second
    function of the same name.
    """
    if path.stem in _libraries():
        return _libraries()[path.stem]
    library = ctypes.CDLL(str(path))
    for kernel in TARGETS:
        capsule = jax.ffi.pycapsule(getattr(library, f"dsjax_{kernel}"))
        jax.ffi.register_ffi_target(_target(kernel, path.stem), capsule, platform="cpu")
        getattr(library, f"dsjax_{kernel}_scratch").restype = ctypes.c_int64
    _libraries()[path.stem] = library
    return library


def _target(kernel: str, name: str) -> str:
    return f"dsjax_{kernel}_{name}"
