"""``RuleMaker``: a request's parameters, checked and compiled into the rules for its logits."""

from collections.abc import Iterable, Sequence

from dsjax.engine.logit_rules import LogitRules, TokenRun
from dsjax.engine.sampling_params import SamplingError, SamplingParams
from dsjax.engine.structured import GrammarCompiler
from dsjax.engine.tokenizer import Tokenizer


class RuleMaker:
    """Any thread may call it. A grammar takes up to some 20 ms to compile, so a server calls it outside its event loop."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]):
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._grammars = GrammarCompiler(tokenizer, vocab_size, eos_token_ids)

    def make(self, params: SamplingParams, stop_ids: frozenset[int] = frozenset()) -> list[LogitRules | None]:
        """Rules for each of the ``n`` completions; None where nothing but seed, temperature and truncation matter.

        stop_ids: what ``min_tokens`` holds back.

        Raises:
            SamplingError: a token id outside the vocabulary, or a grammar that cannot be.
        """
        check_token_ids(params, self._vocab_size)
        structured = params.structured_outputs
        plain = not (params.penalises or params.logit_bias or params.bad_words or params.min_tokens)
        if plain and structured is None and params.allowed_token_ids is None:
            return [None] * params.n
        bad_words = bad_word_runs(params.bad_words, self._tokenizer)
        return [
            LogitRules(
                params,
                self._vocab_size,
                stop_ids,
                bad_words,
                None if structured is None else self._grammars.compile(structured),
            )
            for _ in range(params.n)
        ]


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Check every token id of every field against the vocabulary: a device would clamp a wrong one and go on.

    Raises:
        SamplingError: naming the field, and the first id that is outside.
    """
    fields = {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": params.logit_bias or (),
        "allowed_token_ids": params.allowed_token_ids or (),
    }
    if params.structured_outputs is not None and params.structured_outputs.structured_after is not None:
        fields["structured_outputs.structured_after"] = (params.structured_outputs.structured_after,)
    for name, token_ids in fields.items():
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise SamplingError(name, f"found {token_id}, expected 0 to {vocab_size - 1}")


def bad_word_runs(words: Iterable[str], tokenizer: Tokenizer | None) -> tuple[TokenRun, ...]:
    """The runs of tokens that spell a bad word; an output must not complete one of them.

    A word is tokenised as it is written at the start of a text, and with a space before it where that gives as many
    tokens. This is vLLM's rule, so one word bans at most two runs of tokens; other ways to spell the same text stay possible.

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
