"""Penalties, biases, bans and masks: what the host prepares and the device applies is what the published formulas say."""

import jax
import numpy as np
import pytest
from tiny_tokenizer import tiny_tokenizer

from dsjax.engine.logit_edits import EDITS_PER_ROW, Penalties, change, mask_words, pieces
from dsjax.engine.logit_rules import LogitRules, completing, packed
from dsjax.engine.request import Request
from dsjax.engine.rule_maker import RuleMaker, bad_word_runs
from dsjax.engine.sampling_params import SamplingError, SamplingParams

V = 70  # no multiple of 32
run = jax.jit(change)


def request(prompt, output, stop_ids=(), bad_words=(), **params) -> Request:
    params = SamplingParams(max_tokens=5000, **params)
    rules = LogitRules(params, prompt, V, tuple(bad_words))
    return Request("", [*prompt, *output], len(prompt), params, 5000, 0, frozenset(stop_ids), rules=rules)


def changed(logits, rows):
    """``[B, R, V]`` logits after the rules of requests by rank (None: a row without any)."""
    ranks, num_rows, vocab = logits.shape
    penalties, mask = Penalties.none(ranks, num_rows), np.full((ranks, num_rows, mask_words(vocab)), -1, np.int32)
    edits = [[np.zeros((0, 4), np.int32)] for _ in range(ranks)]
    for rank, own in enumerate(rows):
        for row, one in enumerate(own):
            if one is None:
                continue
            entries = one.rules.edits(one)
            if entries is not None:
                edits[rank].append(np.insert(entries, 0, row, axis=1))
            one.rules.fill(mask[rank, row])
            for values, value in zip(
                penalties,
                (one.params.presence_penalty, one.params.frequency_penalty, one.params.repetition_penalty),
                strict=True,
            ):
                values[rank, row] = value
    for piece in pieces([np.concatenate(own) for own in edits], num_rows):
        logits = run(logits, penalties, piece, mask)
    return np.asarray(run(logits, penalties, np.full((ranks, EDITS_PER_ROW * num_rows, 4), -1, np.int32), mask))


def published(logits, prompt, output, stop_ids=(), bad_words=(), **params):
    """vLLM's and OpenAI's definitions, token by token in float64."""
    params = SamplingParams(max_tokens=5000, **params)
    x = logits.astype(np.float64)
    for token in range(len(x)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            x[token] = -np.inf
        for word in bad_words:
            if word[-1] == token and tuple(output[len(output) - len(word) + 1 :]) == tuple(word[:-1]):
                x[token] = -np.inf
        if token in stop_ids and len(output) < params.min_tokens:
            x[token] = -np.inf
        x[token] += (params.logit_bias or {}).get(token, 0.0)
        if token in prompt or token in output:
            x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        x[token] -= params.frequency_penalty * output.count(token)
        x[token] -= params.presence_penalty * (token in output)
    return x


CASES = [
    {"presence_penalty": 1.5},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 0.7},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.5},
    {"presence_penalty": 0.3, "frequency_penalty": -0.4, "repetition_penalty": 1.3},
    {"logit_bias": {3: 5.0, 69: -100.0, 0: 100.0}},
    {"logit_bias": {3: 5.0, 8: -1.0}, "repetition_penalty": 2.0, "frequency_penalty": 1.0},
    {"allowed_token_ids": [0, 31, 32, 63, 64, 69]},
    {"min_tokens": 4000, "stop_ids": range(40)},
    {"min_tokens": 4000, "stop_ids": (5, 6), "logit_bias": {5: 100.0}, "repetition_penalty": 3.0},
    {"bad_words": [(7,), (1, 2, 9), (9, 9)]},
    {"bad_words": [(7,)], "presence_penalty": 1.0, "allowed_token_ids": [7, 8], "logit_bias": {7: 9.0}},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "+".join(case))
def test_logits_are_changed_as_published(case):
    rng = np.random.default_rng(3)
    for output in ([], [4, 1, 2], [9], [7, 7, 7, 30, 9, 69, 1, 2], rng.integers(0, V, 60).tolist()):
        prompt = rng.integers(0, V, 20).tolist()
        logits = (rng.normal(size=(1, 1, V)) * 5).astype(np.float32)
        found = changed(logits, [[request(prompt, output, **case)]])[0, 0]
        expected = published(logits[0, 0], prompt, output, **case)
        np.testing.assert_array_equal(np.isinf(found), np.isinf(expected))
        np.testing.assert_allclose(found, expected, atol=1e-4)  # float32 of values up to 120


