"""A parameter without meaning is named, and nothing is ignored."""

import pytest

from dsjax.engine.contract.sampling_params import SamplingError, SamplingParams

WRONG = {
    "n": (0, True),
    "temperature": (-0.1, 1e39, float("nan"), "1"),
    "top_p": (0.0, 1.5),
    "top_k": (-2, 1.5),
    "min_p": (1.1, -0.1),
    "seed": (2**63,),
    "max_tokens": (0,),
    "min_tokens": (17,),
    "thinking_token_budget": (-1, 1.5),
    "logprobs": (21, -1),
    "prompt_logprobs": (21,),
    "stop": ([""], [5], 5),
    "stop_token_ids": ([-1], 5),
    "ignore_eos": (1,),
    "presence_penalty": (2.1,),
    "frequency_penalty": (-2.1, float("inf")),
    "repetition_penalty": (0, 1e-30),
    "logit_bias": ({5: 100.5}, {5: float("nan")}, {"5": 1.0}, {-1: 1.0}, [5]),
    "allowed_token_ids": ([], [1.0], "12"),
    "bad_words": (["a", " "], "word", ["a"] * 2_000),
    "structured_outputs": ({"regex": "a"},),
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG.items() for value in values])
def test_a_wrong_value_is_refused_and_its_field_named(field, value):
    with pytest.raises(SamplingError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


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
