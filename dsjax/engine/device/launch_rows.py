"""The host side of a launch, in NumPy: packs rows into integer inputs of programs, and collects sampling rules."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dsjax.engine.contract.commands import (
    ALWAYS,
    TOKEN_MADE,
    Admission,
    PrefillRow,
    RankStep,
    Sampling,
    Step,
)
from dsjax.engine.contract.executor import RankResults
from dsjax.engine.device.buckets import Launch, padded_pieces
from dsjax.engine.device.sampler import SamplingOps, bias_width, mask_words
from dsjax.engine.device.slots import (
    ADMISSION_WIDTH,
    ADMISSIONS,
    COUNTED,
    PAGE_CHANGES,
    LaunchShape,
)

PageEntry = tuple[int, int, int]
"""Slot, index in its page table, page."""


def split_page_changes(step: Step, room: int, num_pages: int) -> tuple[list[list[PageEntry]], list[list[PageEntry]]]:
    """Split each rank's page-table changes into changes made by the first launch and changes that must be made before it.

    room: changes per rank that the launch has room for. All changes of a slot assigned in this step are made before the launch.
    num_pages: first number of window pages, which page tables number from 0.
    """
    within, before = [], []
    for rank in step.ranks:
        admitted = {admission.slot for admission in rank.admissions}
        with_launch: list[PageEntry] = []
        ahead: list[PageEntry] = []
        for slot, first, pages in ((change.slot, change.first, change.pages) for change in rank.pages):
            numbers = pages if pages[0] < num_pages else [page - num_pages for page in pages]
            entries = [(slot, index, page) for index, page in enumerate(numbers, start=first)]
            fits = slot not in admitted and len(with_launch) + len(entries) <= room
            (with_launch if fits else ahead).extend(entries)
        within.append(with_launch)
        before.append(ahead)
    return within, before


def pack_admissions(step: Step, changes: list[list[PageEntry]]) -> Iterator[np.ndarray]:
    """Yield the ``[B, ADMIT_WIDTH]`` int32 inputs of the admission program's runs; none if there is nothing to do.

    An admission resets its slot, so page changes and counts start in the run with the last admissions.
    """
    if not any(changes) and not any(rank.admissions for rank in step.ranks):
        return
    admitted = [
        np.array([_admission(admission) for admission in rank.admissions], np.int32).reshape(-1, ADMISSION_WIDTH)
        for rank in step.ranks
    ]
    changed = [np.array(entries, np.int32).reshape(-1, 3) for entries in changes]
    counted = [
        np.concatenate(
            [
                np.insert(np.frombuffer(admission.counts, "<i4").reshape(-1, 2), 0, admission.slot, axis=1)
                for admission in rank.admissions
            ]
            or [np.zeros((0, 3), np.int32)]
        )
        for rank in step.ranks
    ]
    pieces, padding = [], []
    for ranks, size in ((admitted, ADMISSIONS), (changed, PAGE_CHANGES), (counted, COUNTED)):
        pieces.append([piece.reshape(len(ranks), -1) for piece in padded_pieces(ranks, size, -1)])
        padding.append(np.full((len(ranks), size * ranks[0].shape[1]), -1, np.int32))
    skipped = [None] * (len(pieces[0]) - 1)
    for parts in itertools.zip_longest(pieces[0], skipped + pieces[1], skipped + pieces[2]):
        yield np.concatenate(
            [empty if part is None else part for part, empty in zip(parts, padding, strict=True)], axis=1
        )


def pack_launch(
    step: Step, launch: Launch, shape: LaunchShape, changes: list[list[PageEntry]], most_drafts: list[dict[int, int]]
) -> np.ndarray:
    """Pack one launch's rows and page changes into ``[B, W]`` int32. most_drafts: for each rank, see ``SlotTable.most_drafts``."""
    ranks = len(step.ranks)
    (R, _), (R2, C2) = shape.decode_rows, shape.prefill_rows
    ends = [0, *itertools.accumulate((R, R, R, 5 * R2, R2 * C2, 3 * shape.page_changes))]
    packed = np.zeros((ranks, ends[-1]), np.int32)
    slot, limit, max_drafts, prefill, tokens, pages = (packed[:, first:end] for first, end in itertools.pairwise(ends))
    prefill, tokens = prefill.reshape(ranks, 5, R2), tokens.reshape(ranks, R2, C2)
    pages = pages.reshape(ranks, shape.page_changes, 3)
    slot[:], max_drafts[:], prefill[:, 0], pages[:] = -1, step.num_drafts, -1, -1
    for rank, (rank_step, pieces, rank_changes, rank_most_drafts) in enumerate(
        zip(step.ranks, launch.pieces, changes, most_drafts, strict=True)
    ):
        if launch.decode and rank_step.decodes:
            rows = np.frombuffer(rank_step.decodes, "<i4").reshape(-1, 2)
            slot[rank, : len(rows)], limit[rank, : len(rows)] = rows.T
            if rank_most_drafts:
                for index in np.flatnonzero(np.isin(rows[:, 0], list(rank_most_drafts))):
                    max_drafts[rank, index] = rank_most_drafts[int(rows[index, 0])]
        for index, (row_index, first, length) in enumerate(pieces):
            row = rank_step.prefills[row_index]
            row_tokens = np.frombuffer(row.tokens, "<i4")
            end = first + length
            tokens[rank, index, :length] = row_tokens[first:end]
            next_token = row.next_token if end == len(row_tokens) else row_tokens[end]
            prefill[rank, :, index] = row.slot, row.start + first, length, row.limit, next_token
        if rank_changes:
            pages[rank, : len(rank_changes)] = rank_changes
    return packed


