"""Bad words as tokens: which runs of tokens may not be completed."""

from collections.abc import Iterable, Sequence

from dsjax.engine.sampling_params import SamplingError
from dsjax.engine.tokenizer import Tokenizer

TokenRun = tuple[int, ...]


def tokenise(words: Iterable[str], tokenizer: Tokenizer | None) -> tuple[TokenRun, ...]:
    """Each word as it is written at the start of a text, and with a space before it where that gives as many tokens.

    This is vLLM's rule, so one word bans at most two runs of tokens; other ways to spell the same text stay possible.

    Raises:
        SamplingError: the model has no tokenizer.
    """
    runs: list[TokenRun] = []
    for word in words:
        if tokenizer is None:
            raise SamplingError("bad_words", "this model has no tokenizer; use logit_bias with token ids")
        bare = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        runs.append(bare)
        if spaced[0] != bare[0] and len(spaced) == len(bare):
            runs.append(spaced)
    return tuple(dict.fromkeys(runs))


def completing(runs: Iterable[TokenRun], output: Sequence[int]) -> set[int]:
    """Tokens that would complete one of the runs behind ``output``; the prompt does not count, as in vLLM."""
    banned = set()
    for run in runs:
        before = len(run) - 1
        if before == 0 or (before <= len(output) and tuple(output[-before:]) == run[:-1]):
            banned.add(run[-1])
    return banned
