"""``MeshRunner``: turns a scheduler's plan into launches of the compiled step on a mesh, and reads the tokens back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from dsjax.engine import cache as device_cache
from dsjax.engine.buckets import Buckets, Launch, Rectangle
from dsjax.engine.plan import Progress, RowResult, RunnerLimits, ScheduledRow, StepPlan
from dsjax.engine.request import Request
from dsjax.engine.sampler import Sampled, SamplingRows, Wanted, greedy, needs_sampler, sample
from dsjax.engine.tables import PageTables
from dsjax.model.step import GroupShape, RowGroup, Step


class MeshRunner:
    """Runs steps of one model on one mesh.

    Every shape is compiled by ``warm_up`` (or at first use), the cache is donated from step to step, and each launch is waited
    for before the next is enqueued: on emulated devices, programs in flight together can deadlock.
    """

    def __init__(self, step: Step, params: Mapping[str, Array], limits: RunnerLimits, buckets: Buckets):
        self.step, self.limits, self.buckets = step, limits, buckets
        self.params = {path: params[path] for path in step.table.infos}
        self.cache = device_cache.allocate(step, limits.pages_per_rank)
        max_pages = -(-limits.max_model_len // limits.page_size)
        self._tables = PageTables(limits.num_ranks, limits.max_rows_decode, max_pages)
        self._rows = NamedSharding(step.mesh, P(step.spec.batch_axes))
        self._everywhere = NamedSharding(step.mesh, P())
        self._programs: dict[tuple, jax.stages.Compiled] = {}

    def execute(self, plan: StepPlan) -> dict[str, RowResult]:
        """Compute a step; results of the rows that are sampled, by request id."""
        results: dict[str, RowResult] = {}
        for launch in self.buckets.launches(plan):
            self._launch(launch, results)
        return results

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile every program that ``execute`` can ask for: traced here one by one, compiled on all cores at once."""
        shapes = self.buckets.shapes()
        rows = sorted({_rows_of(decode, prefill) for decode, prefill in shapes})
        work = [(_describe(*pair), lambda pair=pair: self._lower_step(self._shapes(*pair))) for pair in shapes]
        work += [(f"sampler, {count} rows", lambda count=count: self._lower_sampler(count)) for count in rows]
        report = progress or (lambda done, total, label: None)
        pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="compile")
        try:
            report(0, len(work), work[0][0])
            pending = {}
            for label, lower in work:
                key, lowered = lower()
                if lowered is not None:
                    pending[pool.submit(lowered.compile)] = (key, label)
            done = len(work) - len(pending)
            for future in as_completed(pending):
                key, label = pending[future]
                self._programs[key] = future.result()
                done += 1
                report(done, len(work), label)
        finally:
            # An interrupt must not wait for what is queued.
            pool.shutdown(wait=False, cancel_futures=True)

    def logits(self, token_ids: list[int], pages: list[int]) -> np.ndarray:
        """Float32 logits ``[tokens, V]`` of every position of one sequence, computed in chunks through ``pages`` of rank 0.

        Compiles a program of its own at first use.
        """
        chunk = self.buckets.prefill[0].chunk
        shapes = self._shapes(None, Rectangle(1, chunk))
        found = []
        for start in range(0, len(token_ids), chunk):
            part = token_ids[start : start + chunk]
            group = _HostGroup.empty(self.limits.num_ranks, shapes[0])
            group.tokens[0, 0, : len(part)] = part
            group.start[0, 0], group.length[0, 0] = start, len(part)
            group.tables[0, 0, : len(pages)] = pages
            packed = jax.device_put(group.pack(), self._rows)
            every, self.cache = self._every_token_program(shapes)(self.params, self.cache, packed)
            found.append(np.asarray(every[0])[: len(part)])
        return np.concatenate(found)

    def shutdown(self) -> None:
        """Free the cache and drop the programs."""
        for array in self.cache.values():
            array.delete()
        self._programs.clear()

    def _launch(self, launch: Launch, results: dict[str, RowResult]) -> None:
        shapes = self._shapes(launch.decode, launch.prefill)
        parts, placed, first_row = [], [], 0
        for shape, rows in zip(shapes, self._row_lists(launch), strict=True):
            group = _HostGroup.empty(self.limits.num_ranks, shape)
            group.fill(rows, self._tables)
            parts.append(group.pack())
            placed += [
                (rank, first_row + i, row) for rank, own in enumerate(rows) for i, row in enumerate(own) if row.sampled
            ]
            first_row += shape.rows
        packed = jax.device_put(np.concatenate(parts, axis=1), self._rows)
        tokens, logits, self.cache = self._step_program(shapes)(self.params, self.cache, packed)
        jax.block_until_ready(tokens)  # on all devices: reading the tokens would wait for one of each tp group only
        sampled = self._sample(logits, placed, first_row)
        self._read(tokens, sampled, placed, results)
        failed = [(rank, row.request) for rank, _, row in placed if not results[row.request.request_id].finite]
        if failed:
            self._scrub(failed)

    def _row_lists(self, launch: Launch):
        pairs = ((launch.decode, launch.decode_rows), (launch.prefill, launch.prefill_rows))
        return [rows for rectangle, rows in pairs if rectangle]

    def _sample(self, logits: Array, placed: list[tuple[int, int, ScheduledRow]], num_rows: int) -> Sampled | None:
        """Run the sampler if any row wants more than the greedy token."""
        wanting = [
            (rank, row, scheduled.request) for rank, row, scheduled in placed if needs_sampler(scheduled.request)
        ]
        if not wanting:
            return None
        rows = SamplingRows.greedy(self.limits.num_ranks, num_rows)
        for rank, row, request in wanting:
            rows.set(rank, row, request)
        wanted = Wanted.by(request for _, _, request in wanting)
        inputs = jax.device_put((rows, wanted), (self._rows, self._everywhere))
        return self._sample_program(num_rows)(logits, *inputs)

    def _read(self, greedy_tokens: Array, sampled: Sampled | None, placed, results: dict[str, RowResult]) -> None:
        if sampled is None:
            host, tokens = None, np.asarray(greedy_tokens).tolist()
        else:
            host = jax.device_get(sampled)
            tokens = host.tokens.tolist()
        for rank, row, scheduled in placed:
            request, token = scheduled.request, tokens[rank][row]
            if token < 0:
                results[request.request_id] = RowResult(0, finite=False)
            elif request.params.logprobs is None:
                results[request.request_id] = RowResult(token)
            else:
                count, at = request.params.logprobs, (rank, row)
                top = zip(host.top_tokens[at][:count].tolist(), host.top_logprobs[at][:count].tolist(), strict=True)
                results[request.request_id] = RowResult(
                    token, float(host.logprobs[at]), list(top), True, int(host.ranks[at])
                )

    def _scrub(self, failed: list[tuple[int, Request]]) -> None:
        """Zero the pages of requests whose logits were not finite.

        Attention weights the positions that a query does not see by 0, and 0 × NaN is NaN: the next request to get
        one of these pages would fail too. Compiles at first need, which healthy weights never have.
        """
        dirty = np.zeros((self.limits.num_ranks, self.limits.pages_per_rank), bool)
        for rank, request in failed:
            dirty[rank, request.pages] = True
        program = self._compiled(*self._lower_scrub())
        self.cache = jax.block_until_ready(program(self.cache, jax.device_put(dirty, self._rows)))

    def _shapes(self, decode: Rectangle | None, prefill: Rectangle | None) -> tuple[GroupShape, ...]:
        forms = (self.step.decode_form, self.step.prefill_form)
        pages = self._tables.max_pages
        return tuple(
            GroupShape(rectangle.rows, rectangle.chunk, pages, form)
            for rectangle, form in zip((decode, prefill), forms, strict=True)
            if rectangle
        )

    def _step_program(self, shapes: tuple[GroupShape, ...]) -> jax.stages.Compiled:
        return self._compiled(*self._lower_step(shapes))

    def _sample_program(self, num_rows: int) -> jax.stages.Compiled:
        return self._compiled(*self._lower_sampler(num_rows))

    def _every_token_program(self, shapes: tuple[GroupShape, ...]) -> jax.stages.Compiled:
        def run(params, cache, packed):
            logits, cache, _ = self.step(params, cache, packed, shapes, every_token=True)
            return logits, cache

        return self._compiled(*self._lower(("every token", shapes), run, shapes))

    def _compiled(self, key: tuple, lowered: jax.stages.Lowered | None) -> jax.stages.Compiled:
        if lowered is not None:
            self._programs[key] = lowered.compile()
        return self._programs[key]

    def _lower_step(self, shapes: tuple[GroupShape, ...]) -> tuple[tuple, jax.stages.Lowered | None]:
        def run(params, cache, packed):
            logits, cache, _ = self.step(params, cache, packed, shapes)
            return greedy(logits), logits, cache

        return self._lower(("step", shapes), run, shapes)

    def _lower(self, key: tuple, function, shapes: tuple[GroupShape, ...]) -> tuple[tuple, jax.stages.Lowered | None]:
        """The program's key, and the program traced, or None where it is compiled already."""
        if key in self._programs:
            return key, None
        width = sum(shape.packed_width for shape in shapes)
        packed = jax.ShapeDtypeStruct((self.limits.num_ranks, width), np.int32, sharding=self._rows)
        return key, jax.jit(function, donate_argnums=1).lower(self.params, self.cache, packed)

    def _lower_scrub(self) -> tuple[tuple, jax.stages.Lowered | None]:
        key = ("scrub",)
        if key in self._programs:
            return key, None
        shardings = {name: array.sharding for name, array in self.cache.items()}
        dirty = jax.ShapeDtypeStruct((self.limits.num_ranks, self.limits.pages_per_rank), bool, sharding=self._rows)
        return key, jax.jit(device_cache.clear_pages, donate_argnums=0, out_shardings=shardings).lower(
            self.cache, dirty
        )

    def _lower_sampler(self, num_rows: int) -> tuple[tuple, jax.stages.Lowered | None]:
        key = ("sample", num_rows)
        if key in self._programs:
            return key, None
        step, mesh, ranks = self.step, self.step.mesh, self.limits.num_ranks
        vocab = NamedSharding(mesh, step.rules.spec(("ranks", None, "vocab")))
        logits = jax.ShapeDtypeStruct((ranks, num_rows, step.config.vocab_size), np.float32, sharding=vocab)
        rows = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self._rows), SamplingRows.greedy(ranks, num_rows)
        )
        wanted = Wanted(*[jax.ShapeDtypeStruct((), bool, sharding=self._everywhere)] * 2)
        # Each DP rank draws for its own rows; over tp, where the vocabulary is spread, all ranks draw the same.
        own, everywhere = P(step.spec.batch_axes), P()
        draw = jax.shard_map(sample, mesh=mesh, in_specs=(own, own, everywhere), out_specs=own, check_vma=False)
        return key, jax.jit(draw).lower(logits, rows, wanted)


