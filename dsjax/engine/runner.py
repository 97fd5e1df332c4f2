"""``MeshRunner``: turns a scheduler's plan into launches of the compiled step on a mesh, and reads the tokens back."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from dsjax.engine import cache as device_cache
from dsjax.engine.buckets import Buckets, Launch, Rectangle
from dsjax.engine.host_rows import HostRows
from dsjax.engine.plan import NO_TOKEN, Progress, RowResult, RunnerLimits, ScheduledRow, StepPlan
from dsjax.engine.programs import Programs
from dsjax.engine.sampler import Sampled, SamplingRows, Wanted, needs_sampler
from dsjax.engine.stats import RunnerCounts
from dsjax.engine.tables import PageTables
from dsjax.model.step import Step


class PendingLaunch(NamedTuple):
    """A launch that the devices are computing: greedy tokens, logits, (rank, row, what) of its rows, rows of a rank."""

    tokens: Array
    logits: Array
    placed: list[tuple[int, int, ScheduledRow]]
    num_rows: int


class PendingStep(NamedTuple):
    """A step under way: its first launch, and those that follow when that is done."""

    first: PendingLaunch
    rest: list[Launch]


class MeshRunner:
    """Runs steps of one model on one mesh.

    Every shape is compiled by ``warm_up`` (or at first use), the cache is donated from step to step, and each launch is waited
    for before the next is enqueued: on emulated devices, programs in flight together can deadlock.
    """

    def __init__(self, step: Step, params: Mapping[str, Array], limits: RunnerLimits, buckets: Buckets):
        self.step, self.limits, self.buckets = step, limits, buckets
        self.params = {path: params[path] for path in step.table.infos}
        self.cache = device_cache.allocate(step, limits.pages_per_rank)
        self.programs = Programs(step, self.params, self.cache, limits)
        self._tables = PageTables(limits.num_ranks, limits.max_rows_decode, self.programs.max_pages)
        self._padding = 0
        self._warm: frozenset[Hashable] | None = None

    def execute(self, plan: StepPlan) -> dict[str, RowResult]:
        """Compute a step; results by request id, of the rows that are sampled and of those that are not finite."""
        return self.collect(self.launch(plan))

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start a step's first launch, and return while the device computes."""
        launches = self.buckets.launches(plan)
        slots = sum(rectangle.rows * rectangle.chunk for launch in launches for rectangle in launch[:2] if rectangle)
        self._padding = slots * self.limits.num_ranks - sum(rank.num_tokens for rank in plan.ranks)
        return PendingStep(self._launch(launches[0]), launches[1:])

    def collect(self, pending: PendingStep) -> dict[str, RowResult]:
        """Wait for a step, its further launches included; results as of ``execute``."""
        results: dict[str, RowResult] = {}
        self._collect(pending.first, results)
        for launch in pending.rest:
            self._collect(self._launch(launch), results)
        return results

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile every program that ``execute`` can ask for."""
        self.programs.warm_up(self.buckets, progress)
        self._warm = self.programs.compiled

    def counts(self) -> RunnerCounts:
        """What the last step and the programs count."""
        late = 0 if self._warm is None else len(self.programs.compiled - self._warm)
        return RunnerCounts(self._padding, late)

    def logits(self, token_ids: list[int], pages: list[int]) -> np.ndarray:
        """Float32 logits ``[tokens, V]`` of every position of one sequence, computed in chunks through ``pages`` of rank 0.

        Compiles a program of its own at first use.
        """
        chunk = self.buckets.prefill[0].chunk
        shapes = self.programs.shapes(None, Rectangle(1, chunk))
        found = []
        for start in range(0, len(token_ids), chunk):
            part = token_ids[start : start + chunk]
            group = HostRows(self.limits.num_ranks, shapes[0])
            group.tokens[0, 0, : len(part)] = part
            group.start[0, 0], group.length[0, 0] = start, len(part)
            group.tables[0, 0, : len(pages)] = pages
            packed = jax.device_put(group.pack(), self.programs.rows)
            every, self.cache = self.programs.every_token(shapes)(self.params, self.cache, packed)
            found.append(np.asarray(every[0])[: len(part)])
        return np.concatenate(found)

    def clear_pages(self, dirty: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Zero pages, given as (rank, its pages), that may hold values that are not finite.

        Attention weights the positions that a query does not see by 0, and 0 × NaN is NaN: the next request to get
        one of these pages would fail too. Compiles at first need, which healthy weights never have.
        """
        marked = np.zeros((self.limits.num_ranks, self.limits.pages_per_rank), bool)
        for rank, pages in dirty:
            marked[rank, pages] = True
        marked = jax.device_put(marked, self.programs.rows)
        self.cache = jax.block_until_ready(self.programs.scrub()(self.cache, marked))

    def shutdown(self) -> None:
        """Free the cache and drop the programs."""
        for array in self.cache.values():
            array.delete()
        self.programs.clear()

    def _launch(self, launch: Launch) -> PendingLaunch:
        shapes = self.programs.shapes(launch.decode, launch.prefill)
        parts, placed, first_row = [], [], 0
        for shape, rows in zip(shapes, self._row_lists(launch), strict=True):
            group = HostRows(self.limits.num_ranks, shape)
            group.fill(rows, self._tables)
            parts.append(group.pack())
            placed += [(rank, first_row + i, row) for rank, own in enumerate(rows) for i, row in enumerate(own)]
            first_row += shape.rows
        packed = jax.device_put(np.concatenate(parts, axis=1), self.programs.rows)
        tokens, logits, self.cache = self.programs.step(shapes)(self.params, self.cache, packed)
        return PendingLaunch(tokens, logits, placed, first_row)

    def _collect(self, pending: PendingLaunch, results: dict[str, RowResult]) -> None:
        tokens, logits, placed, num_rows = pending
        jax.block_until_ready(tokens)  # on all devices: reading the tokens would wait for one of each tp group only
        sampled = self._sample(logits, placed, num_rows)
        self._read(tokens, sampled, placed, results)
        # Sealed pages were finite when computed, and others may read them.
        failed = [
            (rank, row.request.pages[row.request.num_sealed_pages :])
            for rank, _, row in placed
            if (result := results.get(row.request.request_id)) and not result.finite
        ]
        if failed:
            self.clear_pages(failed)

    def _row_lists(self, launch: Launch):
        pairs = ((launch.decode, launch.decode_rows), (launch.prefill, launch.prefill_rows))
        return [rows for rectangle, rows in pairs if rectangle]

    def _sample(self, logits: Array, placed: list[tuple[int, int, ScheduledRow]], num_rows: int) -> Sampled | None:
        """Run the sampler if any row wants more than the greedy token."""
        wanting = [
            (rank, row, scheduled.request)
            for rank, row, scheduled in placed
            if scheduled.sampled and needs_sampler(scheduled.request)
        ]
        if not wanting:
            return None
        rows = SamplingRows.greedy(self.limits.num_ranks, num_rows)
        for rank, row, request in wanting:
            rows.set(rank, row, request)
        wanted = Wanted.by(request for _, _, request in wanting)
        inputs = jax.device_put((rows, wanted), (self.programs.rows, self.programs.everywhere))
        return self.programs.sampler(num_rows)(logits, *inputs)

    def _read(self, greedy_tokens: Array, sampled: Sampled | None, placed, results: dict[str, RowResult]) -> None:
        if sampled is None:
            host, tokens = None, np.asarray(greedy_tokens).tolist()
        else:
            host = jax.device_get(sampled)
            tokens = host.tokens.tolist()
        for rank, row, scheduled in placed:
            request, token = scheduled.request, tokens[rank][row]
            if token < 0:
                results[request.request_id] = RowResult(NO_TOKEN, finite=False)
            elif not scheduled.sampled:
                continue
            elif request.params.logprobs is None:
                results[request.request_id] = RowResult(token)
            else:
                count, at = request.params.logprobs, (rank, row)
                top = zip(host.top_tokens[at][:count].tolist(), host.top_logprobs[at][:count].tolist(), strict=True)
                results[request.request_id] = RowResult(
                    token, float(host.logprobs[at]), list(top), True, int(host.ranks[at])
                )