def makes_token(row: PrefillRow, first: int, length: int) -> bool:
    """Whether a token is sampled at the end of this piece of a prefill row."""
    return row.next_token == TOKEN_MADE and first + length == row.length


def decode_slots(rank: RankStep) -> np.ndarray:
    """Return the slots of a rank's decode rows."""
    return np.frombuffer(rank.decodes, "<i4")[::2]


def _admission(admission: Admission) -> np.ndarray:
    sampling = admission.sampling
    numbers = [
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty,
    ]
    integers = [
        admission.slot,
        admission.start,
        admission.token,
        0,  # drafts
        sampling.num_prompt_tokens,
        sampling.seed & 0xFFFFFFFF,
        sampling.seed >> 32,
        sampling.top_k,
        *np.array(numbers, np.float32).view(np.int32),
        sampling.penalises,
    ]
    return np.array(integers, np.int64).astype(np.int32)  # keeps the uint32 bits of the seed's words


@dataclass(eq=False)
class SlotRules:
    """Sampling rules of one request, from its admission. num_sampled: number of tokens sampled so far, confirmed by results.

    greedy_after: number of output tokens after which plain greedy sampling is enough; 0: from the start, `ALWAYS`: never.
    """

    sampling: Sampling
    biases: np.ndarray
    allowed: np.ndarray | None
    guided: bool
    greedy_after: int
    num_sampled: int = 0
    guide: np.ndarray | None = None

    @classmethod
    def of(cls, admission: Admission) -> SlotRules:
        """Return the rules of an admission."""
        sampling = admission.sampling
        biases = np.frombuffer(admission.biases, "<i4").reshape(-1, 3)
        allowed = np.frombuffer(admission.allowed, "<i4") if admission.allowed else None
        always = sampling.temperature > 0 or sampling.logprobs >= 0 or sampling.penalises
        always = always or allowed is not None or admission.guided
        greedy_after = ALWAYS if always else int(biases[:, 2].max(initial=0))
        num_sampled = max(0, admission.start + 1 - sampling.num_prompt_tokens)
        return cls(sampling, biases, allowed, admission.guided, greedy_after, num_sampled)


class RowRules(NamedTuple):
    """Sampling inputs of one launch besides the logits.

    ops: None if all rows use plain greedy sampling. scored: whether a row wants log-probabilities of its tokens.
    biases: ``[B, E, 4]`` pieces. masks: ``[B, J, W]``, None if all tokens are allowed. slots: slot rules by (rank, is prefill, row of the
    launch), for rows that need more than the greedy token.
    """

    ops: SamplingOps | None
    scored: bool
    biases: list[np.ndarray]
    masks: np.ndarray | None
    slots: dict[tuple[int, bool, int], SlotRules]


