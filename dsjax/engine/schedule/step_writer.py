"""`StepWriter`: turns a step's plan into a command with only the changes since the last step, and no request objects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

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
    """The executor's state of a slot. window_end: index of the page after its request's window pages."""

    request: Request | None = None
    admission: int = 0
    pages: int = 0
    window_end: int = 0


_UNKNOWN = _KnownSlot()


class StepWriter:
    """Turns plans into commands, each once and in order. Tracks the executor's state of each slot.

    ring: (first, count) of the page-table columns that window pages use as a ring buffer, for models with window pages.
    """

    def __init__(self, num_ranks: int, page_size: int, ring: tuple[int, int] = (0, 0)):
        self._page_size, self._ring = page_size, ring
        self._known: list[dict[int, _KnownSlot]] = [{} for _ in range(num_ranks)]  # by rank, then by slot

    def write(self, plan: StepPlan) -> Step:
        """Return the step's command."""
        ranks = [self._write_rank(index, rank, plan.num_drafts) for index, rank in enumerate(plan.ranks)]
        return Step(ranks, plan.num_drafts, plan.num_drafts or plan.after_prompts)

    def copies(self, plan: StepPlan) -> Copy | None:
        """Return the page copies to execute before the step; None if there are none."""
        if not any(rank.copies for rank in plan.ranks):
            return None
        return Copy([int32s(page for pair in rank.copies for page in pair) for rank in plan.ranks])

    def reset(self) -> None:
        """Forget the state of all slots, because the executor has lost it."""
        for slots in self._known:
            slots.clear()

    def _write_rank(self, index: int, rank: RankPlan, num_drafts: int) -> RankStep:
        admissions, changes, guides, decodes = list[Admission](), list[PageChange](), list[Guide](), list[int]()
        page_size = self._page_size
        for request, start, _, _ in rank.decodes:
            self._tell(index, request, start, admissions, changes)
            decodes += (request.slot, min(request.num_writable_pages * page_size, request.max_cached_tokens))
            if request.rules is not None:
                _guide(request, num_drafts, guides)
        prefills = []
        for row in rank.prefills:
            request, start, _, sampled = row
            self._tell(index, request, start, admissions, changes)
            prefills.append(self._prefill(row))
            if sampled and request.rules is not None:
                _guide(request, 0, guides)
        return RankStep(admissions, changes, int32s(decodes), prefills, guides)

    def _tell(
        self, rank: int, request: Request, start: int, admissions: list[Admission], changes: list[PageChange]
    ) -> None:
        """Add the changes of a row's slot: a new request's admission, and new pages."""
        slot, pages, slots = request.slot, request.pages, self._known[rank]
        owner, admission, known, known_windows = slots.get(slot, _UNKNOWN)
        if owner is not request or admission != request.admissions:
            admissions.append(_admission(request, start))
            known = known_windows = 0
        end = request.num_writable_pages if request.window_pages else 0
        if (known, known_windows) == (len(pages), end):
            return
        if known != len(pages):
            changes.append(PageChange(slot, known, pages[known:]))
        column, columns = self._ring
        for index in range(max(known_windows, request.first_window, end - columns), end):
            page = request.window_pages[index - request.first_window]
            changes.append(PageChange(slot, column + index % columns, [page]))
        slots[slot] = _KnownSlot(request, request.admissions, len(pages), end)

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
            min(request.num_writable_pages * self._page_size, request.max_cached_tokens),
            scored,
            request.params.prompt_logprobs or 0,
        )


def clear_command(dirty: Iterable[Iterable[int]]) -> Clear:
    """Return the command that zeroes pages. dirty: pages by rank."""
    return Clear([int32s(pages) for pages in dirty])


def _admission(request: Request, start: int) -> Admission:
    params, rules, of_rules = request.params, request.rules, ()
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
    if rules is not None:
        arrays = (rules.counts(request.prompt_token_ids, request.output_token_ids), rules.biases(), rules.allowed)
        of_rules = (*(b"" if one is None else one.astype("<i4").tobytes() for one in arrays), rules.needs_tokens)
    return Admission(request.slot, start, request.token_ids[start], sampling, *of_rules)


def _guide(request: Request, num_drafts: int, guides: list[Guide]) -> None:
    """Add the masks of a row whose rules depend on the generated tokens. All its tokens must be known."""
    if not request.rules.needs_tokens:
        return
    masks = request.rules.masks(request.output_token_ids, request.drafts[:num_drafts])
    guides.append(Guide(request.slot, masks.astype("<i4").tobytes()))
