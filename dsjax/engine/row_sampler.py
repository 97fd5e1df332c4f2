"""``RowSampler``: the sampling of one launch's rows, from requests on the host to tokens on the host."""

from __future__ import annotations

import jax
import numpy as np
from jaxtyping import Array

from dsjax.engine.logit_edits import Penalties, mask_words, pieces
from dsjax.engine.plan import NO_TOKEN, PromptLogprob, RowResult
from dsjax.engine.programs import Programs
from dsjax.engine.request import Request
from dsjax.engine.sampler import NONE_ALLOWED, NOT_FINITE, SamplingRows, Scores, Wanted, needs_sampler

NOTHING_ALLOWED = (
    "no token is allowed next: allowed tokens, bad words, minimum length and structured output exclude each other"
)


SampledRow = tuple[int, int, Request]
"""(rank, row, request) of a row that yields a token. No class: a step makes one for every running request."""


class RowSampler:
    """Runs the sampling programs for the rows that want more than the greedy token. Nothing runs where none does."""

    def __init__(self, programs: Programs, num_ranks: int, vocab_size: int):
        self._programs, self._ranks, self._vocab_size = programs, num_ranks, vocab_size

    def __call__(self, greedy_tokens: Array, logits: Array, rows: list[SampledRow]) -> dict[str, RowResult]:
        """Each row's result, by request id.

        greedy_tokens: ``[B, R]``, the step's; logits: ``[B, R, V]``. Both are computed already.
        """
        wanting = [row for row in rows if needs_sampler(row[2])]
        errors: dict[str, str] = {}
        scores: Scores | None = None
        if wanting:
            sampled = jax.device_get(self._draw(logits, wanting, errors))
            tokens, scores = sampled.tokens.tolist(), sampled.scores
        else:
            tokens = np.asarray(greedy_tokens).tolist()
        results = {}
        for rank, row, request in rows:
            token = tokens[rank][row]
            if token >= 0 and request.rules is None and request.params.logprobs is None:
                results[request.request_id] = RowResult(token)
            else:
                results[request.request_id] = self._result(request, token, scores, (rank, row), errors)
        return results

    def _draw(self, logits: Array, wanting: list[SampledRow], errors: dict[str, str]):
        num_rows = logits.shape[1]
        rows = SamplingRows.greedy(self._ranks, num_rows)
        for rank, row, request in wanting:
            rows.set(rank, row, request)
        wanted = Wanted.by(request for _, _, request in wanting)
        changed = self._change(logits, wanting, errors)
        inputs = jax.device_put((rows, wanted), (self._programs.rows, self._programs.everywhere))
        return self._programs.sampler(num_rows)(logits, changed, *inputs)

    def _change(self, logits: Array, wanting: list[SampledRow], errors: dict[str, str]) -> Array:
        """The logits after every row's rules; the same array where no row has any."""
        ruled = [row for row in wanting if row[2].rules is not None and row[2].rules.active(row[2])]
        if not ruled:
            return logits
        num_rows = logits.shape[1]
        penalties = Penalties.none(self._ranks, num_rows)
        edits: list[list[np.ndarray]] = [[] for _ in range(self._ranks)]
        mask: np.ndarray | None = None
        for rank, row, request in ruled:
            own = request.rules.edits(request)
            if own is not None:
                edits[rank].append(np.concatenate([np.full((len(own), 1), row, np.int32), own], axis=1))
                params = request.params
                penalties.presence[rank, row] = params.presence_penalty
                penalties.frequency[rank, row] = params.frequency_penalty
                penalties.repetition[rank, row] = params.repetition_penalty
            if request.rules.masks:
                if mask is None:
                    mask = np.full((self._ranks, num_rows, mask_words(self._vocab_size)), -1, np.int32)
                error = request.rules.fill(mask[rank, row])
                if error is not None:
                    errors[request.request_id] = error
        joined = [np.concatenate(own) if own else np.zeros((0, 4), np.int32) for own in edits]
        put = lambda array: jax.device_put(array, self._programs.rows)  # noqa: E731
        change, penalties = self._programs.change(num_rows), put(penalties)
        masks = self._programs.no_mask(num_rows) if mask is None else put(mask)
        changed = logits
        for piece in list(pieces(joined, num_rows)) or [None]:
            one = self._programs.no_edits(num_rows) if piece is None else put(piece)
            changed = jax.block_until_ready(change(changed, penalties, one, masks))
            masks = self._programs.no_mask(num_rows)
        return changed

    def _result(
        self, request: Request, token: int, scores: Scores | None, at: tuple[int, int], errors: dict[str, str]
    ) -> RowResult:
        if token == NOT_FINITE:
            return RowResult(NO_TOKEN, finite=False)
        error = errors.get(request.request_id) or (NOTHING_ALLOWED if token == NONE_ALLOWED else None)
        if error is None and request.rules is not None:
            error = request.rules.take(token)
        if error is not None:
            return RowResult(NO_TOKEN, error=error)
        count = request.params.logprobs
        if count is None:
            return RowResult(token)
        _, logprob, place, top = read_score(scores, at, token, count)
        return RowResult(token, logprob, top, True, place)


def read_score(scores: Scores, at: tuple[int, int], token: int, count: int) -> PromptLogprob:
    """One position of scores that are on the host: token, log-probability, place, and ``count`` most probable tokens."""
    top = zip(scores.top_tokens[at][:count].tolist(), scores.top_logprobs[at][:count].tolist(), strict=True)
    return token, float(scores.logprobs[at]), int(scores.ranks[at]), list(top)
