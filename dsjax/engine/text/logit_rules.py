"""``LogitRules``: changes to a completion's next logits from its parameters and tokens, prepared on the host.

Rules known when the request gets its slot are sent with its admission. Rules that depend on the output tokens (grammars, bad words of
several tokens) become a *guide*: a mask for each position of the next row.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from dsjax.engine.contract.commands import ALWAYS
from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.text.structured import Constraint

TokenRun = tuple[int, ...]


class ThinkingBudget:
    """Ends a completion's reasoning after `budget` tokens, by allowing only the closing tag.

    budget: tokens between ``<think>`` and ``</think>``, whose ids are `tags`. prompt: if it ends inside the reasoning, the budget applies
    from the first output token.
    """

    def __init__(self, budget: int, tags: tuple[int | None, int], prompt: Sequence[int]):
        self._budget, self._tags = budget, tags
        self._left: int | None = None  # tokens left while the model reasons, else None
        for token_id in prompt:
            if token_id in tags:
                self._left = budget if token_id == tags[0] else None

    def closes(self, drafts: Sequence[int]) -> list[bool]:
        """Return whether the reasoning must end at the next token, and at the token after each draft."""
        tokens_left = self._left
        closes = [self._left == 0]
        for token_id in drafts:
            tokens_left = self._after(tokens_left, token_id)
            closes.append(tokens_left == 0)
        return closes

    def take(self, token_id: int) -> None:
        """Advance by one token."""
        self._left = self._after(self._left, token_id)

    def _after(self, tokens_left: int | None, token_id: int) -> int | None:
        if token_id in self._tags:
            return self._budget if token_id == self._tags[0] else None
        return tokens_left and tokens_left - 1

    def mask(self, vocab_size: int) -> np.ndarray:
        """Return the mask that allows only the closing tag, as in ``packed``."""
        return packed(self._tags[1:], vocab_size)


class LogitRules:
    """Logit rules of one completion. Its state depends only on the completion's tokens, which survive preemption.

    allowed: the allowed tokens as in ``packed``; None: all. needs_tokens: whether the next logits depend on all previous tokens; then no
    row may be planned while another is in flight.
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
        """Return ``[tokens, 2]`` int32: initial penalty counts, as in `Admission.counts`; empty without penalties."""
        if not self._params.penalises:
            return np.zeros((0, 2), np.int32)
        codes = Counter({token: 2 * times for token, times in Counter(output).items()})
        codes.update(dict.fromkeys(prompt, 1))
        return np.array(sorted(codes.items()), np.int32).reshape(-1, 2)

    def biases(self) -> np.ndarray:
        """Return ``[entries, 3]`` int32: biases and bans independent of the tokens, as in `Admission.biases`."""
        params = self._params
        entries = [(token, bias, ALWAYS) for token, bias in (params.logit_bias or {}).items()]
        entries += [(token, -np.inf, ALWAYS) for token in self._single]
        if params.min_tokens and self._constraint is None:  # with a grammar, a complete text must be able to end
            entries += [(token, -np.inf, params.min_tokens) for token in sorted(self._stop_ids)]
        rows = np.zeros((len(entries), 3), np.int32)
        if entries:
            tokens, biases, until = zip(*entries, strict=True)
            rows[:, 0] = tokens
            rows[:, 1] = np.array(biases, np.float32).view(np.int32)
            rows[:, 2] = until
        return rows

    def masks(self, output: Sequence[int], drafts: Sequence[int]) -> np.ndarray:
        """Return ``[1 + usable, ⌈V / 32⌉]`` int32: packed masks of the next token, and of the token after each usable draft.

        If the grammar cannot continue, the mask allows nothing, and ``follow`` returns the reason.
        """
        words = -(-self._vocab_size // 32)
        if self._constraint is None:
            masks = np.full((1 + len(drafts), words), -1, np.int32)
        else:
            masks, self._error = self._constraint.preview(drafts, words)
            if self._error is not None:
                return np.zeros((1, words), np.int32)
        closes = self._thinking.closes(drafts) if self._thinking else [False] * len(masks)
        for index, mask in enumerate(masks):
            if closes[index]:
                mask &= self._thinking.mask(self._vocab_size)
            # Not the prompt, as in vLLM.
            generated = [*output[-self._longest :], *drafts[:index]] if self._longest else []
            banned = {run[-1] for run in self._several if tuple(generated[1 - len(run) :]) == run[:-1]}
            is_complete = self._constraint is not None and index == 0 and self._constraint.complete
            if self._constraint is not None and len(output) + index < self._params.min_tokens and not is_complete:
                banned |= self._stop_ids
            if self.allowed is not None:
                mask &= self.allowed
            if banned:
                mask &= ~packed(banned, self._vocab_size)
        return masks

    def follow(self, token_ids: Sequence[int]) -> tuple[int, str | None]:
        """Advance by sampled tokens. Return how many of them the rules allow, and the error that stopped there."""
        for count, token_id in enumerate(token_ids):
            if self._thinking is not None:
                self._thinking.take(token_id)
            error = None if self._constraint is None else self._constraint.take(token_id)
            if error is not None:
                return count, error
        return len(token_ids), self._error


def packed(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """Return ``[⌈V / 32⌉]`` int32 with bit ``t % 32`` of word ``t // 32`` set for each token ``t``."""
    bits = np.zeros(32 * -(-vocab_size // 32), bool)
    bits[list(token_ids)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)
