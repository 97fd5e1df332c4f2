"""`StepWriter`: turns a step's plan into a command with only the changes since the last step, and no request objects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from dsjax.engine.contract.commands import (
    TOKEN_MADE,
    Admission,
    Clear,
    Copy,
    Guide,
    PageChange,
    PrefillRow,
    RankStep,
    Sampling,
    Step,
    int32s,
)
from dsjax.engine.schedule.request import RankPlan, Request, ScheduledRow, StepPlan


class _KnownSlot(NamedTuple):
    """The executor's state of a slot."""

    request: Request | None = None
    admission: int = 0
    num_pages: int = 0
    window_end: int = 0  # index of the page after its request's window pages


_UNKNOWN = _KnownSlot()


class StepWriter:
    """Turns plans into commands, each once and in order. Tracks the executor's state of each slot.

    ring: (first, count) of the page-table columns that window pages use as a ring buffer, for models with window pages.
    """

    def __init__(self, num_ranks: int, page_size: int, ring: tuple[int, int] = (0, 0)):
        self._page_size = page_size
        self._ring_first, self._ring_size = ring
        self._known: list[dict[int, _KnownSlot]] = [{} for _ in range(num_ranks)]  # by rank, then by slot

    def write(self, plan: StepPlan) -> Step:
        """Return the step's command."""
        ranks = [self._write_rank(self._known[index], rank, plan.num_drafts) for index, rank in enumerate(plan.ranks)]
        return Step(ranks, plan.num_drafts, plan.num_drafts or plan.after_prompts)

    def copy_command(self, plan: StepPlan) -> Copy | None:
        """Return the page copies to execute before the step; None if there are none."""
        if not any(rank.copies for rank in plan.ranks):
            return None
        return Copy([int32s(page for pair in rank.copies for page in pair) for rank in plan.ranks])

    def reset(self) -> None:
        """Forget the state of all slots, because the executor has lost it."""
        for slots in self._known:
            slots.clear()

    def _write_rank(self, slots: dict[int, _KnownSlot], rank: RankPlan, num_drafts: int) -> RankStep:
        decodes = int32s(number for row in rank.decodes for number in (row.request.slot, self._limit(row.request)))
        prefills = [self._prefill(row) for row in rank.prefills]
        step = RankStep(admissions=[], pages=[], decodes=decodes, prefills=prefills, guides=[])
        for row in (*rank.decodes, *rank.prefills):
            self._add_changes(slots, row, step)
        for row in rank.decodes:
            _add_guide(row.request, num_drafts, step)
        for row in rank.prefills:
            if row.sampled:
                _add_guide(row.request, 0, step)
        return step

    def _add_changes(self, slots: dict[int, _KnownSlot], row: ScheduledRow, step: RankStep) -> None:
        """Add what has changed in a row's slot: a new request's admission, and new pages."""
        request, slot = row.request, row.request.slot
        known = slots.get(slot, _UNKNOWN)
        if known.request is not request or known.admission != request.admissions:
            step.admissions.append(_admission(request, row.start))
            known = _UNKNOWN
        num_pages = len(request.pages)
        window_end = request.num_writable_pages if request.window_pages else 0
        if (known.num_pages, known.window_end) == (num_pages, window_end):
            return
        if known.num_pages != num_pages:
            step.pages.append(PageChange(slot, known.num_pages, request.pages[known.num_pages :]))
        # Skip new window pages that have been freed, or that the ring buffer overwrites.
        first_new = max(known.window_end, request.first_window, window_end - self._ring_size)
        for index in range(first_new, window_end):
            page = request.window_pages[index - request.first_window]
            step.pages.append(PageChange(slot, self._ring_first + index % self._ring_size, [page]))
        slots[slot] = _KnownSlot(request, request.admissions, num_pages, window_end)

    def _limit(self, request: Request) -> int:
        """Return the number of tokens that a request's pages can hold."""
        return min(request.num_writable_pages * self._page_size, request.max_cached_tokens)

    def _prefill(self, row: ScheduledRow) -> PrefillRow:
        request, start, length, sampled = row
        end, tokens = start + length, request.token_ids
        scored = 0
        if request.wants_prompt_logprobs and start < request.num_prompt_tokens - 1:
            scored = min(end, request.num_prompt_tokens - 1) - start
        return PrefillRow(
            request.slot,
            start,
            int32s(tokens[start:end]),
            TOKEN_MADE if sampled else tokens[end],
            self._limit(request),
            scored,
            request.params.prompt_logprobs or 0,
        )


def clear_command(dirty: Iterable[Iterable[int]]) -> Clear:
    """Return the command that zeroes pages. dirty: pages by rank."""
    return Clear([int32s(pages) for pages in dirty])


def _admission(request: Request, start: int) -> Admission:
    params, rules = request.params, request.rules
    sampling = Sampling(
        request.num_prompt_tokens,
        request.seed,
        0.0 if params.greedy else params.temperature,
        params.top_p,
        max(params.top_k, 0),
        params.min_p,
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty,
        -1 if params.logprobs is None else params.logprobs,
    )
    slot, token = request.slot, request.token_ids[start]
    if rules is None:
        return Admission(slot, start, token, sampling)
    counts = rules.counts(request.prompt_token_ids, request.output_token_ids)
    counts, biases, allowed = map(_int32_bytes, (counts, rules.biases(), rules.allowed))
    return Admission(slot, start, token, sampling, counts, biases, allowed, guided=rules.needs_tokens)


def _int32_bytes(array: np.ndarray | None) -> bytes:
    return b"" if array is None else array.astype("<i4").tobytes()


def _add_guide(request: Request, num_drafts: int, step: RankStep) -> None:
    """Add the masks of a row whose rules depend on the generated tokens. All its tokens must be known."""
    if request.rules is not None and request.rules.needs_tokens:
        masks = request.rules.masks(request.output_token_ids, request.drafts[:num_drafts])
        step.guides.append(Guide(request.slot, _int32_bytes(masks)))
