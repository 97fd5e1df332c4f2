"""The compiled programs of an engine: the step in every shape of its buckets, and the small ones beside it.

Parameters and cache may be arrays or ``jax.ShapeDtypeStruct`` with shardings: what is compiled is the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled, Lowered
from jaxtyping import Array

from dsjax.engine import cache as device_cache
from dsjax.engine.buckets import Buckets, Rectangle
from dsjax.engine.plan import Progress, RunnerLimits
from dsjax.engine.sampler import SamplingRows, Wanted, greedy, sample
from dsjax.model.attention import Cache
from dsjax.model.rows import GroupShape
from dsjax.model.step import Step


class Programs:
    """Each program is traced and compiled once, when it is first asked for or by ``warm_up``.

    rows, everywhere: shardings of what the host sends: one entry for each DP rank; the same on all devices.
    """

    def __init__(self, step: Step, params: Mapping[str, Array], cache: Cache, limits: RunnerLimits):
        self._step, self._params, self._limits = step, params, limits
        # The cache's arrays are donated by every step, so only their description may be kept.
        self._cache = {n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for n, a in cache.items()}
        self.rows = NamedSharding(step.mesh, P(step.spec.batch_axes))
        self.everywhere = NamedSharding(step.mesh, P())
        self.max_pages = -(-limits.max_model_len // limits.page_size)
        self._compiled: dict[Hashable, Compiled] = {}

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
        """``(params, cache, packed) -> (greedy tokens, logits, cache)``; the cache is donated."""
        return self._get(("step", shapes), lambda: self.lower_step(shapes))

    def lower_step(self, shapes: tuple[GroupShape, ...]) -> Lowered:
        """The program of ``step``, traced but not compiled."""

        def run(params, cache, packed):
            logits, cache, _ = self._step(params, cache, packed, shapes)
            return greedy(logits), logits, cache

        return self._lower(run, shapes)

    def every_token(self, shapes: tuple[GroupShape, ...]) -> Compiled:
        """``(params, cache, packed) -> (logits of every token slot, cache)``; the cache is donated."""

        def run(params, cache, packed):
            logits, cache, _ = self._step(params, cache, packed, shapes, every_token=True)
            return logits, cache

        return self._get(("every token", shapes), lambda: self._lower(run, shapes))

    def sampler(self, num_rows: int) -> Compiled:
        """``(logits, SamplingRows, Wanted) -> Sampled``."""
        return self._get(("sampler", num_rows), lambda: self._lower_sampler(num_rows))

    def scrub(self) -> Compiled:
        """``(cache, dirty pages) -> cache`` with those pages zeroed. Not warmed up: healthy weights never need it."""
        return self._get(("scrub",), self._lower_scrub)

    def warm_up(self, buckets: Buckets, progress: Progress | None = None) -> None:
        """Compile all that ``buckets`` can ask for: traced here one by one, compiled on all cores at once."""
        pairs = buckets.shapes()
        rows = sorted({sum(r.rows for r in pair if r) for pair in pairs})
        work: list[tuple[Hashable, str, Callable[[], Lowered]]] = []
        for pair in pairs:
            shapes = self.shapes(*pair)
            work.append((("step", shapes), _describe(*pair), lambda shapes=shapes: self.lower_step(shapes)))
        for count in rows:
            lower = lambda count=count: self._lower_sampler(count)  # noqa: E731
            work.append((("sampler", count), f"sampler, {count} rows", lower))
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

    def _get(self, key: Hashable, lower: Callable[[], Lowered]) -> Compiled:
        if key not in self._compiled:
            self._compiled[key] = lower().compile()
        return self._compiled[key]

    def _lower(self, function: Callable, shapes: tuple[GroupShape, ...]) -> Lowered:
        width = sum(shape.packed_width for shape in shapes)
        packed = jax.ShapeDtypeStruct((self._limits.num_ranks, width), np.int32, sharding=self.rows)
        return jax.jit(function, donate_argnums=1).lower(self._params, self._cache, packed)

    def _lower_scrub(self) -> Lowered:
        shardings = {name: array.sharding for name, array in self._cache.items()}
        shape = (self._limits.num_ranks, self._limits.pages_per_rank)
        dirty = jax.ShapeDtypeStruct(shape, bool, sharding=self.rows)
        clear = jax.jit(device_cache.clear_pages, donate_argnums=0, out_shardings=shardings)
        return clear.lower(self._cache, dirty)

    def _lower_sampler(self, num_rows: int) -> Lowered:
        step, mesh, ranks = self._step, self._step.mesh, self._limits.num_ranks
        vocab = NamedSharding(mesh, step.rules.spec(("ranks", None, "vocab")))
        logits = jax.ShapeDtypeStruct((ranks, num_rows, step.config.vocab_size), np.float32, sharding=vocab)
        rows = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self.rows), SamplingRows.greedy(ranks, num_rows)
        )
        wanted = Wanted(*[jax.ShapeDtypeStruct((), bool, sharding=self.everywhere)] * 2)
        # Each DP rank draws for its own rows; over tp, where the vocabulary is spread, all ranks draw the same.
        own, everywhere = P(step.spec.batch_axes), P()
        draw = jax.shard_map(sample, mesh=mesh, in_specs=(own, own, everywhere), out_specs=own, check_vma=False)
        return jax.jit(draw).lower(logits, rows, wanted)


def _describe(decode: Rectangle | None, prefill: Rectangle | None) -> str:
    parts = []
    if decode:
        parts.append(f"decode {decode.rows} rows")
    if prefill:
        parts.append(f"prefill {prefill.rows} × {prefill.chunk}")
    return " + ".join(parts)
