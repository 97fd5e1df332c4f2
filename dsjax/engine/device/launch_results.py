"""Results of launches: reads them from the devices, and turns them into results of a step's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from dsjax.engine.contract.commands import PrefillRow, Step, from_int32s
from dsjax.engine.contract.executor import RankResults, RowResult, TokenScore
from dsjax.engine.device.buckets import Launch, num_decodes
from dsjax.engine.device.launch_rows import RowRules, SlotRules, makes_token
from dsjax.engine.device.sampler import NONE_ALLOWED, NOT_FINITE, Scores
from dsjax.engine.device.slots import NOT_COMPUTED, REJECTED, LaunchShape

NO_TOKEN_ALLOWED = (
    "no token is allowed next: allowed tokens, bad words, minimum length and structured output exclude each other"
)


class LaunchOutcome(NamedTuple):
    """Results of a launch, on the devices."""

    launch: Launch
    shape: LaunchShape
    rules: RowRules
    outcome: Array  # ``[B, J]``, tokens of all sampled positions, see ``slots.commit``
    reports: Mapping[str, Array] | None
    drafts: Array | None = None  # ``[B, R + R2, n]``; None if none were proposed
    scores: Scores | None = None  # scores at these positions
    prompt_scores: Scores | None = None  # scores at all token slots of a scored launch; None if not requested


def read_step(step: Step, outcomes: Sequence[LaunchOutcome]) -> list[RankResults]:
    """Return the results of all rows of a step. Waits for unfinished launches."""
    results = [RankResults([], [RowResult()] * len(rank.prefills)) for rank in step.ranks]
    for outcome in outcomes:
        tokens = np.asarray(outcome.outcome)
        scores = None if outcome.scores is None else jax.device_get(outcome.scores)
        drafts = None if outcome.drafts is None else np.asarray(outcome.drafts)
        prompt_scores = None if outcome.prompt_scores is None else jax.device_get(outcome.prompt_scores)
        for rank, (rank_step, rank_results) in enumerate(zip(step.ranks, results, strict=True)):
            reader = _RankReader(rank, outcome, tokens[rank], scores, drafts)
            if outcome.launch.decode:
                rank_results.decodes.extend(reader.decodes(num_decodes(rank_step)))
            for index, (row_index, first, length) in enumerate(outcome.launch.pieces[rank]):
                row = rank_step.prefills[row_index]
                result = reader.prefill(index, makes_token(row, first, length))
                if prompt_scores is not None:
                    earlier = rank_results.prefills[row_index]
                    entries = _prompt_entries(row, first, length, prompt_scores, rank)
                    result = result._replace(prompt_scores=[*(earlier.prompt_scores or []), *entries])
                    result = result if earlier.finite else earlier
                rank_results.prefills[row_index] = result
    return results


class _RankReader(NamedTuple):
    """One rank's part of a launch's outcome, on the host."""

    rank: int
    launched: LaunchOutcome
    outcome: np.ndarray
    scores: Scores | None
    drafts: np.ndarray | None

    def decodes(self, count: int) -> list[RowResult]:
        """Results of the first ``count`` decode rows."""
        R, C = self.launched.shape.decode_rows
        rules = self.launched.rules.slots
        if C == 1:
            # Fast path: without drafts, this runs for each running request in every step.
            results = [RowResult((t,)) if t >= 0 else _failed((), t) for t in self.outcome[:count].tolist()]
            for row in range(count) if rules else ():
                if (self.rank, False, row) in rules and results[row].token_ids:
                    results[row] = self._add_details(results[row], rules[self.rank, False, row], row, row)
            return results
        tokens = self.outcome[: R * C].reshape(R, C).tolist()
        results = []
        for row in range(count):
            run = [token for token in tokens[row] if token > REJECTED]
            if not run:  # the previous step sampled the request's last tokens
                results.append(RowResult())
                continue
            result = RowResult(run) if run[-1] >= 0 else _failed(run[:-1], run[-1])
            result = result._replace(num_drafts=C - 1 - tokens[row].count(NOT_COMPUTED))
            rules_of_row = rules.get((self.rank, False, row))
            results.append(result if rules_of_row is None else self._add_details(result, rules_of_row, row, row * C))
        return results

    def prefill(self, row: int, sampled: bool) -> RowResult:
        """Return the result of a row of the prefill group."""
        R, C = self.launched.shape.decode_rows
        position = R * C + row
        token = int(self.outcome[position])
        if not sampled:
            return RowResult() if token != NOT_FINITE else _failed((), token)
        if token < 0:
            return _failed((), token)
        rules_of_row = self.launched.rules.slots.get((self.rank, True, row))
        result = RowResult((token,))
        return result if rules_of_row is None else self._add_details(result, rules_of_row, R + row, position)

    def _add_details(self, result: RowResult, rules: SlotRules, row: int, position: int) -> RowResult:
        """Add the log-probabilities of tokens from ``position`` on, and the drafts, if the slot wants them."""
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


def _failed(tokens: Sequence[int], token: int) -> RowResult:
    """Return the result of a row with a failed draw. tokens: the tokens drawn before it."""
    if token == NONE_ALLOWED:
        return RowResult(tuple(tokens), error=NO_TOKEN_ALLOWED)
    return RowResult(tuple(tokens), finite=False)


def _prompt_entries(row: PrefillRow, first: int, length: int, scores: Scores, rank: int) -> list[TokenScore]:
    """Return the scores of the prompt tokens that follow the positions of one piece of a row."""
    tokens = [*from_int32s(row.tokens), row.next_token]
    last = min(first + length, row.scored)
    return [read_score(scores, (rank, at - first), tokens[at + 1], row.top_scores) for at in range(first, last)]


def read_score(scores: Scores, at: tuple[int, int], token: int, count: int) -> TokenScore:
    """Read one position of scores on the host: token, log-probability, rank, and the ``count`` most probable tokens."""
    top = zip(scores.top_tokens[at][:count].tolist(), scores.top_logprobs[at][:count].tolist(), strict=True)
    return token, float(scores.logprobs[at]), int(scores.ranks[at]), list(top)