class SlotTable:
    """The sampling rules of every slot. Must see all steps in order."""

    def __init__(self, num_ranks: int, num_slots: int, vocab_size: int):
        self._words = mask_words(vocab_size)
        self._rules: list[list[SlotRules | None]] = [[None] * num_slots for _ in range(num_ranks)]
        # Whether a slot needs more than the greedy token; an array, because every step checks all its rows at once.
        self._needs_rules = np.zeros((num_ranks, num_slots), bool)
        self._limited: set[tuple[int, int]] = set()

    def reset(self) -> None:
        """Clear all slots."""
        for slots in self._rules:
            slots[:] = [None] * len(slots)
        self._needs_rules[:] = False
        self._limited.clear()

    def admit(self, step: Step) -> None:
        """Record a step's admissions and guides."""
        for index, rank in enumerate(step.ranks):
            for admission in rank.admissions:
                rules = self._rules[index][admission.slot] = SlotRules.of(admission)
                self._needs_rules[index, admission.slot] = rules.num_sampled < rules.greedy_after
                self._limited.discard((index, admission.slot))
                if 0 < rules.greedy_after < ALWAYS:
                    self._limited.add((index, admission.slot))
            for guide in rank.guides:
                self._rules[index][guide.slot].guide = np.frombuffer(guide.masks, "<i4")

    def most_drafts(self, rank: RankStep) -> dict[int, int]:
        """Return the maximum number of drafts to verify for each slot with a guide: its number of masks minus 1."""
        return {guide.slot: len(guide.masks) // (4 * self._words) - 1 for guide in rank.guides}

    def commit(self, step: Step, results: Sequence[RankResults]) -> None:
        """Count the tokens of slots with ``greedy_after``, and switch a slot to plain greedy sampling once it has that many."""
        if not self._limited:
            return
        for index, (rank, rank_results) in enumerate(zip(step.ranks, results, strict=True)):
            rows = list(zip(decode_slots(rank).tolist(), rank_results.decodes, strict=True))
            rows += [(row.slot, result) for row, result in zip(rank.prefills, rank_results.prefills, strict=True)]
            for slot, result in rows:
                if (index, slot) in self._limited:
                    rules = self._rules[index][slot]
                    rules.num_sampled += len(result.token_ids)
                    if rules.num_sampled >= rules.greedy_after:
                        self._needs_rules[index, slot] = False
                        self._limited.discard((index, slot))

    def rules_of(self, step: Step, launch: Launch, shape: LaunchShape) -> RowRules:
        """Return the sampling rules of a launch's rows. Consumes their guides."""
        row_rules: dict[tuple[int, bool, int], SlotRules] = {}
        for index, rank in enumerate(step.ranks if self._needs_rules.any() else ()):
            rank_rules = self._rules[index]
            if launch.decode and rank.decodes:
                slots = decode_slots(rank)
                for row in np.flatnonzero(self._needs_rules[index, slots]).tolist():
                    row_rules[index, False, row] = rank_rules[slots[row]]
            for place, (row, first, length) in enumerate(launch.pieces[index]):
                slot = rank.prefills[row].slot
                if self._needs_rules[index, slot] and makes_token(rank.prefills[row], first, length):
                    row_rules[index, True, place] = rank_rules[slot]
        sampling = [rules.sampling for rules in row_rules.values()]
        scored = any(s.logprobs >= 0 for s in sampling)
        masks = self._masks(row_rules, len(step.ranks), shape)
        biases = self._biases(row_rules, len(step.ranks), shape)
        penalises = any(s.penalises for s in sampling)
        if not (biases or masks is not None or penalises or any(s.temperature > 0 for s in sampling)):
            return RowRules(None, scored, [], None, row_rules)
        truncates = any(s.top_k > 0 or s.top_p < 1 for s in sampling)
        ops = SamplingOps(*map(np.array, (truncates, penalises, masks is not None)))
        return RowRules(ops, scored, biases, masks, row_rules)

    def _biases(
        self, row_rules: dict[tuple[int, bool, int], SlotRules], ranks: int, shape: LaunchShape
    ) -> list[np.ndarray]:
        rank_biases: list[list[np.ndarray]] = [[] for _ in range(ranks)]
        R, C = shape.decode_rows
        for (rank, is_prefill, row), rules in row_rules.items():
            if len(rules.biases):
                row_positions = [R * C + row] if is_prefill else range(row * C, row * C + C)
                rank_biases[rank] += [np.insert(rules.biases, 0, position, axis=1) for position in row_positions]
        if not any(rank_biases):
            return []
        joined = [np.concatenate(pieces) if pieces else np.zeros((0, 4), np.int32) for pieces in rank_biases]
        return list(padded_pieces(joined, bias_width(shape.positions), -1))  # no position is −1

    def _masks(
        self, row_rules: dict[tuple[int, bool, int], SlotRules], ranks: int, shape: LaunchShape
    ) -> np.ndarray | None:
        masked = {
            key: rules.allowed if rules.guide is None else rules.guide
            for key, rules in row_rules.items()
            if rules.allowed is not None or rules.guide is not None
        }
        if not masked:
            return None
        R, C = shape.decode_rows
        words = self._words
        masks = np.full((ranks, shape.positions, words), -1, np.int32)
        for (rank, is_prefill, row), mask in masked.items():
            position_masks = mask.reshape(-1, words)
            if is_prefill:
                masks[rank, R * C + row] = position_masks[0]
            elif row_rules[rank, is_prefill, row].guide is None:
                masks[rank, row * C : (row + 1) * C] = position_masks[0]
            else:
                masks[rank, row * C : row * C + len(position_masks)] = position_masks
        for rules in row_rules.values():
            rules.guide = None
        return masks