class _HostGroup:
    """A row group being filled on the host."""

    def __init__(self, tokens, start, length, tables):
        self.tokens, self.start, self.length, self.tables = tokens, start, length, tables

    @classmethod
    def empty(cls, ranks: int, shape: GroupShape) -> _HostGroup:
        """All padding: length 0, page 0."""
        rows = (ranks, shape.rows)
        return cls(*(np.zeros(s, np.int32) for s in ((*rows, shape.chunk), rows, rows, (*rows, shape.pages))))

    def fill(self, rows: list, tables: PageTables) -> None:
        """Enter each rank's rows."""
        for rank, own in enumerate(rows):
            if not own:
                continue
            count = len(own)
            self.start[rank, :count] = [row.start for row in own]
            self.length[rank, :count] = [row.length for row in own]
            self.tables[rank, :count] = tables.rows(rank, [row.request for row in own])
            if self.tokens.shape[-1] == 1:
                self.tokens[rank, :count, 0] = [row.request.token_ids[row.start] for row in own]
                continue
            for i, (request, start, length) in enumerate(own):
                self.tokens[rank, i, :length] = request.token_ids[start : start + length]

    def pack(self) -> np.ndarray:
        return RowGroup.pack(self.tokens, self.start, self.length, self.tables)


def _rows_of(decode: Rectangle | None, prefill: Rectangle | None) -> int:
    return sum(rectangle.rows for rectangle in (decode, prefill) if rectangle)


def _describe(decode: Rectangle | None, prefill: Rectangle | None) -> str:
    parts = []
    if decode:
        parts.append(f"decode {decode.rows} rows")
    if prefill:
        parts.append(f"prefill {prefill.rows} × {prefill.chunk}")
    return " + ".join(parts)
