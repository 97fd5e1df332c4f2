"""``LogitRules``: what one completion's parameters and tokens do to its next logits, prepared on the host.

Everything that names single tokens (bias, bans, penalties) becomes *edits*, one a token; everything that names sets of
tokens (allowed tokens, grammars) becomes a packed mask. ``logit_edits.py`` applies both on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from dsjax.engine.sampling_params import SamplingParams
from dsjax.engine.structured import Constraint

TokenRun = tuple[int, ...]


class Tokens(Protocol):
    """What the rules read of a `Request`, which itself holds its rules; its docstring says what each field is."""

    token_ids: list[int]
    num_prompt_tokens: int
    stop_ids: frozenset[int]

    @property
    def suppresses_stop_ids(self) -> bool:
        """Whether the next token may not be one of `stop_ids`."""


class TokenTable:
    """Distinct tokens with the bias and the count of each, in arrays that grow at their end."""

    def __init__(self):
        self.size = 0
        self._place: dict[int, int] = {}
        self._ids, self._bias, self._code = np.zeros(16, np.int32), np.zeros(16, np.float32), np.zeros(16, np.int32)

    def place(self, token_id: int) -> int:
        """The token's place; a new one, without bias and count, where it has none."""
        place = self._place.get(token_id)
        if place is None:
            place = self._place[token_id] = self.size
            self._reserve(place + 1)
            self._ids[place] = token_id
            self.size += 1
        return place

    def add_bias(self, token_id: int, bias: float) -> None:
        """Add to the token's logit from now on."""
        place = self.place(token_id)  # before the array is read: it may grow
        self._bias[place] += bias

    def add_prompt(self, token_ids: Sequence[int]) -> None:
        """Note that these tokens are in the prompt."""
        for token_id in np.unique(np.asarray(token_ids, np.int32)).tolist():
            place = self.place(token_id)
            self._code[place] |= 1

    def add_output(self, token_id: int) -> None:
        """Count a token of the output."""
        place = self.place(token_id)
        self._code[place] += 2

    def edits(self, banned: Iterable[int]) -> np.ndarray:
        """``[tokens, 3]`` int32: token, bits of its float32 bias (−∞ for ``banned``), 2 × its count + 1 if in the prompt."""
        places = [self.place(token_id) for token_id in banned]
        bias = self._bias[: self.size].copy()
        bias[places] = -np.inf
        return np.stack([self._ids[: self.size], bias.view(np.int32), self._code[: self.size]], axis=1)

    def _reserve(self, size: int) -> None:
        if size > len(self._ids):
            grow = lambda array: np.concatenate([array, np.zeros_like(array)])  # noqa: E731
            self._ids, self._bias, self._code = grow(self._ids), grow(self._bias), grow(self._code)


class LogitRules:
    """Follows one completion. It only ever sees that completion's tokens, so nothing else can change what it does.

    Tokens are kept when a request is preempted, and so is all that is here.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        vocab_size: int,
        bad_words: tuple[TokenRun, ...] = (),
        constraint: Constraint | None = None,
    ):
        self._params, self._bad_words, self._constraint = params, bad_words, constraint
        self._longest_bad_word = max(map(len, bad_words), default=0)
        self._followed = len(prompt)
        self._table = TokenTable()
        for token_id, bias in (params.logit_bias or {}).items():
            self._table.add_bias(token_id, bias)
        if params.repetition_penalty != 1:
            self._table.add_prompt(prompt)
        self._edits_always = params.penalises or bool(params.logit_bias) or bool(bad_words)
        self._allowed = None if params.allowed_token_ids is None else packed(params.allowed_token_ids, vocab_size)

    def edits(self, request: Tokens) -> np.ndarray | None:
        """Edits before the request's next token, as ``TokenTable.edits``; None where there are none."""
        # A finished grammar allows the end alone, which ``min_tokens`` must not take away.
        holds_back = request.suppresses_stop_ids and not (self._constraint and self._constraint.complete)
        if not self._edits_always and not holds_back:
            return None
        if self._params.penalises:
            for token_id in request.token_ids[self._followed :]:
                self._table.add_output(token_id)
            self._followed = len(request.token_ids)
        banned = set(request.stop_ids) if holds_back else set()
        if self._bad_words:
            first = max(request.num_prompt_tokens, len(request.token_ids) - self._longest_bad_word)
            banned |= completing(self._bad_words, request.token_ids[first:])
        return self._table.edits(banned)

    @property
    def masks(self) -> bool:
        """Whether only some tokens may be taken next."""
        return self._allowed is not None or (self._constraint is not None and self._constraint.active)

    def fill(self, words: np.ndarray) -> str | None:
        """Write the packed mask ``[⌈V / 32⌉]`` int32 of the next token; gives the reason where a grammar cannot go on."""
        error = None
        if self._constraint is not None and self._constraint.active:
            error = self._constraint.fill(words)
        else:
            words[:] = -1
        if self._allowed is not None:
            words &= self._allowed
        return error

    def active(self, request: Tokens) -> bool:
        """Whether anything changes the next logits."""
        return self._edits_always or self.masks or request.suppresses_stop_ids

    def take(self, token_id: int) -> str | None:
        """Follow the token that was taken; gives the reason where a grammar cannot go on."""
        return None if self._constraint is None else self._constraint.take(token_id)


def completing(runs: Iterable[TokenRun], output: Sequence[int]) -> set[int]:
    """Tokens that would complete one of the runs behind ``output``; the prompt does not count, as in vLLM."""
    banned = set()
    for run in runs:
        before = len(run) - 1
        if before == 0 or (before <= len(output) and tuple(output[-before:]) == run[:-1]):
            banned.add(run[-1])
    return banned


def packed(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """``[⌈V / 32⌉]`` int32 with bit ``t % 32`` of word ``t // 32`` set for each token."""
    bits = np.zeros(32 * -(-vocab_size // 32), bool)
    bits[list(token_ids)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)
