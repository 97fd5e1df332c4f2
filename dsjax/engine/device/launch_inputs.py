"""The host's side of a launch, in NumPy: a command's rows laid into the integers that ``slots.read`` and ``admit`` take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dsjax.engine.contract.commands import TOKEN_MADE, Admission, PrefillRow, RankStep, Step
from dsjax.engine.device.buckets import Launch
from dsjax.engine.device.slots import ADMISSION_WIDTH, ADMISSIONS, COUNTED, PAGE_CHANGES, LaunchShape

PageEntry = tuple[int, int, int]
"""Slot, index in its page table, page."""


def split_page_changes(step: Step, room: int) -> tuple[list[list[PageEntry]], list[list[PageEntry]]]:
    """Each rank's changes of page tables: those that go with the first launch, and those that must be made before it.

    room: changes of a rank that the launch takes. A slot that is given to a request in this step has all of its changes made before.
    """
    within, before = [], []
    for rank in step.ranks:
        admitted = {admission.slot for admission in rank.admissions}
        with_launch: list[PageEntry] = []
        ahead: list[PageEntry] = []
        for slot, first, pages in ((change.slot, change.first, change.pages) for change in rank.pages):
            entries = [(slot, index, page) for index, page in enumerate(pages, start=first)]
            fits = slot not in admitted and len(with_launch) + len(entries) <= room
            (with_launch if fits else ahead).extend(entries)
        within.append(with_launch)
        before.append(ahead)
    return within, before


def pack_admissions(step: Step, changes: list[list[PageEntry]]) -> Iterator[np.ndarray]:
    """``[B, ADMIT_WIDTH]`` int32 inputs of the admission program, as many as it takes; none where there is nothing to do.

    An admission resets what its slot had, so page changes and counts begin with the run that has the last admissions.
    """
    counts = [
        [
            np.insert(np.frombuffer(admission.counts, "<i4").reshape(-1, 2), 0, admission.slot, axis=1)
            for admission in rank.admissions
            if admission.counts
        ]
        for rank in step.ranks
    ]
    joined = [np.concatenate(own) if own else np.zeros((0, 3), np.int32) for own in counts]
    admitting = max(-(-len(rank.admissions) // ADMISSIONS) for rank in step.ranks)
    filling = max(
        max(-(-len(own_changes) // PAGE_CHANGES), -(-len(own_counts) // COUNTED))
        for own_changes, own_counts in zip(changes, joined, strict=True)
    )
    first = max(admitting - 1, 0)
    runs = max(admitting, first + filling)
    for run in range(runs):
        admissions = np.full((len(step.ranks), ADMISSIONS, ADMISSION_WIDTH), -1, np.int32)
        pages = np.full((len(step.ranks), PAGE_CHANGES, 3), -1, np.int32)
        counted = np.full((len(step.ranks), COUNTED, 3), -1, np.int32)
        for rank, (own, own_changes, own_counts) in enumerate(zip(step.ranks, changes, joined, strict=True)):
            for place, admission in enumerate(own.admissions[run * ADMISSIONS : (run + 1) * ADMISSIONS]):
                admissions[rank, place] = _admission(admission)
            if run < first:
                continue
            part = own_changes[(run - first) * PAGE_CHANGES : (run - first + 1) * PAGE_CHANGES]
            if part:
                pages[rank, : len(part)] = part
            part = own_counts[(run - first) * COUNTED : (run - first + 1) * COUNTED]
            counted[rank, : len(part)] = part
        yield np.concatenate([a.reshape(len(step.ranks), -1) for a in (admissions, pages, counted)], axis=1)


def pack_launch(
    step: Step, launch: Launch, shape: LaunchShape, changes: list[list[PageEntry]], most_drafts: list[dict[int, int]]
) -> np.ndarray:
    """``[B, W]`` int32 of one launch's rows and page changes.

    most_drafts: of each rank, how many drafts of a slot may be verified, where that is not all.
    """
    ranks = len(step.ranks)
    (R, _), (R2, C2) = shape.decode_rows, shape.prefill_rows
    slot, limit = np.full((ranks, R), -1, np.int32), np.zeros((ranks, R), np.int32)
    most = np.full((ranks, R), step.num_drafts, np.int32)
    prefill = np.zeros((5, ranks, R2), np.int32)
    prefill[0] = -1
    tokens = np.zeros((ranks, R2, C2), np.int32)
    pages = np.full((ranks, shape.page_changes, 3), -1, np.int32)
    for rank, (own, pieces, own_changes, own_most) in enumerate(
        zip(step.ranks, launch.pieces, changes, most_drafts, strict=True)
    ):
        if launch.decode and own.decodes:
            rows = np.frombuffer(own.decodes, "<i4").reshape(-1, 2)
            slot[rank, : len(rows)], limit[rank, : len(rows)] = rows.T
            for place in np.flatnonzero(np.isin(rows[:, 0], list(own_most))) if own_most else ():
                most[rank, place] = own_most[int(rows[place, 0])]
        for place, (index, first, length) in enumerate(pieces):
            row = own.prefills[index]
            known = np.frombuffer(row.tokens, "<i4")
            tokens[rank, place, :length] = known[first : first + length]
            following = row.next_token if first + length == len(known) else known[first + length]
            prefill[:, rank, place] = row.slot, row.start + first, length, row.limit, following
        if own_changes:
            pages[rank, : len(own_changes)] = own_changes
    parts: Sequence[np.ndarray] = (slot, limit, most, *prefill, tokens, pages)
    return np.concatenate([a.reshape(ranks, -1) for a in parts], axis=1)


def makes_token(row: PrefillRow, first: int, length: int) -> bool:
    """Whether this piece of a prefill row ends with a token being made."""
    return row.next_token == TOKEN_MADE and first + length == row.length


def decode_slots(rank: RankStep) -> np.ndarray:
    """The slots of a rank's decode rows."""
    return np.frombuffer(rank.decodes, "<i4")[::2]


def _admission(admission: Admission) -> np.ndarray:
    sampling = admission.sampling
    values = np.empty(ADMISSION_WIDTH, np.int32)
    values[:4] = admission.slot, admission.start, admission.token, sampling.num_prompt_tokens
    values[4:5] = np.array([sampling.seed], np.uint32).view(np.int32)
    values[5] = sampling.top_k
    values[6:12] = np.array(
        [
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.presence_penalty,
            sampling.frequency_penalty,
            sampling.repetition_penalty,
        ],
        np.float32,
    ).view(np.int32)
    values[12] = sampling.penalises
    return values
