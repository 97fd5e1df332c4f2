"""Translates Dynamo's requests to the engine's, and the engine's outputs to Dynamo's chunks. Nothing here imports Dynamo.

A request is a dictionary with `token_ids`, `sampling_options`, `stop_conditions`, `output_options`, `routing` and `extra_args`. The
frontend tokenises the prompt, detokenises the output, and checks it for stop strings: the engine sees only tokens.
"""

import array
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dsjax.engine.contract.sampling_params import OutputKind, SamplingError, SamplingParams, StructuredOutputs
from dsjax.engine.schedule.request import FinishReason, RequestOptions
from dsjax.engine.text.outputs import CompletionOutput, RequestOutput, TokenLogprobs

Chunk = dict[str, Any]

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_PASSED_THROUGH = ("logit_bias", "allowed_token_ids", "bad_words")
"""Fields of `extra_args.sampling_options`, which has the client's options beyond the frontend's own fields."""
_FRONTENDS = ("include_stop_str_in_output", "guided_decoding", "n", "best_of", "use_beam_search", "length_penalty")
"""Options that are read below or handled by the frontend."""
_FORMS = ("json", "regex", "choice", "grammar")


@dataclass(frozen=True)
class ThinkingTokens:
    """Ids of the tokens that begin and end a model's reasoning; `begin` is None if the template writes it as text."""

    begin: int | None
    end: int

    def is_open(self, token_ids: list[int]) -> bool:
        """Return whether a prompt ends within reasoning."""
        for token_id in reversed(token_ids):
            if token_id in (self.begin, self.end):
                return token_id == self.begin
        return False


@dataclass(frozen=True)
class Translated:
    """A request as `AsyncEngine.submit` takes it."""

    token_ids: list[int]
    params: SamplingParams
    # the DP rank that the router has chosen, if any; the priority; the salt; and the prefill worker that computes the prompt, if any
    options: RequestOptions
    # the number that identifies the request on both sides if the frontend sent it to both at once
    room: int | None = None


def translate(request: Mapping[str, Any], thinking: ThinkingTokens | None = None) -> Translated:
    """Translate a request.

    Args:
        thinking: the model's reasoning tokens; if the prompt ends within reasoning, the structured output starts after the reasoning.

    Raises:
        SamplingError: invalid value, or an option that this engine does not support; no option is silently ignored.
    """
    token_ids = _token_ids(request.get("token_ids"))
    options = _given(request, "sampling_options")
    extra = _given(request, "extra_args")
    passed = _given(extra, "sampling_options")
    stops = _given(request, "stop_conditions")
    output_options = _given(request, "output_options")
    routing = _given(request, "routing")
    _refuse_unknown(options | passed)
    options = options | passed
    hidden = stops.get("stop_token_ids_hidden") or ()
    params = SamplingParams(
        **{name: options[name] for name in (*_SAMPLING, *_PENALTIES) if name in options},
        logit_bias=_logit_bias(options.get("logit_bias")),
        allowed_token_ids=options.get("allowed_token_ids"),
        bad_words=options.get("bad_words"),
        stop_token_ids=tuple(dict.fromkeys((*(stops.get("stop_token_ids") or ()), *hidden))),
        ignore_eos=bool(stops.get("ignore_eos")),
        max_tokens=stops.get("max_tokens"),
        min_tokens=stops.get("min_tokens", 0),
        thinking_token_budget=stops.get("max_thinking_tokens"),
        logprobs=output_options.get("logprobs"),
        prompt_logprobs=output_options.get("prompt_logprobs"),
        structured_outputs=_form(request, _given(options, "guided_decoding"), token_ids, thinking),
        detokenize=False,
        output_kind=OutputKind.DELTA,
    )
    salt = routing.get("cache_salt") or _given(extra, "nvext").get("cache_salt")
    # The engine's thread hashes the salt, and an error there would end all requests.
    if not isinstance(salt, str | None):
        raise SamplingError("cache_salt", f"found {salt!r}, expected text")
    rank = routing.get("dp_rank")
    # Dynamo runs the highest priority first; dsjax, like vLLM, the lowest.
    priority = -int(routing.get("priority", 0))
    rank = None if rank is None else int(rank)
    bootstrap = _given(request, "bootstrap_info")
    return Translated(
        token_ids,
        params,
        RequestOptions(priority, salt, dp_rank=rank, prefill=_prefill(request, bootstrap)),
        bootstrap.get("bootstrap_room"),
    )


