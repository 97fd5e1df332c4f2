"""The parts of an answer: completions that failed, usage, and log-probabilities in OpenAI's and vLLM's shapes."""

import codecs
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dsjax.engine.contract.executor import ErrorKind
from dsjax.engine.request_streams import OutputStream
from dsjax.engine.schedule.request import FinishReason
from dsjax.engine.text.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from dsjax.engine.text.tokenizer import Tokenizer
from dsjax.serve.bodies import to_json
from dsjax.serve.errors import ApiError
from dsjax.serve.schemas import CompletionLogprobs, Usage

# JSON has no -inf. OpenAI's clients know this number, which vLLM also sends.
_LEAST_LOGPROB = -9999.0


async def gather(stream: OutputStream) -> list[RequestOutput]:
    """The final output of every prompt of a stream, in the prompts' order."""
    outputs = {index: output async for index, output in stream}
    for output in outputs.values():
        for completion in output.outputs:
            refuse_failed(completion)
    return [outputs[index] for index in sorted(outputs)]


def refuse_failed(completion: CompletionOutput) -> None:
    """Raise for a completion that did not end by itself: OpenAI's API has no finish reason for that."""
    if completion.finish_reason is FinishReason.ERROR:
        if completion.error is ErrorKind.NON_FINITE:
            raise ApiError(500, str(completion.stop_reason), type="server_error", code=completion.error)
        # What the request asked for came to nothing. Clients repeat a 5xx by themselves, which would not help here.
        param = "structured_outputs" if completion.error is ErrorKind.STRUCTURED_OUTPUT else None
        raise ApiError(400, str(completion.stop_reason), param=param, code=completion.error)
    if completion.finish_reason is FinishReason.ABORT:
        raise ApiError(503, "the request was aborted", type="server_error", code="aborted")


class TextChunk:
    """The JSON of a stream's chunks that differ in their text alone. What is around the text is encoded once.

    Most tokens of a stream of `/v1/completions` make such a chunk.

    Args:
        chunk: one of them, its text empty.
        empty: how its JSON has the text, `"text":""`; no string within JSON can hold that, as it escapes its quotes.
    """

    def __init__(self, chunk: Mapping[str, Any], empty: bytes):
        before, _, self._after = to_json(chunk).partition(empty)
        self._before = before + empty[:-2]

    def with_text(self, text: str) -> bytes:
        """The chunk's JSON with this text."""
        return b"%b%b%b" % (self._before, to_json(text), self._after)


class UsageCounter:
    """Counts the tokens of a request while its outputs go by: each output's tokens are counted once."""

    def __init__(self):
        self._prompts: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._completion_tokens = 0
        self._reasoning_tokens: dict[int, int] = {}

    def count(self, index: int, output: RequestOutput) -> None:
        """Enter an output of prompt `index`, whose completions hold tokens not yet counted."""
        self._prompts[index] = len(output.prompt_token_ids)
        self._cached[index] = output.num_cached_tokens or 0
        for completion in output.outputs:
            self._completion_tokens += len(completion.token_ids)

    def count_reasoning(self, completion: int, tokens: int) -> None:
        """Enter how many tokens of a completion are reasoning by now."""
        self._reasoning_tokens[completion] = tokens

    def usage(self) -> Usage:
        """The sums."""
        prompt = sum(self._prompts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
            "completion_tokens_details": {"reasoning_tokens": sum(self._reasoning_tokens.values())},
        }


def usage_of(outputs: Iterable[RequestOutput]) -> Usage:
    """The usage of final outputs."""
    counter = UsageCounter()
    for index, output in enumerate(outputs):
        counter.count(index, output)
    return counter.usage()


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return logprob if math.isfinite(logprob) else _LEAST_LOGPROB


def prompt_logprobs_body(entries: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """A prompt's log-probabilities in vLLM's shape: for each token but the first, token id to value, rank and text."""
    return [
        entry
        and {
            str(token_id): {"logprob": finite(one.logprob), "rank": one.rank, "decoded_token": one.decoded_token}
            for token_id, one in entry.items()
        }
        for entry in entries
    ]


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text where it stands alone, as OpenAI writes it.

    A token that is no whole characters is written as its bytes, `bytes:\\xe2\\x80`, so that two are never taken for one.
    """
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class CompletionLogprobLists:
    """The log-probabilities of a `/v1/completions` choice as lists over its tokens, the prompt's too with `echo`.

    A stream makes them piece by piece: `text_offset` goes on where the last piece ended.

    Args:
        skip_special_tokens: whether the text is without special tokens, so that they take no place in it.
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
