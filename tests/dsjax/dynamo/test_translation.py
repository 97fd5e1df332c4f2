"""Dynamo's requests as the engine's, and its chunks, without Dynamo: what a frontend of release 1.6.1 was seen to send."""

import struct

import pytest

from dsjax.dynamo.translation import Chunks, CompletionError, ThinkingTokens, translate
from dsjax.engine.contract.executor import ErrorKind
from dsjax.engine.contract.sampling_params import OutputKind, SamplingError, SamplingParams, StructuredOutputs
from dsjax.engine.schedule.request import FinishReason
from dsjax.engine.text.outputs import CompletionOutput, Logprob, RequestOutput

NULLS = {
    "stop_conditions": "max_tokens stop stop_token_ids stop_token_ids_visible stop_token_ids_hidden min_tokens ignore_eos",
    "sampling_options": "n best_of presence_penalty temperature top_p top_k seed use_beam_search guided_decoding",
    "output_options": "logprobs prompt_logprobs skip_special_tokens",
}
"""What the frontend writes as null where a client has not given it."""
SAME = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": -7, "presence_penalty": 0.5}
"""Options that the engine calls as Dynamo does."""
ALWAYS = {"detokenize": False, "output_kind": OutputKind.DELTA}


def request(**changes) -> dict:
    """A request with null for everything that its client did not give, as the frontend writes it."""
    groups = {name: dict.fromkeys(NULLS[name].split()) | changes.pop(name, {}) for name in NULLS}
    return {"model": "demo", "token_ids": [5, 6, 7], "eos_token_ids": [1], **groups, **changes}


def test_nulls_are_the_engines_defaults_and_packed_token_ids_little_endian_integers_of_32_bits():
    assert translate(request()).params == SamplingParams(max_tokens=None, **ALWAYS)
    assert translate(request(token_ids=struct.pack("<3i", 1, 2, 129_279))).token_ids == [1, 2, 129_279]


def test_every_option_reaches_the_engine():
    stops = {"stop_token_ids": [3, 4], "stop_token_ids_hidden": [4, 1], "stop": ["the frontend's"]}
    same = {"max_tokens": 9, "min_tokens": 2, "ignore_eos": True}
    scores = {"logprobs": 3, "prompt_logprobs": 1}
    beside = {"allowed_token_ids": [1, 2], "bad_words": ["x"]}
    given = request(
        stop_conditions={**same, **stops, "max_thinking_tokens": 5},
        sampling_options=SAME,
        output_options={**scores, "skip_special_tokens": False},
        extra_args={"sampling_options": {**beside, "logit_bias": {"5": 3}}},
        routing={"dp_rank": 3, "priority": 2, "cache_salt": "salt"},
    )
    read, renamed = translate(given), {"logit_bias": {5: 3}, "stop_token_ids": [3, 4, 1], "thinking_token_budget": 5}
    assert (read.token_ids, read.options.dp_rank, read.options.cache_salt) == ([5, 6, 7], 3, "salt")
    assert read.options.priority == -2, "Dynamo runs the highest first, dsjax the lowest"
    assert read.params == SamplingParams(**SAME, **same, **scores, **beside, **renamed, **ALWAYS)


@pytest.mark.parametrize(("changes", "param"), [
    ({"sampling_options": {"n": 2}}, "n"),
    ({"sampling_options": {"best_of": 3}}, "n"),
    ({"sampling_options": {"use_beam_search": True}}, "use_beam_search"),
    ({"sampling_options": {"length_penalty": 0.5}}, "use_beam_search"),
    ({"sampling_options": {"dry_multiplier": 1}}, "dry_multiplier"),
    ({"extra_args": {"sampling_options": {"xtc_probability": 0.1}}}, "xtc_probability"),
    ({"extra_args": {"sampling_options": {"logit_bias": [3]}}}, "logit_bias"),
    ({"extra_args": {"sampling_options": [3]}}, "sampling_options"),
    ({"extra_args": {"sampling_options": {"guided_decoding": "json"}}}, "guided_decoding"),
    ({"extra_args": "text"}, "extra_args"),
    ({"extra_args": {"nvext": 5}}, "nvext"),
    ({"extra_args": {"nvext": {"cache_salt": 5}}}, "cache_salt"),
    ({"sampling_options": {"guided_decoding": {"json": False}}}, "structured_outputs.json"),
    ({"sampling_options": {"temperature": -1}}, "temperature"),
    ({"sampling_options": {"guided_decoding": {"structural_tag": {"type": "structural_tag"}}}}, "structural_tag"),
    ({"output_options": {"logprobs": 21}}, "logprobs"),
])  # fmt: skip
def test_what_the_engine_has_not_is_refused_by_name(changes, param):
    with pytest.raises(SamplingError) as refusal:
        translate(request(**changes))
    assert refusal.value.param == param


