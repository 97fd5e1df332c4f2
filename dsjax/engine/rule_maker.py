"""``RuleMaker``: a request's parameters, checked and compiled into the rules for its logits."""

from collections.abc import Sequence

from dsjax.engine.bad_words import tokenise
from dsjax.engine.logit_rules import LogitRules
from dsjax.engine.sampling_checks import check_token_ids
from dsjax.engine.sampling_params import SamplingParams
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
        bad_words = tokenise(params.bad_words, self._tokenizer)
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
