"""A parameter without meaning is named, and nothing is ignored."""

import pytest

from dsjax.engine.contract.sampling_params import SamplingError, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", True),
        ("temperature", -0.1),
        ("temperature", 1e39),
        ("temperature", float("nan")),
        ("temperature", "1"),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("seed", 2**63),
        ("max_tokens", 0),
        ("min_tokens", 17),
        ("logprobs", 21),
        ("logprobs", -1),
        ("stop", [""]),
        ("stop", [5]),
        ("stop", 5),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 5),
        ("ignore_eos", 1),
        ("prompt_logprobs", 21),
        ("min_p", 1.1),
        ("min_p", -0.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", float("inf")),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-30),
        ("logit_bias", {5: 100.5}),
        ("logit_bias", {5: float("nan")}),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", [5]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [1.0]),
        ("allowed_token_ids", "12"),
        ("bad_words", ["a", " "]),
        ("bad_words", "word"),
        ("bad_words", ["a"] * 2_000),
        ("structured_outputs", {"regex": "a"}),
    ],
)
def test_a_wrong_value_is_refused_and_its_field_named(field, value):
    with pytest.raises(SamplingError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


def test_unknown_fields_are_an_error():
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)


def test_stop_strings_need_text():
    with pytest.raises(SamplingError, match="detokenize"):
        SamplingParams(stop="a", detokenize=False)


def test_defaults_and_spellings_are_those_of_vllm():
    params = SamplingParams(stop="a", seed=-1)
    assert (params.max_tokens, params.temperature, params.top_p, params.n) == (16, 1.0, 1.0, 1)
    assert (params.stop, params.seed, params.greedy) == (("a",), None, False)
    assert SamplingParams(temperature=0).greedy


def test_only_values_that_change_something_count_as_penalties():
    assert not SamplingParams(presence_penalty=0, frequency_penalty=0.0, repetition_penalty=1).penalises
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert SamplingParams(**{name: 0.5}).penalises