class Chunks:
    """Makes the chunks of one request's answer, which has one completion, and counts its tokens."""

    def __init__(self, num_prompt_tokens: int):
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = 0
        self._num_cached: int | None = None
        self._prompt_logprobs: list[dict[str, Any] | None] | None = None

    def of(self, output: RequestOutput) -> Iterator[Chunk]:
        """Yield the chunk of an output that has new tokens or is finished.

        Raises:
            CompletionError: the completion has failed.
        """
        self._num_cached = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = [entry and _prompt_entry(entry) for entry in output.prompt_logprobs]
        for completion in output.outputs:
            self._num_tokens += len(completion.token_ids)
            if completion.finish_reason is FinishReason.ERROR:
                raise CompletionError(str(completion.stop_reason))
            if completion.token_ids or completion.finished:
                yield self._chunk(completion)

    def last(self, finish_reason: str) -> Chunk:
        """Return a last chunk without tokens, for an answer that ends with `finish_reason`."""
        return {"token_ids": [], "index": 0, "finish_reason": finish_reason, "completion_usage": self._usage()}

    def _chunk(self, completion: CompletionOutput) -> Chunk:
        chunk: Chunk = {"token_ids": completion.token_ids, "index": completion.index}
        if completion.logprobs:
            chunk["log_probs"] = [
                entry[token_id].logprob
                for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True)
            ]
            chunk["top_logprobs"] = [_top(entry) for entry in completion.logprobs]
        if completion.finished:
            chunk["finish_reason"] = _REASONS[completion.finish_reason]
            chunk["completion_usage"] = self._usage()
            if isinstance(completion.stop_reason, int):
                chunk["stop_reason"] = completion.stop_reason
            if self._prompt_logprobs is not None:
                chunk["engine_data"] = {"prompt_logprobs": self._prompt_logprobs}
        return chunk

    def _usage(self) -> dict[str, Any]:
        details = None if self._num_cached is None else {"cached_tokens": self._num_cached}
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_tokens,
            "prompt_tokens_details": details,
        }


class CompletionError(Exception):
    """A completion ended with an error that the client did not cause."""


_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "cancelled"}


def _given(holder: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the options of a group that have a value; the frontend writes null for all others.

    Raises:
        SamplingError: the group is not an object; `extra_args` may contain unvalidated client input.
    """
    options = holder.get(name)
    if not isinstance(options, Mapping | None):
        raise SamplingError(name, f"found {options!r}, expected an object")
    return {option: value for option, value in (options or {}).items() if value is not None}


def _token_ids(value: Any) -> list[int]:
    """Return the token ids of a list or of packed little-endian 32-bit integers, which the request plane may pass on."""
    if isinstance(value, bytes | bytearray | memoryview):
        packed = array.array("i")
        packed.frombytes(bytes(value))
        if sys.byteorder != "little":
            packed.byteswap()
        return packed.tolist()
    return [int(token_id) for token_id in (() if value is None else value)]


def _refuse_unknown(options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in (*_SAMPLING, *_PENALTIES, *_PASSED_THROUGH, *_FRONTENDS):
            raise SamplingError(name, "this engine has no such sampling option; leave it out")
    if options.get("n", 1) != 1 or options.get("best_of", 1) != 1:
        # Dynamo's terminal chunk is the first one with a finish reason, whichever completion it belongs to.
        raise SamplingError(
            "n", "found more than 1, and Dynamo ends an answer with its first completion; send several requests"
        )
    if options.get("use_beam_search") or options.get("length_penalty") not in (None, 1.0):
        raise SamplingError("use_beam_search", "there is no beam search; leave it and length_penalty out")


def _logit_bias(value: Any) -> dict[int, float] | None:
    try:
        return None if not value else {int(token_id): bias for token_id, bias in dict(value).items()}
    except (TypeError, ValueError) as error:
        raise SamplingError("logit_bias", f"found {value!r}, expected token ids with numbers") from error


def _form(
    request: Mapping[str, Any], guided: Mapping[str, Any], token_ids: list[int], thinking: ThinkingTokens | None
) -> StructuredOutputs | None:
    """Read `guided_decoding`: one of `_FORMS`. Not read: `backend` and `whitespace_pattern`, which choose among vLLM's libraries."""
    # An empty schema is valid: it allows any JSON.
    forms = {name: guided[name] for name in _FORMS if guided.get(name) not in (None, "", [])}
    if "structural_tag" in guided:
        raise SamplingError(
            "structural_tag", "not supported; start the worker without --dyn-structural-tag, or give a JSON schema"
        )
    if not forms:
        return None
    after = thinking.end if thinking and (request.get("require_reasoning") or thinking.is_open(token_ids)) else None
    return StructuredOutputs(**forms, structured_after=after)


def _prefill(request: Mapping[str, Any], bootstrap: Mapping[str, Any]) -> dict[str, str] | None:
    """Return where the prompt is computed, according to its prefill worker, or to the frontend if it has sent the request to both sides."""
    params = _given(_given(request, "prefill_result"), "disaggregated_params")
    if {"address", "transfer"} <= params.keys():
        return {"address": params["address"], "transfer": params["transfer"]}
    if {"bootstrap_host", "bootstrap_port", "bootstrap_room"} <= bootstrap.keys():
        from dsjax.addresses import join_address
        from dsjax.engine.transfer.page_network import handoff

        return handoff(
            join_address(bootstrap["bootstrap_host"], bootstrap["bootstrap_port"]), bootstrap["bootstrap_room"]
        )
    return None


def _top(entry: TokenLogprobs) -> list[dict[str, Any]]:
    """Return the sampled token, then the most probable ones. The frontend adds their text, as it has the tokenizer."""
    return [
        {"rank": logprob.rank or 0, "token_id": token_id, "token": logprob.decoded_token, "logprob": logprob.logprob}
        for token_id, logprob in entry.items()
    ]


def _prompt_entry(entry: TokenLogprobs) -> dict[str, Any]:
    """Return the logprobs of one prompt position; token ids are strings, as in JSON."""
    return {
        str(token_id): {"logprob": logprob.logprob} | ({} if logprob.rank is None else {"rank": logprob.rank})
        for token_id, logprob in entry.items()
    }