def test_a_row_is_changed_by_its_own_request_alone_on_every_rank_and_row():
    rng = np.random.default_rng(5)
    logits = (rng.normal(size=(3, 4, V)) * 5).astype(np.float32)
    rows, expected = [], logits.astype(np.float64)
    for rank in range(3):
        rows.append([])
        for row in range(4):
            case = dict(CASES[(rank * 4 + row) % len(CASES)])
            prompt, output = rng.integers(0, V, 9).tolist(), rng.integers(0, V, row * 5).tolist()
            if row == 2:
                rows[-1].append(None)
                continue
            rows[-1].append(request(prompt, output, **case))
            expected[rank, row] = published(logits[rank, row], prompt, output, **case)
    np.testing.assert_allclose(changed(logits, rows), expected, atol=1e-4)


def test_more_edits_than_one_run_has_room_for_are_applied_in_several():
    rng = np.random.default_rng(6)
    vocab = 5 * EDITS_PER_ROW
    logits = rng.normal(size=(2, 1, vocab)).astype(np.float32)
    params = SamplingParams(max_tokens=5000, presence_penalty=1.0, frequency_penalty=0.25)
    output = [*range(vocab - 3), 0, 0]
    one = Request("", [1, *output], 1, params, 5000, 0, rules=LogitRules(params, [1], vocab))
    edits = np.insert(one.rules.edits(one), 0, 0, axis=1)
    assert len(list(pieces([edits, edits[:0]], 1))) == 5
    found = changed(logits, [[one], [None]])
    expected = logits.copy()
    expected[0, 0, : vocab - 3] -= 1.25
    expected[0, 0, 0] -= 0.5
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_each_device_changes_its_part_of_a_vocabulary_that_is_spread():
    rng = np.random.default_rng(7)
    logits = rng.normal(size=(1, 2, V)).astype(np.float32)
    penalties = Penalties.none(1, 2)
    penalties.presence[:] = 1.0
    edits = np.array([[[0, t, 0, 2] for t in range(0, V, 3)] + [[1, 40, 0, 2], [-1, -1, -1, -1]]], np.int32)
    mask = packed(range(1, V), V)[None, None].repeat(2, 1)
    whole = np.asarray(change(logits, penalties, edits, mask))
    parts = [change(logits[..., at : at + 14], penalties, edits, mask, at) for at in range(0, V, 14)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=-1), whole)
    assert np.isinf(whole[..., 0]).all()
    assert whole[0, 1, 40] == logits[0, 1, 40] - 1


def test_counts_follow_the_output_as_it_grows_and_survive_being_asked_twice():
    prompt = [5, 6, 5]
    one = request(prompt, [], frequency_penalty=1.0, repetition_penalty=2.0)
    logits = np.ones((1, 1, V), np.float32) * 4
    for token in [8, 5, 8, 9, 8]:
        one.rules.edits(one)  # asked in between, as when a launch is planned again
        one.token_ids.append(token)
        output = one.output_token_ids
        expected = published(logits[0, 0], prompt, output, frequency_penalty=1.0, repetition_penalty=2.0)
        np.testing.assert_allclose(changed(logits, [[one]])[0, 0], expected)


def test_rules_are_active_only_while_they_change_something():
    waiting = request([1], [2], stop_ids=(3,), min_tokens=2)
    assert waiting.rules.active(waiting)
    waiting.token_ids.append(4)
    assert not waiting.rules.active(waiting)
    assert waiting.rules.edits(waiting) is None
    assert not waiting.rules.masks


def test_bad_words_are_tokenised_with_and_without_a_space_before_them():
    tokenizer = tiny_tokenizer()
    runs = bad_word_runs(["wörld", " return"], tokenizer)
    assert tuple(tokenizer.encode("wörld", add_special_tokens=False)) in runs
    spaced = tuple(tokenizer.encode(" wörld", add_special_tokens=False))
    assert (spaced in runs) == (len(spaced) == len(runs[0]) and spaced[0] != runs[0][0])
    assert tuple(tokenizer.encode("return", add_special_tokens=False)) in runs
    with pytest.raises(SamplingError, match="tokenizer"):
        bad_word_runs(["a"], None)


def test_a_bad_word_s_last_token_is_banned_only_behind_the_others():
    runs = ((4,), (1, 2, 3), (2, 2))
    assert completing(runs, []) == {4}
    assert completing(runs, [1]) == {4}
    assert completing(runs, [1, 2]) == {4, 3, 2}
    assert completing(runs, [2, 1]) == {4}
    assert completing(runs, [9, 1, 2]) == {4, 3, 2}


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
        RuleMaker(None, V, ()).make(SamplingParams(**params), [1])
    assert caught.value.param == field


def test_a_request_without_rules_has_none_and_completions_do_not_share_theirs():
    maker = RuleMaker(tiny_tokenizer(), V, (1,))
    assert maker.make(SamplingParams(n=2, temperature=0.5, top_p=0.9), [1]) == [None, None]
    first, second = maker.make(SamplingParams(n=2, presence_penalty=1.0), [1])
    assert first is not second
