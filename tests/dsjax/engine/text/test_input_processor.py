"""What a request's parameters become on their way in: its rules, made of words and tokens, with what cannot be refused."""

import pytest
from tiny_tokenizer import tiny_tokenizer

from dsjax.engine.contract.sampling_params import SamplingError, SamplingParams
from dsjax.engine.text.input_processor import RuleMaker, bad_word_runs

V = 70  # no multiple of 32


def test_bad_words_are_tokenised_with_and_without_a_space_before_them():
    tokenizer = tiny_tokenizer()
    runs = bad_word_runs(["wörld", " return"], tokenizer)
    assert tuple(tokenizer.encode("wörld", add_special_tokens=False)) in runs
    spaced = tuple(tokenizer.encode(" wörld", add_special_tokens=False))
    assert (spaced in runs) == (len(spaced) == len(runs[0]) and spaced[0] != runs[0][0])
    assert tuple(tokenizer.encode("return", add_special_tokens=False)) in runs
    with pytest.raises(SamplingError, match="tokenizer"):
        bad_word_runs(["a"], None)


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("stop_token_ids", {"stop_token_ids": [V]}),
        ("logit_bias", {"logit_bias": {V: 1.0}}),
        ("allowed_token_ids", {"allowed_token_ids": [0, V + 5]}),
    ],
)
def test_tokens_outside_the_vocabulary_are_refused_in_every_field(field, params):
    with pytest.raises(SamplingError) as caught:
        RuleMaker(None, V, ()).make(SamplingParams(**params))
    assert caught.value.param == field


def test_a_request_without_rules_has_none_and_completions_do_not_share_theirs():
    maker = RuleMaker(tiny_tokenizer(), V, (1,))
    assert maker.make(SamplingParams(n=2, temperature=0.5, top_p=0.9)) == [None, None]
    first, second = maker.make(SamplingParams(n=2, presence_penalty=1.0))
    assert first is not second
