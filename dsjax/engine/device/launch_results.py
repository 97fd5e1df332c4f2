"""What a step's launches gave, read from the devices and sorted out: a result for every row of the command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from dsjax.engine.contract.commands import PrefillRow, Step, from_int32s
from dsjax.engine.contract.executor import RankResults, RowResult, TokenScore
from dsjax.engine.device.buckets import Launch, num_decodes
from dsjax.engine.device.launch_inputs import makes_token
from dsjax.engine.device.sampler import NONE_ALLOWED, NOT_FINITE, Scores
from dsjax.engine.device.slot_rules import RowRules, SlotRules
from dsjax.engine.device.slots import LaunchShape

NOTHING_ALLOWED = (
    "no token is allowed next: allowed tokens, bad words, minimum length and structured output exclude each other"
)


class LaunchOutcome(NamedTuple):
    """What a launch gave, on the devices.

    Attributes:
        outcome: ``[B, J + 2R]``: tokens of all positions that make one, and of each decode row how many were made and computed.
        scores: of those positions; prompt_scores: of all token slots of a scored launch. None where nobody asked.
        drafts: ``[B, R + R2, n]``; None where none were proposed.
    """

    launch: Launch
    shape: LaunchShape
    outcome: Array
    scores: Scores | None
    prompt_scores: Scores | None
    drafts: Array | None
    reports: Mapping[str, Array]
    rules: RowRules


def read_step(step: Step, outcomes: Sequence[LaunchOutcome]) -> list[RankResults]:
    """Results of all rows of a step. Waits for what is not there yet."""
    results = [RankResults([], [RowResult()] * len(rank.prefills)) for rank in step.ranks]
    for found in outcomes:
        tokens = np.asarray(found.outcome)
        scores = None if found.scores is None else jax.device_get(found.scores)
        drafts = None if found.drafts is None else np.asarray(found.drafts)
        prompt_scores = None if found.prompt_scores is None else jax.device_get(found.prompt_scores)
        for rank, (own, result) in enumerate(zip(step.ranks, results, strict=True)):
            reader = _RankReader(rank, found, tokens[rank], scores, drafts)
            if found.launch.decode:
                result.decodes.extend(reader.decodes(num_decodes(own)))
            for place, (index, first, length) in enumerate(found.launch.pieces[rank]):
                row = own.prefills[index]
                one = reader.prefill(place, makes_token(row, first, length))
                if prompt_scores is not None:
                    earlier = result.prefills[index]
                    entries = _prompt_entries(row, first, length, prompt_scores, rank)
                    one = one._replace(prompt_scores=[*(earlier.prompt_scores or []), *entries])
                    one = one if earlier.finite else earlier
                result.prefills[index] = one
    return results


class _RankReader(NamedTuple):
    """One rank's part of a launch's outcome, on the host."""

    rank: int
    found: LaunchOutcome
    outcome: np.ndarray
    scores: Scores | None
    drafts: np.ndarray | None

    def decodes(self, count: int) -> list[RowResult]:
        """Results of the first ``count`` decode rows."""
        R, C = self.found.shape.decode_rows
        J = R * C + self.found.shape.prefill_rows[0]
        rules = self.found.rules.slots
        if C == 1:
            # The usual case, once for each running request in every step.
            results = [RowResult((t,)) if t >= 0 else _failed((), t) for t in self.outcome[:count].tolist()]
            for row in range(count) if rules else ():
                if (self.rank, False, row) in rules and results[row].token_ids:
                    results[row] = self._detailed(results[row], rules[self.rank, False, row], row, row)
            return results
        tokens = self.outcome[: R * C].reshape(R, C).tolist()
        made, computed = self.outcome[J : J + R].tolist(), self.outcome[J + R :].tolist()
        results = []
        for row in range(count):
            run = tokens[row][: made[row]]
            if not run:  # the step before made the request's last tokens
                results.append(RowResult())
                continue
            result = RowResult(run) if run[-1] >= 0 else _failed(run[:-1], run[-1])
            result = result._replace(num_drafts=computed[row] - 1)
            own = rules.get((self.rank, False, row))
            results.append(result if own is None else self._detailed(result, own, row, row * C))
        return results

    def prefill(self, row: int, sampled: bool) -> RowResult:
        """The result of a row of the prefill group."""
        R, C = self.found.shape.decode_rows
        position = R * C + row
        token = int(self.outcome[position])
        if not sampled:
            return RowResult() if token != NOT_FINITE else _failed((), token)
        if token < 0:
            return _failed((), token)
        own = self.found.rules.slots.get((self.rank, True, row))
        result = RowResult((token,))
        return result if own is None else self._detailed(result, own, R + row, position)

    def _detailed(self, result: RowResult, rules: SlotRules, row: int, position: int) -> RowResult:
        """Add the log-probabilities of tokens made from ``position`` on, and drafts, where the slot wants them."""
        if rules.sampling.logprobs >= 0:
            scores = [
                read_score(self.scores, (self.rank, position + i), token, rules.sampling.logprobs)
                for i, token in enumerate(result.token_ids)
            ]
            result = result._replace(scores=scores)
        if rules.guided and self.drafts is not None:
            drafts = self.drafts[self.rank, row].tolist()
            result = result._replace(drafts=drafts[: next((i for i, d in enumerate(drafts) if d < 0), len(drafts))])
        return result


def _failed(before: Sequence[int], token: int) -> RowResult:
    """A row whose next token could not be drawn; ``before``: those that could."""
    if token == NONE_ALLOWED:
        return RowResult(tuple(before), error=NOTHING_ALLOWED)
    return RowResult(tuple(before), finite=False)


def _prompt_entries(row: PrefillRow, first: int, length: int, scores: Scores, rank: int) -> list[TokenScore]:
    """Scores of the prompt's tokens behind the positions of one piece of a row."""
    tokens = [*from_int32s(row.tokens), row.next_token]
    last = min(first + length, row.scored)
    return [read_score(scores, (rank, at - first), tokens[at + 1], row.top_scores) for at in range(first, last)]


def read_score(scores: Scores, at: tuple[int, int], token: int, count: int) -> TokenScore:
    """One position of scores that are on the host: token, log-probability, place, and ``count`` most probable tokens."""
    top = zip(scores.top_tokens[at][:count].tolist(), scores.top_logprobs[at][:count].tolist(), strict=True)
    return token, float(scores.logprobs[at]), int(scores.ranks[at]), list(top)
