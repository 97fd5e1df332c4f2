"""``LogitRules``: what one completion's parameters and tokens do to its next logits, prepared on the host.

What is known when the request gets its slot travels with its admission. What depends on the tokens made (grammars, banned words of several
tokens) becomes a *guide*: a mask for each position of the next row.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from dsjax.engine.contract.commands import ALWAYS
from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.text.structured import Constraint

TokenRun = tuple[int, ...]


class ThinkingBudget:
    """Ends a completion's reasoning after so many tokens: then only the closing tag may come.

    budget: tokens between ``<think>`` and ``</think>``, whose ids are `tags`. prompt: where it leaves the reasoning open, the reasoning
    has begun.
    """

    def __init__(self, budget: int, tags: tuple[int | None, int], prompt: Sequence[int]):
        self._budget, self._tags = budget, tags
        self._left: int | None = None  # while the model reasons
        for token_id in prompt:
            if token_id in tags:
                self._left = budget if token_id == tags[0] else None

    def closes(self, drafts: Sequence[int]) -> list[bool]:
        """Whether the reasoning must end with the next token, and with the one after each draft."""
        left, closes = self._left, [self._left == 0]
        for token_id in drafts:
            left = self._after(left, token_id)
            closes.append(left == 0)
        return closes

    def take(self, token_id: int) -> None:
        """Follow a token."""
        self._left = self._after(self._left, token_id)

    def _after(self, left: int | None, token_id: int) -> int | None:
        if token_id in self._tags:
            return self._budget if token_id == self._tags[0] else None
        return left and left - 1

    def mask(self, vocab_size: int) -> np.ndarray:
        """The mask that allows the closing tag alone, as ``packed``."""
        return packed(self._tags[1:], vocab_size)


class LogitRules:
    """Follows one completion, and sees its tokens alone, which are kept when a request is preempted.

    allowed: as ``packed``, the tokens that may be made at all; None: all. needs_tokens: whether the next logits depend on all tokens
    before; then no row may be planned while one is under way.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        stop_ids: frozenset[int] = frozenset(),
        bad_words: tuple[TokenRun, ...] = (),
        constraint: Constraint | None = None,
        thinking: ThinkingBudget | None = None,
    ):
        self._params, self._vocab_size, self._stop_ids, self._constraint = params, vocab_size, stop_ids, constraint
        self._single = sorted(run[0] for run in bad_words if len(run) == 1)
        self._several = tuple(run for run in bad_words if len(run) > 1)
        self._longest = max(map(len, self._several), default=0)
        self.allowed = None if params.allowed_token_ids is None else packed(params.allowed_token_ids, vocab_size)
        self._error: str | None = None
        self._thinking = thinking
        self.needs_tokens = constraint is not None or thinking is not None or bool(self._several)

    def counts(self, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
        """``[tokens, 2]`` int32: what penalties begin with, as `Admission.counts`; empty where there are none."""
        if not self._params.penalises:
            return np.zeros((0, 2), np.int32)
        codes = Counter({token: 2 * times for token, times in Counter(output).items()})
        codes.update(dict.fromkeys(prompt, 1))
        return np.array(sorted(codes.items()), np.int32).reshape(-1, 2)

    def biases(self) -> np.ndarray:
        """``[entries, 3]`` int32: biases and bans that need no token, as `Admission.biases`."""
        params = self._params
        entries = [(token, bias, ALWAYS) for token, bias in (params.logit_bias or {}).items()]
        entries += [(token, -np.inf, ALWAYS) for token in self._single]
        if params.min_tokens and self._constraint is None:  # under a grammar a finished text must be able to end
            entries += [(token, -np.inf, params.min_tokens) for token in sorted(self._stop_ids)]
        rows = np.zeros((len(entries), 3), np.int32)
        if entries:
            tokens, biases, until = zip(*entries, strict=True)
            rows[:, 0], rows[:, 1], rows[:, 2] = tokens, np.array(biases, np.float32).view(np.int32), until
        return rows

    def masks(self, output: Sequence[int], drafts: Sequence[int]) -> np.ndarray:
        """``[1 + usable, ⌈V / 32⌉]`` int32: packed masks of the next token, and of the one after each draft that can be used.

        Where the grammar cannot go on the mask allows nothing, and ``follow`` says why.
        """
        words = -(-self._vocab_size // 32)
        if self._constraint is None:
            masks = np.full((1 + len(drafts), words), -1, np.int32)
        else:
            masks, self._error = self._constraint.preview(drafts, words)
            if self._error is not None:
                return np.zeros((1, words), np.int32)
        closes = self._thinking.closes(drafts) if self._thinking else [False] * len(masks)
        for place, mask in enumerate(masks):
            if closes[place]:
                mask &= self._thinking.mask(self._vocab_size)
            made = [*output[-self._longest :], *drafts[:place]] if self._longest else []  # not the prompt, as in vLLM
            banned = {run[-1] for run in self._several if tuple(made[1 - len(run) :]) == run[:-1]}
            complete = self._constraint is not None and place == 0 and self._constraint.complete
            if self._constraint is not None and len(output) + place < self._params.min_tokens and not complete:
                banned |= self._stop_ids
            if self.allowed is not None:
                mask &= self.allowed
            if banned:
                mask &= ~packed(banned, self._vocab_size)
        return masks

    def follow(self, token_ids: Sequence[int]) -> tuple[int, str | None]:
        """Follow the tokens that were made; how many of them the rules allow, and why no more."""
        for count, token_id in enumerate(token_ids):
            if self._thinking is not None:
                self._thinking.take(token_id)
            error = None if self._constraint is None else self._constraint.take(token_id)
            if error is not None:
                return count, error
        return len(token_ids), self._error


def packed(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """``[⌈V / 32⌉]`` int32 with bit ``t % 32`` of word ``t // 32`` set for each token."""
    bits = np.zeros(32 * -(-vocab_size // 32), bool)
    bits[list(token_ids)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)
