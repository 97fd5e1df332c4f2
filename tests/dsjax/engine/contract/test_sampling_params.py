"""A parameter without meaning is named, and nothing is ignored."""

import dataclasses

import numpy as np
import pytest

from dsjax.engine.contract.sampling_params import SamplingError, SamplingParams, StructuredOutputs

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
    "stop_token_ids": ([-1], 5, np.array(5), [np.float32(1)]),
    "ignore_eos": (1,),
    "presence_penalty": (2.1,),
    "frequency_penalty": (-2.1, float("inf")),
    "repetition_penalty": (0, 1e-30),
    "logit_bias": ({5: 100.5}, {5: float("nan")}, {"5": 1.0}, {-1: 1.0}, [5]),
    "allowed_token_ids": ([], [1.0], "12"),
    "bad_words": (["a", " "], "word", ["a"] * 2_000),
    "structured_outputs": ({"yaml": "a"}, "a"),
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


def test_positional_arguments_are_in_vllm_s_order():
    given = SamplingParams(2, 0.1, 0.2, 1.5, 0.7, 0.9, 5, 0.05, 3, "s", [4], True, 8, 1, 2, 3)
    named = {
        "n": 2, "presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.5, "temperature": 0.7, "top_p": 0.9,
        "top_k": 5, "min_p": 0.05, "seed": 3, "stop": ("s",), "stop_token_ids": (4,), "ignore_eos": True, "max_tokens": 8,
        "min_tokens": 1, "logprobs": 2, "prompt_logprobs": 3,
    }  # fmt: skip
    assert given == SamplingParams(**named)
    with pytest.raises(TypeError):
        SamplingParams(*named.values(), {5: 1.0})


def test_numpy_s_numbers_and_arrays_are_taken_as_python_s():
    numbers = {"n": np.int64(2), "temperature": np.float32(0.5), "top_k": np.uint8(3), "seed": np.int32(-3)}
    tokens = {"stop_token_ids": np.array([4, 5]), "allowed_token_ids": [np.int16(6)]}
    params = SamplingParams(**numbers, **tokens, logit_bias={np.int64(7): np.float32(1.5)})
    [(biased, bias)] = params.logit_bias.items()
    found = [params.n, params.temperature, params.top_k, params.seed, *params.stop_token_ids]
    found += [*params.allowed_token_ids, biased, bias]
    assert found == [2, 0.5, 3, -3, 4, 5, 6, 7, 1.5]
    assert [type(one) for one in found] == [int, float, *[int] * 6, float]


def test_a_field_can_be_changed_to_what_it_could_be_made_with_and_to_nothing_else():
    params = SamplingParams(max_tokens=5, stop="a")
    params.max_tokens, params.stop = np.int64(7), "b"
    assert params == SamplingParams(max_tokens=7, stop=["b"])
    for name, wrong, error in (("top_p", 2, SamplingError), ("min_tokens", 8, SamplingError), ("top_q", 1, TypeError)):
        with pytest.raises(error):
            setattr(params, name, wrong)
    assert params == SamplingParams(max_tokens=7, stop=["b"])


def test_a_clone_is_changed_by_itself():
    params = SamplingParams(logit_bias={5: 1.0}, structured_outputs={"regex": "a"})
    assert params.structured_outputs == StructuredOutputs(regex="a")
    with pytest.raises(SamplingError, match="found the unknown field yaml; the fields are json, "):
        SamplingParams(structured_outputs={"yaml": "a"})
    clone = params.clone()
    assert clone == params
    clone.logit_bias[6], clone.n = 2.0, 2
    assert (params.n, params.logit_bias) == (1, {5: 1.0})
    assert dataclasses.replace(clone, n=1, logit_bias={5: 1.0}) == params