THINKING = ThinkingTokens(begin=20, end=21)


@pytest.mark.parametrize(("token_ids", "required", "after"), [
    ([5, 6], False, None),
    ([5, 20], False, 21),
    ([5, 20, 7], False, 21),
    ([20, 7, 21, 5], False, None),
    ([5, 6], True, 21),
])  # fmt: skip
def test_a_form_binds_behind_reasoning_where_the_prompt_ends_within_it(token_ids, required, after):
    guided = {"sampling_options": {"guided_decoding": {"regex": "[0-9]+", "json": None}}}
    read = translate(request(token_ids=token_ids, require_reasoning=required, **guided), THINKING)
    assert read.params.structured_outputs == StructuredOutputs(regex="[0-9]+", structured_after=after)


@pytest.mark.parametrize("given", [{"json": {}, "choice": []}, {"json": True}], ids=["no schema", "true"])
def test_a_schema_that_allows_any_json_is_a_form_too(given):
    read = translate(request(sampling_options={"guided_decoding": given}))
    assert read.params.structured_outputs == StructuredOutputs(json={})


def output(token_ids: list[int], reason: FinishReason | None = None, **changes) -> RequestOutput:
    completion = CompletionOutput(0, "", token_ids, finish_reason=reason, **changes.pop("completion", {}))
    return RequestOutput("a", None, [5, 6, 7], [completion], reason is not None, num_cached_tokens=2, **changes)


def test_chunks_have_the_new_tokens_and_the_last_one_the_reason_and_the_usage():
    chunks = Chunks(3)
    assert list(chunks.of(output([8]))) == [{"token_ids": [8], "index": 0}]
    assert list(chunks.of(output([]))) == []
    (last,) = chunks.of(output([9, 1], FinishReason.STOP))
    assert (last["token_ids"], last["finish_reason"]) == ([9, 1], "stop")
    usage = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    assert last["completion_usage"] == {**usage, "prompt_tokens_details": {"cached_tokens": 2}}


def test_log_probabilities_are_of_the_tokens_taken_with_the_most_probable_ones_beside_them():
    scores = [{8: Logprob(-1.5, 2), 9: Logprob(-0.5, 1)}]
    chunks = Chunks(3)
    (chunk,) = chunks.of(output([8], completion={"logprobs": scores}, prompt_logprobs=[None, {6: Logprob(-3.0, 7)}]))
    assert chunk["log_probs"] == [-1.5]
    best = [(one["rank"], one["token_id"], one["logprob"]) for one in chunk["top_logprobs"][0]]
    assert best == [(2, 8, -1.5), (1, 9, -0.5)]
    assert "engine_data" not in chunk
    (last,) = chunks.of(output([1], FinishReason.LENGTH))
    assert last["engine_data"] == {"prompt_logprobs": [None, {"6": {"logprob": -3.0, "rank": 7}}]}


def test_a_failed_completion_is_an_error_and_a_cancelled_answer_ends_with_a_chunk_that_says_so():
    failed = output([], FinishReason.ERROR, completion={"stop_reason": "not finite", "error": ErrorKind.NON_FINITE})
    with pytest.raises(CompletionError, match="not finite"):
        list(Chunks(3).of(failed))
    chunks = Chunks(3)
    list(chunks.of(output([8, 9])))
    assert chunks.last("cancelled")["finish_reason"] == "cancelled"
    assert chunks.last("cancelled")["completion_usage"]["completion_tokens"] == 2


def test_a_prompt_that_is_computed_elsewhere_is_named_as_its_prefill_worker_or_the_frontend_has_said():
    told = {"address": "10.0.0.7:9000", "transfer": "abc"}
    result = {"disaggregated_params": {**told, "worker_id": None}}
    assert translate(request(prefill_result=result)).options.prefill == told
    both = {"bootstrap_host": "fd00::7", "bootstrap_port": 9000, "bootstrap_room": 77}
    read = translate(request(bootstrap_info=both))
    # As `PrefillServer.prefill` names it.
    assert (read.room, read.options.prefill) == (77, {"address": "[fd00::7]:9000", "transfer": "room-77"})
    assert translate(request(prefill_result={"disaggregated_params": {}})).options.prefill is None
