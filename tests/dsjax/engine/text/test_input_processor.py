"""What a request's parameters become on their way in: its rules, made of words and tokens, with what cannot be refused."""

import numpy as np
import pytest
from fake_executor import FakeExecutor
from tiny_tokenizer import tiny_tokenizer

from dsjax.engine.contract.sampling_params import SamplingError, SamplingParams
from dsjax.engine.text.input_processor import EncodedPrompt, InputProcessor, PromptError, bad_word_runs

V = 70  # no multiple of 32


def test_bad_words_are_tokenised_with_and_without_a_space_before_them():
    tokenizer = tiny_tokenizer()
    runs = bad_word_runs(["wörld", " return"], tokenizer)
    word, spaced, other = (tuple(tokenizer.encode(text, False)) for text in ("wörld", " wörld", "return"))
    assert {word, other} <= set(runs)
    assert (spaced in runs) == (len(spaced) == len(runs[0]) and spaced[0] != runs[0][0])
    with pytest.raises(SamplingError, match="tokenizer"):
        bad_word_runs(["a"], None)


@pytest.mark.parametrize(
    ("field", "value"), [("stop_token_ids", [V]), ("logit_bias", {V: 1.0}), ("allowed_token_ids", [0, V + 5])]
)
def test_tokens_outside_the_vocabulary_are_refused_in_every_field(field, value):
    with pytest.raises(SamplingError) as caught:
        InputProcessor(None, FakeExecutor().config, V).make_rules(SamplingParams(**{field: value}))
    assert caught.value.param == field


def prepare(prompt, tokenizer=None, vocab_size=V, **params):
    return InputProcessor(tokenizer, FakeExecutor().config, vocab_size).prepare("a", prompt, SamplingParams(**params))


def test_token_ids_of_the_model_s_tokenizer_are_taken_as_they_are_unless_the_model_has_fewer():
    tokenizer = tiny_tokenizer()
    ids = [tokenizer.vocab_size - 1, 1]
    with pytest.raises(PromptError, match="token 0"):
        prepare(EncodedPrompt(ids), tokenizer)
    prepared = prepare(EncodedPrompt(ids), tokenizer, vocab_size=10_000)
    assert prepared.prompt_token_ids is ids
    assert prepared.completions[0].token_ids == ids
    assert prepared.completions[0].token_ids is not ids, "to which the tokens that are made are added"


@pytest.mark.parametrize(
    "prompt", [np.array([3, 4]), [np.int64(3), np.uint8(4)], {"prompt_token_ids": np.array([3, 4])}]
)
def test_token_ids_may_be_numpy_s(prompt):
    found = prepare(prompt).prompt_token_ids
    assert found == [3, 4]
    assert {type(token) for token in found} == {int}


@pytest.mark.parametrize("wrong", [np.bool_(True), np.float64(3), True])
def test_what_is_no_integer_is_no_token_id(wrong):
    with pytest.raises(PromptError, match="token 1 is"):
        prepare([3, wrong])


def test_a_request_keeps_the_parameters_that_it_was_given():
    params = SamplingParams(max_tokens=3)
    prepared = InputProcessor(None, FakeExecutor().config, V).prepare("a", [3], params)
    params.max_tokens = 9
    assert prepared.completions[0].params.max_tokens == prepared.params.max_tokens == 3


def test_a_seed_is_taken_whole_and_completions_count_on_from_it():
    seeds = lambda seed, n=1: [one.seed for one in prepare([1], seed=seed, n=n).completions]  # noqa: E731
    collided = [1, -2, 2**32, 2**32 - 2, -(2**63), 2**63 - 1, 5, ~5]
    assert [seeds(seed) for seed in collided] == [[seed % 2**64] for seed in collided]
    assert seeds(-3, n=4) == [2**64 - 3, 2**64 - 2, 2**64 - 1, 0]
    assert seeds(-2, n=1) == seeds(-3, n=2)[1:]


def test_a_request_without_rules_has_none_and_completions_do_not_share_theirs():
    inputs = InputProcessor(tiny_tokenizer(), FakeExecutor().config, V, (1,))
    assert inputs.make_rules(SamplingParams(n=2, temperature=0.5, top_p=0.9)) == [None, None]
    first, second = inputs.make_rules(SamplingParams(n=2, presence_penalty=1.0))
    assert first is not second
