"""What an executor keeps on the host of each slot: how its logits are changed, and what is wanted of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dsjax.engine.contract.commands import ALWAYS, Admission, RankStep, Sampling, Step
from dsjax.engine.contract.executor import RankResults
from dsjax.engine.device.buckets import Launch
from dsjax.engine.device.launch_inputs import decode_slots, makes_token
from dsjax.engine.device.logit_edits import mask_words, pieces
from dsjax.engine.device.sampler import Wanted
from dsjax.engine.device.slots import LaunchShape


@dataclass(eq=False)
class SlotRules:
    """One request's sampling, as its admission has it.

    Attributes:
        until: tokens of the output after which the most probable token is enough; 0: always, `ALWAYS`: never.
        made: tokens made so far, as results have confirmed.
    """

    sampling: Sampling
    biases: np.ndarray
    allowed: np.ndarray | None
    guided: bool
    until: int
    made: int = 0
    guide: np.ndarray | None = field(default=None)

    @classmethod
    def of(cls, admission: Admission) -> SlotRules:
        """Read an admission."""
        sampling = admission.sampling
        biases = np.frombuffer(admission.biases, "<i4").reshape(-1, 3)
        allowed = np.frombuffer(admission.allowed, "<i4") if admission.allowed else None
        always = sampling.temperature > 0 or sampling.logprobs >= 0 or sampling.penalises
        always = always or allowed is not None or admission.guided
        until = ALWAYS if always else int(biases[:, 2].max(initial=0))
        made = max(0, admission.start + 1 - sampling.num_prompt_tokens)
        return cls(sampling, biases, allowed, admission.guided, until, made)


class RowRules(NamedTuple):
    """What the sampling of one launch needs beside the logits.

    Attributes:
        wanted: None where every row's most probable token is enough.
        biases: ``[B, E, 4]`` pieces. masks: ``[B, J, W]``, None where all tokens are allowed everywhere.
        slots: of each (rank, is prefill, row of the launch) that wants more than its token, its slot's rules.
    """

    wanted: Wanted | None
    biases: list[np.ndarray]
    masks: np.ndarray | None
    slots: dict[tuple[int, bool, int], SlotRules]


class SlotTable:
    """The rules of every slot. Commands must be shown to it in their order."""

    def __init__(self, num_ranks: int, num_slots: int, vocab_size: int):
        self._words = mask_words(vocab_size)
        self._rules: list[list[SlotRules | None]] = [[None] * num_slots for _ in range(num_ranks)]
        # Whether a slot wants more than the most probable token; asked of all rows of every step at once.
        self._wants = np.zeros((num_ranks, num_slots), bool)
        self._settling: set[tuple[int, int]] = set()

    def reset(self) -> None:
        """Take every slot from its owner."""
        for own in self._rules:
            own[:] = [None] * len(own)
        self._wants[:] = False
        self._settling.clear()

    def admit(self, step: Step) -> None:
        """Enter a step's admissions, and its guides."""
        for index, rank in enumerate(step.ranks):
            for admission in rank.admissions:
                rules = self._rules[index][admission.slot] = SlotRules.of(admission)
                self._wants[index, admission.slot] = rules.made < rules.until
                self._settling.discard((index, admission.slot))
                if 0 < rules.until < ALWAYS:
                    self._settling.add((index, admission.slot))
            for guide in rank.guides:
                self._rules[index][guide.slot].guide = np.frombuffer(guide.masks, "<i4")

    def most_drafts(self, rank: RankStep) -> dict[int, int]:
        """How many drafts of a slot may be verified, where its guide says so: one less than it has masks."""
        return {guide.slot: len(guide.masks) // (4 * self._words) - 1 for guide in rank.guides}

    def commit(self, step: Step, results: Sequence[RankResults]) -> None:
        """Count the tokens of slots that want more only until they have made so many."""
        if not self._settling:
            return
        for index, (rank, found) in enumerate(zip(step.ranks, results, strict=True)):
            rows = list(zip(decode_slots(rank).tolist(), found.decodes, strict=True))
            rows += [(row.slot, result) for row, result in zip(rank.prefills, found.prefills, strict=True)]
            for slot, result in rows:
                if (index, slot) in self._settling:
                    rules = self._rules[index][slot]
                    rules.made += len(result.token_ids)
                    if rules.made >= rules.until:
                        self._wants[index, slot] = False
                        self._settling.discard((index, slot))

    def rules_of(self, step: Step, launch: Launch, shape: LaunchShape) -> RowRules:
        """What the rows of a launch want."""
        found: dict[tuple[int, bool, int], SlotRules] = {}
        for index, rank in enumerate(step.ranks):
            own = self._rules[index]
            if launch.decode and rank.decodes:
                slots = decode_slots(rank)
                for row in np.flatnonzero(self._wants[index, slots]).tolist():
                    found[index, False, row] = own[slots[row]]
            for place, (row, first, length) in enumerate(launch.pieces[index]):
                slot = rank.prefills[row].slot
                if self._wants[index, slot] and makes_token(rank.prefills[row], first, length):
                    found[index, True, place] = own[slot]
        if not found:
            return RowRules(None, [], None, found)
        sampling = [rules.sampling for rules in found.values()]
        masks = self._masks(found, len(step.ranks), shape)
        wanted = Wanted(
            np.array(any(s.top_k > 0 or s.top_p < 1 for s in sampling)),
            np.array(any(s.logprobs >= 0 for s in sampling)),
            np.array(any(s.penalises for s in sampling)),
            np.array(masks is not None),
        )
        return RowRules(wanted, self._biases(found, len(step.ranks), shape), masks, found)

    def _biases(
        self, found: dict[tuple[int, bool, int], SlotRules], ranks: int, shape: LaunchShape
    ) -> list[np.ndarray]:
        own: list[list[np.ndarray]] = [[] for _ in range(ranks)]
        rows = shape.decode_rows[0]
        for (rank, is_prefill, row), rules in found.items():
            if len(rules.biases):
                own[rank].append(np.insert(rules.biases, 0, rows + row if is_prefill else row, axis=1))
        if not any(own):
            return []
        joined = [np.concatenate(each) if each else np.zeros((0, 4), np.int32) for each in own]
        return list(pieces(joined, rows + shape.prefill_rows[0]))

    def _masks(
        self, found: dict[tuple[int, bool, int], SlotRules], ranks: int, shape: LaunchShape
    ) -> np.ndarray | None:
        masked = {
            at: rules.allowed if rules.guide is None else rules.guide
            for at, rules in found.items()
            if rules.allowed is not None or rules.guide is not None
        }
        if not masked:
            return None
        R, C = shape.decode_rows
        words = self._words
        masks = np.full((ranks, R * C + shape.prefill_rows[0], words), -1, np.int32)
        for (rank, is_prefill, row), mask in masked.items():
            of_position = mask.reshape(-1, words)
            if is_prefill:
                masks[rank, R * C + row] = of_position[0]
            elif found[rank, is_prefill, row].guide is None:
                masks[rank, row * C : (row + 1) * C] = of_position[0]
            else:
                masks[rank, row * C : row * C + len(of_position)] = of_position
        for rules in found.values():
            rules.guide = None
        return masks
