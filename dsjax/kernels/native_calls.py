"""The native kernels as functions of JAX arrays, for use inside ``jax.jit`` on the CPU platform, on one device's arrays."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

TARGETS = ("experts", "absorbed_attention", "expanded_attention")


@dataclass(frozen=True)
class NativeKernels:
    """A loaded library's kernels. ``threads``: most threads of a call; results do not depend on it.

    path: of the library. name: of it; that is part of the names that programs call the kernels by, so that a program from JAX's compilation
    cache never meets kernels of another version.
    """

    path: Path
    name: str
    threads: int

    @classmethod
    def load(cls, path: Path, threads: int) -> NativeKernels:
        """Load a library that ``build`` has found to work, and make its kernels known to XLA.

        Raises:
            Exception: it has changed since, or JAX does not take it; nothing of it is used then.
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
    ) -> Float[Array, "N D"]:
        """``out[n] = sum_k weights[n, k] * Expert_{ids[n, k]}(rows[n])`` in float32, ids -1 for none.

        stack: ``gate_up.weight [L, X, D, 2, F]`` and ``down.weight [L, X, F, D]`` in float32, or as the bits of bfloat16 or
            e4m3; for the last also ``gate_up.scale`` and ``down.scale``. rows: ``[N, W]`` of four-byte elements, whose first D
            columns are float32 (``PackedRows`` are read where they lie).
        """
        gate_up, down = stack["gate_up.weight"], stack["down.weight"]
        none = jnp.zeros((1,), jnp.float32)
        scales = (stack.get("gate_up.scale", none), stack.get("down.scale", none))
        out = jax.ShapeDtypeStruct((ids_NK.shape[0], gate_up.shape[2]), jnp.float32)
        _, X, D, _, F = gate_up.shape
        return self._call("experts", out, (X, D, F, *ids_NK.shape))(
            gate_up,
            down,
            *scales,
            layer.astype(jnp.int32),
            rows,
            ids_NK.astype(jnp.int32),
            weights_NK.astype(jnp.float32),
            threads=np.int64(self.threads),
        )[0]

    def absorbed_attention(self, *arguments, **settings) -> Float[Array, "R C H W"]:
        """Attention in latent space; arguments as ``_attention``. Without weights, queries and results are in latent space."""
        return self._attention("absorbed_attention", *arguments, **settings)

    def expanded_attention(self, *arguments, **settings) -> Float[Array, "R C H U"]:
        """Attention with keys and values expanded for each head, a block of the context at a time; arguments as ``_attention``."""
        return self._attention("expanded_attention", *arguments, **settings)

    def _attention(
        self,
        name: str,
        q_nope: Float[Array, "R C H N"],
        q_rope: Float[Array, "R C H O"],
        weights: Float[Array, "M H N+U"] | None,
        cache: Mapping[str, Array],
        layer: Int[Array, ""],
        start: Int[Array, "R"],
        length: Int[Array, "R"],
        tables: Int[Array, "R Pr"],
        filled: Bool[Array, "P G"] | None = None,
        *,
        scale: float,
        value_width: int,
        latent_width: int,
    ) -> Float[Array, "R C H W"]:
        """Causal attention of each row's queries at ``start …`` over the cache, ``length`` of them; zero for the rest.

        cache: ``latent [L, P, G, M]`` and ``rope [L, P, G, O]``, or ``joined [L, P, G, M + O]``; float32 or the bits of bfloat16.
            Or ``latent`` as the bits of e4m3, with ``scale [L, P, G, M / 128]``, and ``rope`` of bfloat16.
        filled: which cache slots hold something; a query sees those and its own. None: all do.
        scale: of the scores. value_width: U, the width of a result; latent_width: M.
        """
        latent, rope = (cache["joined"],) * 2 if "joined" in cache else (cache["latent"], cache["rope"])
        width = latent_width if weights is None else value_width
        out = jax.ShapeDtypeStruct((*q_rope.shape[:3], width), jnp.float32)
        absorbs, bytes_of = weights is not None, latent.dtype.itemsize
        sizes = (*q_nope.shape, q_rope.shape[3], value_width, latent_width, bytes_of, absorbs)
        return self._call(name, out, sizes)(
            q_nope,
            q_rope,
            jnp.zeros((1,), jnp.float32) if weights is None else weights,
            latent,
            rope,
            cache.get("scale", jnp.zeros((1,), jnp.float32)),
            layer.astype(jnp.int32),
            start.astype(jnp.int32),
            length.astype(jnp.int32),
            tables.astype(jnp.int32),
            jnp.ones((1,), jnp.uint8) if filled is None else filled.astype(jnp.uint8),
            threads=np.int64(self.threads),
            latent_width=np.int64(latent_width),
            scale=np.float32(scale),
        )[0]

    def _call(self, kernel: str, out: jax.ShapeDtypeStruct, sizes: tuple[int, ...]):
        """The custom call ``kernel``, whose second result is its working memory."""
        count = getattr(_library(self.path), f"dsjax_{kernel}_scratch")
        scratch = count(*(ctypes.c_int64(size) for size in (*sizes, self.threads)))
        return jax.ffi.ffi_call(_target(kernel, self.name), (out, jax.ShapeDtypeStruct((scratch,), jnp.uint8)))


@functools.cache
def _libraries() -> dict[str, ctypes.CDLL]:
    """The libraries of this process, by name."""
    return {}


def _library(path: Path) -> ctypes.CDLL:
    """The library at ``path``, its kernels registered with XLA, once in a process.

    A copy of a library that is loaded already is not loaded again: its name says that it is the same, and XLA refuses a second
    function under one name.
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
