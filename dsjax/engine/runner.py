"""``MeshRunner``: turns a scheduler's plan into launches of the compiled step on a mesh, and reads the tokens back."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from dsjax.engine import cache as device_cache
from dsjax.engine.buckets import Buckets, Launch, Rectangle
from dsjax.engine.expert_recorder import ExpertRecorder
from dsjax.engine.host_rows import HostRows
from dsjax.engine.plan import NO_TOKEN, Progress, RowResult, RunnerLimits, ScheduledRow, StepPlan
from dsjax.engine.programs import Programs
from dsjax.engine.row_sampler import RowSampler, read_score
from dsjax.engine.sampler import Scores
from dsjax.engine.stats import ExpertCounts, RunnerCounts
from dsjax.engine.tables import PageTables
from dsjax.model.step import Step


class PendingLaunch(NamedTuple):
    """A launch that the devices are computing: greedy tokens, logits, dispatch reports, scores if asked for, what is in it.

    placed: (rank, row, what) of its rows; num_tokens: token slots of a rank.
    """

    tokens: Array
    logits: Array
    reports: Mapping[str, Array]
    scores: Scores | None
    placed: list[tuple[int, int, ScheduledRow]]
    num_tokens: int


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
        self._sampler = RowSampler(self.programs, limits.num_ranks, limits.vocab_size)
        self._recorder = ExpertRecorder(step)
        self._padding = 0
        self._warm: frozenset[Hashable] | None = None

    def execute(self, plan: StepPlan) -> dict[str, RowResult]:
        """Compute a step; results by request id: of the rows that are sampled, of those that are not finite, and of those that
        score their prompt."""
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
        return RunnerCounts(self._padding, late, self._recorder.counts())

    def set_recording(self, on: bool) -> None:
        """Whether the experts' load is recorded from the next step on; turning it on begins anew. Compiles nothing."""
        self._recorder.on = on

    def expert_counts(self) -> ExpertCounts | None:
        """What was recorded since recording began; None while it is off, or the model has no experts."""
        return self._recorder.counts()

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
        one of these pages would fail too.
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
        scores: Scores | None = None
        if launch.scored:
            targets = jax.device_put(self._targets(launch), self.programs.rows)
            program = self.programs.scorer(launch.prefill)
            tokens, logits, self.cache, reports, scores = program(self.params, self.cache, packed, targets)
        else:
            tokens, logits, self.cache, reports = self.programs.step(shapes)(self.params, self.cache, packed)
        return PendingLaunch(tokens, logits, reports, scores, placed, sum(shape.tokens for shape in shapes))

    def _collect(self, pending: PendingLaunch, results: dict[str, RowResult]) -> None:
        jax.block_until_ready(pending.tokens)  # on all devices: reading them would wait for one of each tp group only
        self._recorder.add(pending.reports, pending.num_tokens)
        sampled = [(rank, row, what.request) for rank, row, what in pending.placed if what.sampled]
        found = self._sampler(pending.tokens, pending.logits, sampled)
        found |= self._not_finite(pending)
        if pending.scores is not None:
            self._add_scores(pending, found, results)
        results |= found
        failed = {request_id for request_id, result in found.items() if not result.finite}
        if failed:
            # Sealed pages were finite when computed, and others may read them.
            self.clear_pages(
                [
                    (rank, what.request.pages[what.request.num_sealed_pages :])
                    for rank, _, what in pending.placed
                    if what.request.request_id in failed
                ]
            )

    def _row_lists(self, launch: Launch):
        pairs = ((launch.decode, launch.decode_rows), (launch.prefill, launch.prefill_rows))
        return [rows for rectangle, rows in pairs if rectangle]

    def _not_finite(self, pending: PendingLaunch) -> dict[str, RowResult]:
        """Results of rows that are not sampled, but whose last token's logits show that they must not go on."""
        unsampled = [placed for placed in pending.placed if not placed[2].sampled]
        tokens = np.asarray(pending.tokens).tolist() if unsampled else []
        return {
            what.request.request_id: RowResult(NO_TOKEN, finite=False)
            for rank, row, what in unsampled
            if tokens[rank][row] < 0
        }

    def _targets(self, launch: Launch) -> np.ndarray:
        """``[B, C]``: the prompt's token after each position of a scored launch; −1 where there is none."""
        targets = np.full((self.limits.num_ranks, launch.prefill.chunk), -1, np.int32)
        for rank, rows in enumerate(launch.prefill_rows):
            for row in rows:
                after = _tokens_after(row)
                targets[rank, : len(after)] = after
        return targets

    def _add_scores(self, pending: PendingLaunch, found: dict[str, RowResult], results: dict[str, RowResult]) -> None:
        """Add prompt log-probabilities to what a scored launch found, behind those of the row's earlier pieces."""
        scores = jax.device_get(pending.scores)
        for rank, _, what in pending.placed:
            request_id, count = what.request.request_id, what.request.params.prompt_logprobs
            earlier, result = results.get(request_id), found.get(request_id, RowResult(NO_TOKEN))
            if earlier is not None and not earlier.finite:
                found[request_id] = earlier
            elif result.finite:
                entries = [read_score(scores, (rank, i), token, count) for i, token in enumerate(_tokens_after(what))]
                before = earlier.prompt_logprobs if earlier is not None else []
                found[request_id] = result._replace(prompt_logprobs=before + entries)


def _tokens_after(row: ScheduledRow) -> list[int]:
    """The prompt's tokens after the row's positions; one fewer than these at the prompt's end."""
    request, start, length = row
    return request.token_ids[start + 1 : min(start + length + 1, request.num_prompt_tokens)]
