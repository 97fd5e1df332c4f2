"""Log-probabilities in the shape of `/v1/completions`: lists over tokens, the prompt's too with `echo`."""

import codecs
from collections.abc import Sequence

from dsjax.engine.outputs import TokenLogprobs
from dsjax.engine.tokenizer import Tokenizer
from dsjax.serve.answers import finite
from dsjax.serve.responses import CompletionLogprobs
from dsjax.serve.token_text import token_name


class CompletionLogprobLists:
    """Makes the lists, piece by piece for a stream: `text_offset` goes on where the last piece ended.

    Args:
        skip_special_tokens: whether the text is without them, so that they take no place in it.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._characters = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> CompletionLogprobs:
        """One entry a token; None, for the first token of a prompt, stays None."""
        body: CompletionLogprobs = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token_id, entry in zip(token_ids, entries, strict=True):
            body["text_offset"].append(self._characters)
            body["tokens"].append(token_name(self._tokenizer, token_id))
            body["token_logprobs"].append(None if entry is None else finite(entry[token_id].logprob))
            body["top_logprobs"].append(None if entry is None else self._top(entry))
            if not (self._skip_special_tokens and self._tokenizer.is_special(token_id)):
                self._characters += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return body

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """By text, most probable first; where two tokens have one text, the greater value is kept."""
        top: dict[str, float] = {}
        for token_id, one in sorted(entry.items(), key=lambda pair: -pair[1].logprob):
            top.setdefault(token_name(self._tokenizer, token_id), finite(one.logprob))
        return top
