"""Whether runs with FP8 values differ only because a value lies on the edge between two FP8 numbers: ``check_layouts.py --edges``.

Two layouts, or two kernels, add the same numbers up in another order and agree to float32's rounding. Rounding to FP8 makes two
neighbouring FP8 numbers of two values that lie about the edge between them, however near they are.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator

import jax
import numpy as np
from layouts import Answer, difference

from dsjax.model.fp8_product import ActivationScheme
from sharding import fp8

NEAR = 64.0
"""Farthest, in 2⁻²³ of their largest value, that two blocks may lie apart for float32's rounding alone to be why."""


class Edges:
    """Asks of runs that differ from one device whether rounding to FP8 is why.

    one_device: makes the run on one device with the given options of FP8 values, as ``again`` of ``explain`` makes the run in question.
    kept: those options, with an activation scheme that rounds and a cache that does not.
    """

    def __init__(self, one_device: Callable[..., Answer], kept: dict[str, str]):
        self.one_device, self.kept = one_device, kept

    def explain(self, again: Callable[..., Answer], found: str) -> tuple[bool, str]:
        """Whether a rounding edge is why the run differs, and what to say of how it does (``found``).

        It is where the run equals one device once no activation is rounded, and where float32's rounding can have brought a block of
        one device (``NEAR``) over an edge.
        """
        left = difference(self.unrounded(again), self._exact)
        if left is not None:
            return False, f"{found}; without rounding to FP8 {left}"
        text, distance = nearest_edge(self._blocks(again), self._reference_blocks)
        found = f"{found}; without rounding to FP8 equal; {text}"
        if distance <= NEAR:
            return True, found
        return False, f"{found}; not a rounding edge, about which two blocks lie at most {NEAR:g} × 2⁻²³ apart"

    @functools.cached_property
    def _exact(self) -> Answer:
        return self.unrounded(self.one_device)

    @functools.cached_property
    def _reference_blocks(self) -> np.ndarray:
        return self._blocks(self.one_device)

    def unrounded(self, make: Callable[..., Answer]) -> Answer:
        """The run with float32 quotients in place of FP8 activations."""

        def quotients(self, x):
            scales = fp8.quantise(x, powers=self.powers).scales
            own = scales.repeat(fp8.BLOCK, axis=-1)[..., : x.shape[-1]]
            return fp8.Quantised(x.astype("float32") / own, scales)

        with self._replaced(ActivationScheme, "quantise", quotients):
            return make(**self.kept)

    def _blocks(self, make: Callable[..., Answer]) -> np.ndarray:
        """All blocks ``[n, 128]`` that the run quantises, each once, in float32."""
        rounded, met = fp8.quantise, set()

        def keep(x):
            x = np.asarray(x, np.float32)
            short = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % fp8.BLOCK)]
            met.update(block.tobytes() for block in np.pad(x, short).reshape(-1, fp8.BLOCK))

        def recorded(x, *, powers=False):
            jax.debug.callback(keep, x)
            return rounded(x, powers=powers)

        with self._replaced(fp8, "quantise", recorded):
            make(**self.kept)
            jax.effects_barrier()
        return np.stack([np.frombuffer(block, np.float32) for block in sorted(met)])

    @staticmethod
    @contextlib.contextmanager
    def _replaced(owner: object, name: str, function: Callable) -> Iterator[None]:
        kept = getattr(owner, name)
        setattr(owner, name, function)
        jax.clear_caches()  # what was traced with the other function
        try:
            yield
        finally:
            setattr(owner, name, kept)
            jax.clear_caches()


def nearest_edge(found: np.ndarray, reference: np.ndarray) -> tuple[str, float]:
    """Of two runs' blocks ``[n, 128]``, the nearest two that have different FP8 numbers, with the edge between them, in words; and their
    distance in 2⁻²³ of their largest value, infinite where no two such blocks are nearest to each other."""

    def rounded(blocks):
        values, scales = (np.asarray(array) for array in fp8.quantise(blocks))
        return values.astype(np.float32), blocks / scales

    # Squares in float64 find the nearest block to about 1e-8 of its values, a tenth of float32's last place.
    ours, theirs = found.astype(np.float64), reference.astype(np.float64)
    squares = (theirs**2).sum(axis=1)
    nearest = np.concatenate(
        [np.argmin(squares - 2 * part @ theirs.T, axis=1) for part in np.array_split(ours, -(-len(ours) // 1024))]
    )
    theirs = reference[nearest]
    largest = np.abs(theirs).max(axis=1)
    apart = np.abs(found - theirs).max(axis=1) / np.where(largest > 0, largest, 1) / np.finfo(np.float32).eps
    (our_values, our_quotients), (their_values, their_quotients) = rounded(found), rounded(theirs)
    other = (our_values != their_values).any(axis=1)
    if not other.any():
        return "each block has the FP8 numbers of the nearest of one device", math.inf
    first = np.flatnonzero(other)[np.argmin(apart[other])]
    at = np.flatnonzero(our_values[first] != their_values[first])[0]
    edge = (our_values[first, at] + their_values[first, at]) / 2
    distance = f"{apart[first]:.1f} × 2⁻²³ of their largest value"
    ours, theirs = f"{our_quotients[first, at]:.9g}", f"{their_quotients[first, at]:.9g}"
    return (
        f"{other.sum()} of {len(found)} blocks have other FP8 numbers than the nearest block of one device; in the two nearest of all, "
        f"which differ by {distance}, {ours} and {theirs} lie about the edge {edge:.9g} and become {our_values[first, at]:g} and "
        f"{their_values[first, at]:g}",
        float(apart[first]),
    )
