"""The compiled programs of an engine: the step in every shape of its buckets, and the small ones beside it.

Parameters and cache may be arrays or ``jax.ShapeDtypeStruct`` with shardings: what is compiled is the same.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled, Lowered
from jaxtyping import Array

from dsjax.engine import cache as device_cache
from dsjax.engine.buckets import Buckets, Rectangle
from dsjax.engine.plan import Progress, RunnerLimits
from dsjax.engine.sampler import greedy
from dsjax.engine.sampling_programs import SamplingPrograms
from dsjax.model.attention import Cache
from dsjax.model.rows import GroupShape, last_tokens, unpack
from dsjax.model.step import Step


class Programs:
    """Each program is traced and compiled once, when it is first asked for or by ``warm_up``.

    rows, everywhere: shardings of what the host sends: one entry for each DP rank; the same on all devices.
    """

    def __init__(self, step: Step, params: Mapping[str, Array], cache: Cache, limits: RunnerLimits):
        # The dispatch always counts: that takes no collective, and recording the counts must not compile anything.
        step = dataclasses.replace(step, dispatch=dataclasses.replace(step.dispatch, report=True))
        self._step, self._params, self._limits = step, params, limits
        self._copies = step.placement.tables_of(step.config.num_moe_layers) if step.config.is_moe else None
        # The cache's arrays are donated by every step, so only their description may be kept.
        self._cache = {n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for n, a in cache.items()}
        self._sampling = SamplingPrograms(step, limits.num_ranks)
        self.rows, self.everywhere = self._sampling.rows, self._sampling.everywhere
        self.max_pages = -(-limits.max_model_len // limits.page_size)
        self._compiled: dict[Hashable, Compiled] = {}
        self._constants: dict[Hashable, Array] = {}

    @property
    def compiled(self) -> frozenset[Hashable]:
        """Keys of the programs that exist."""
        return frozenset(self._compiled)

    def shapes(self, decode: Rectangle | None, prefill: Rectangle | None) -> tuple[GroupShape, ...]:
        """The row groups of a launch."""
        forms = (self._step.decode_form, self._step.prefill_form)
        pairs = zip((decode, prefill), forms, strict=True)
        return tuple(GroupShape(r.rows, r.chunk, self.max_pages, form) for r, form in pairs if r)

    def step(self, shapes: tuple[GroupShape, ...]) -> Compiled:
        """``(params, cache, packed) -> (greedy tokens, logits, cache, dispatch reports)``; the cache is donated."""
        return self._get(("step", shapes), lambda: self.lower_step(shapes))

    def lower_step(self, shapes: tuple[GroupShape, ...]) -> Lowered:
        """The program of ``step``, traced but not compiled."""

        def run(params, cache, packed):
            groups = unpack(packed, shapes)
            hidden, cache, reports = self._step.hidden(params, cache, groups, self._copies)
            logits = self._step.logits(params, last_tokens(hidden, groups))
            return greedy(logits), logits, cache, reports

        return self._lower(run, shapes)

    def every_token(self, shapes: tuple[GroupShape, ...]) -> Compiled:
        """``(params, cache, packed) -> (logits of every token slot, cache)``; the cache is donated."""

        def run(params, cache, packed):
            hidden, cache, _ = self._step.hidden(params, cache, unpack(packed, shapes), self._copies)
            return self._step.logits(params, hidden), cache

        return self._get(("every token", shapes), lambda: self._lower(run, shapes))

    def scorer(self, rectangle: Rectangle) -> Compiled:
        """``(params, cache, packed, targets) -> (greedy tokens, logits, cache, dispatch reports, Scores)`` for one row a rank.

        What ``step`` gives, and scores of the tokens ``targets [B, C]`` at each position. The cache is donated.
        """
        return self._get(("scorer", rectangle), lambda: self._lower_scorer(rectangle))

    def change(self, num_rows: int) -> Compiled:
        """``(logits, Penalties, edits, mask) -> logits``."""
        return self._get(("change", num_rows), lambda: self._sampling.change(num_rows))

    def sampler(self, num_rows: int) -> Compiled:
        """``(logits, changed logits, SamplingRows, Wanted) -> Sampled``."""
        return self._get(("sampler", num_rows), lambda: self._sampling.sampler(num_rows))

    def no_edits(self, num_rows: int) -> Array:
        """Edits that change nothing, on the devices."""
        return self._constant(("edits", num_rows), lambda: self._sampling.no_edits(num_rows))

    def no_mask(self, num_rows: int) -> Array:
        """A mask that allows everything, on the devices."""
        return self._constant(("mask", num_rows), lambda: self._sampling.no_mask(num_rows))

    def scrub(self) -> Compiled:
        """``(cache, dirty pages) -> cache`` with those pages zeroed."""
        return self._get(("scrub",), self._lower_scrub)

    def warm_up(self, buckets: Buckets, progress: Progress | None = None) -> None:
        """Compile all that ``buckets`` can ask for: traced here one by one, compiled on all cores at once."""
        pairs = buckets.shapes()
        rows = sorted({sum(r.rows for r in pair if r) for pair in pairs} | {buckets.scored.rows})
        work: list[tuple[Hashable, str, Callable[[], Lowered]]] = []
        for pair in pairs:
            shapes = self.shapes(*pair)
            work.append((("step", shapes), _describe(*pair), lambda shapes=shapes: self.lower_step(shapes)))
        for count in rows:
            lower = lambda count=count: self._sampling.sampler(count)  # noqa: E731
            work.append((("sampler", count), f"sampler, {count} rows", lower))
            lower = lambda count=count: self._sampling.change(count)  # noqa: E731
            work.append((("change", count), f"logit changes, {count} rows", lower))
            self.no_edits(count), self.no_mask(count)
        scorer = ("scorer", buckets.scored)
        work.append((scorer, f"prompt scores, {buckets.scored.chunk}", lambda: self._lower_scorer(buckets.scored)))
        work.append((("scrub",), "clearing pages", self._lower_scrub))
        report = progress or (lambda done, total, label: None)
        report(0, len(work), work[0][1])
        pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="compile")
        try:
            missing = [entry for entry in work if entry[0] not in self._compiled]
            pending = {pool.submit(lower().compile): (key, label) for key, label, lower in missing}
            for done, future in enumerate(as_completed(pending), len(work) - len(missing) + 1):
                key, label = pending[future]
                self._compiled[key] = future.result()
                report(done, len(work), label)
        finally:
            # An interrupt must not wait for what is queued.
            pool.shutdown(wait=False, cancel_futures=True)

    def clear(self) -> None:
        """Drop all programs."""
        self._compiled.clear()
        self._constants.clear()

    def _get(self, key: Hashable, lower: Callable[[], Lowered]) -> Compiled:
        if key not in self._compiled:
            self._compiled[key] = lower().compile()
        return self._compiled[key]

    def _constant(self, key: Hashable, make: Callable[[], Array]) -> Array:
        if key not in self._constants:
            self._constants[key] = make()
        return self._constants[key]

    def _lower_scorer(self, rectangle: Rectangle) -> Lowered:
        (shape,) = self.shapes(None, rectangle)

        def run(params, cache, packed, targets):
            groups = unpack(packed, (shape,))
            hidden, cache, reports = self._step.hidden(params, cache, groups, self._copies)
            logits = self._step.logits(params, hidden)
            last = jnp.maximum(groups[0].length - 1, 0)
            own = jnp.take_along_axis(logits, last[..., None], axis=1)
            return greedy(own), own, cache, reports, self._sampling.score(logits, targets)

        targets = jax.ShapeDtypeStruct((self._limits.num_ranks, rectangle.chunk), np.int32, sharding=self.rows)
        return self._lower(run, (shape,), targets)

    def _lower(self, function: Callable, shapes: tuple[GroupShape, ...], *more: jax.ShapeDtypeStruct) -> Lowered:
        width = sum(shape.packed_width for shape in shapes)
        packed = jax.ShapeDtypeStruct((self._limits.num_ranks, width), np.int32, sharding=self.rows)
        return jax.jit(function, donate_argnums=1).lower(self._params, self._cache, packed, *more)

    def _lower_scrub(self) -> Lowered:
        shardings = {name: array.sharding for name, array in self._cache.items()}
        shape = (self._limits.num_ranks, self._limits.pages_per_rank)
        dirty = jax.ShapeDtypeStruct(shape, bool, sharding=self.rows)
        clear = jax.jit(device_cache.clear_pages, donate_argnums=0, out_shardings=shardings)
        return clear.lower(self._cache, dirty)


def _describe(decode: Rectangle | None, prefill: Rectangle | None) -> str:
    parts = []
    if decode:
        parts.append(f"decode {decode.rows} rows")
    if prefill:
        parts.append(f"prefill {prefill.rows} × {prefill.chunk}")
    return " + ".join(parts)
