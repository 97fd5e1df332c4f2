"""Read the results of launches from the devices, and turn them into results of a step's rows."""

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
    for launched in outcomes:
        tokens = np.asarray(launched.outcome)
        scores, prompt_scores = jax.device_get((launched.scores, launched.prompt_scores))
        drafts = None if launched.drafts is None else np.asarray(launched.drafts)
        for rank, (rank_step, rank_results) in enumerate(zip(step.ranks, results, strict=True)):
            reader = _RankReader(rank, launched, tokens[rank], scores, drafts)
            if launched.launch.decode:
                rank_results.decodes.extend(reader.decodes(num_decodes(rank_step)))
            for launch_row, (row_index, first, length) in enumerate(launched.launch.pieces[rank]):
                row = rank_step.prefills[row_index]
                result = reader.prefill(launch_row, makes_token(row, first, length))
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
    tokens: np.ndarray  # ``[J]``
    scores: Scores | None
    drafts: np.ndarray | None

    def decodes(self, count: int) -> list[RowResult]:
        """Return the results of the first ``count`` decode rows."""
        R, C = self.launched.shape.decode_rows
        if C == 1:
            # Fast path: without drafts, this runs for each running request in every step.
            results = [RowResult((t,)) if t >= 0 else _with_drafts([t]) for t in self.tokens[:count].tolist()]
        else:
            results = [_with_drafts(tokens) for tokens in self.tokens[: R * C].reshape(R, C)[:count].tolist()]
        rules = self.launched.rules.slots
        for row in range(count) if rules else ():
            if (self.rank, False, row) in rules and results[row].token_ids:
                results[row] = self._add_details(results[row], rules[self.rank, False, row], row, row * C)
        return results

    def prefill(self, row: int, sampled: bool) -> RowResult:
        """Return the result of a row of the launch's prefill group. sampled: whether it generates a token."""
        R, C = self.launched.shape.decode_rows
        position = R * C + row
        token = int(self.tokens[position])
        if not sampled:
            return RowResult() if token != NOT_FINITE else _failed((), token)
        if token < 0:
            return _failed((), token)
        rules = self.launched.rules.slots.get((self.rank, True, row))
        result = RowResult((token,))
        return result if rules is None else self._add_details(result, rules, R + row, position)

    def _add_details(self, result: RowResult, rules: SlotRules, row: int, position: int) -> RowResult:
        """Add the log-probabilities and the drafts that the slot wants. position: sampled position of the row's first token."""
        if rules.sampling.logprobs >= 0:
            scores = [
                _read_score(self.scores, (self.rank, position + i), token, rules.sampling.logprobs)
                for i, token in enumerate(result.token_ids)
            ]
            result = result._replace(scores=scores)
        if rules.guided and self.drafts is not None:
            drafts = self.drafts[self.rank, row].tolist()
            result = result._replace(drafts=drafts[: next((i for i, d in enumerate(drafts) if d < 0), len(drafts))])
        return result


def _with_drafts(tokens: list[int]) -> RowResult:
    """Return the result of a decode row with drafts. tokens: its part of the outcome of ``slots.commit``."""
    drawn = [token for token in tokens if token > REJECTED]
    if not drawn:  # the previous step sampled the request's last tokens
        return RowResult()
    result = RowResult(drawn) if drawn[-1] >= 0 else _failed(drawn[:-1], drawn[-1])
    return result._replace(num_drafts=len(tokens) - 1 - tokens.count(NOT_COMPUTED))


def _failed(tokens: Sequence[int], token: int) -> RowResult:
    """Return the result of a row with a failed draw. tokens: the tokens drawn before it."""
    if token == NONE_ALLOWED:
        return RowResult(tuple(tokens), error=NO_TOKEN_ALLOWED)
    return RowResult(tuple(tokens), finite=False)


def _prompt_entries(row: PrefillRow, first: int, length: int, scores: Scores, rank: int) -> list[TokenScore]:
    """Return the scores of the prompt tokens that follow the positions of one piece of a row."""
    tokens = [*from_int32s(row.tokens), row.next_token]
    end = min(first + length, row.scored)
    return [_read_score(scores, (rank, at - first), tokens[at + 1], row.top_scores) for at in range(first, end)]


def _read_score(scores: Scores, at: tuple[int, int], token: int, count: int) -> TokenScore:
    """Read the scores at (DP rank, position): token, log-probability, the token's rank, and the ``count`` most probable tokens."""
    top = zip(scores.top_tokens[at][:count].tolist(), scores.top_logprobs[at][:count].tolist(), strict=True)
    return token, float(scores.logprobs[at]), int(scores.ranks[at]), list(top)
