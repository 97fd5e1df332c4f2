"""What the device applies of penalties, biases, bans and masks is what the formulas say. Also tests `device/sampler.py`."""

from typing import NamedTuple

import jax
import numpy as np
import pytest

from dsjax.engine.contract.commands import ALWAYS
from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.device import sampler
from dsjax.engine.device.buckets import padded_pieces
from dsjax.engine.device.sampler import BIASES_PER_POSITION, allowed, bias_width, counts_along_drafts, mask_words
from dsjax.engine.text.logit_rules import LogitRules

V = 70  # no multiple of 32
add, penalised = jax.jit(sampler.add_biases), jax.jit(sampler.penalise)


class Row(NamedTuple):
    """A completion at a point of its output, with its rules."""

    prompt: list[int]
    output: list[int]
    params: SamplingParams
    rules: LogitRules

    @property
    def counts(self) -> np.ndarray:
        """What the device has counted: the admission's pairs, spread over the vocabulary."""
        tokens, codes = self.rules.counts(self.prompt, self.output).T
        return np.bincount(tokens, codes, V).astype(np.int32)

    @property
    def mask(self) -> np.ndarray:
        if self.rules.needs_tokens:
            return self.rules.masks(self.output, [])[0]
        return np.full(mask_words(V), -1, np.int32) if self.rules.allowed is None else self.rules.allowed


def request(prompt, output, stop_ids=(), bad_words=(), **params) -> Row:
    params = SamplingParams(max_tokens=5000, **params)
    return Row(prompt, output, params, LogitRules(params, V, frozenset(stop_ids), tuple(bad_words)))


def changed(logits, rows):
    """``[N, V]`` logits after the rules of one rank's rows (None: a row without any), as the device's programs apply them."""
    count = len(logits)
    place, counts = np.zeros(count, np.int32), np.zeros((count, V), np.int32)
    mask = np.full((count, mask_words(V)), -1, np.int32)
    presence, frequency, repetition = np.zeros((3, count), np.float32) + np.array([[0], [0], [1]], np.float32)
    biases = [np.zeros((0, 4), np.int32)]
    for row, one in enumerate(rows):
        if one is not None:
            place[row], counts[row], mask[row] = len(one.output), one.counts, one.mask
            biases.append(np.insert(one.rules.biases(), 0, row, axis=1))
            presence[row], frequency[row] = one.params.presence_penalty, one.params.frequency_penalty
            repetition[row] = one.params.repetition_penalty
    for (piece,) in padded_pieces([np.concatenate(biases)], bias_width(count), -1):
        logits = add(logits, place, piece)
    logits = penalised(logits, counts, presence, frequency, repetition)
    return np.asarray(np.where(allowed(mask, V), logits, -np.inf))


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
    {"frequency_penalty": 0.7},
    {"repetition_penalty": 1.8},
    {"presence_penalty": 0.3, "frequency_penalty": -0.4, "repetition_penalty": 1.3},
    {"logit_bias": {3: 5.0, 69: -100.0, 0: 100.0}},
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
        logits = (rng.normal(size=(1, V)) * 5).astype(np.float32)
        found = changed(logits, [request(prompt, output, **case)])[0]
        expected = published(logits[0], prompt, output, **case)
        np.testing.assert_array_equal(np.isinf(found), np.isinf(expected))
        np.testing.assert_allclose(found, expected, atol=1e-4)  # float32 of values up to 120


def test_a_row_is_changed_by_its_own_request_alone():
    rng = np.random.default_rng(5)
    logits = (rng.normal(size=(16, V)) * 5).astype(np.float32)
    rows, expected = [None] * 16, logits.astype(np.float64)
    for row in range(16):
        own = rng.integers(0, V, 9).tolist(), rng.integers(0, V, row % 4 * 5).tolist()
        if row % 5 != 2:
            rows[row] = request(*own, **CASES[row % len(CASES)])
            expected[row] = published(logits[row], *own, **CASES[row % len(CASES)])
    np.testing.assert_allclose(changed(logits, rows), expected, atol=1e-4)


def test_more_biases_than_one_run_has_room_for_are_applied_in_several_and_on_their_own_rank():
    vocab = 5 * BIASES_PER_POSITION
    logits = np.random.default_rng(6).normal(size=(2, 1, vocab)).astype(np.float32)
    biases = {token: float(token % 7) for token in range(vocab - 3)}
    entries = np.insert(LogitRules(SamplingParams(logit_bias=biases), vocab).biases(), 0, 0, axis=1)
    runs = list(padded_pieces([entries, entries[:0]], bias_width(1), -1))
    assert len(runs) == 5
    found, expected = logits, logits.copy()
    for piece in runs:
        found = np.stack([add(found[rank], np.zeros(1, np.int32), piece[rank]) for rank in range(2)])
    expected[0, 0, : vocab - 3] += np.arange(vocab - 3) % 7
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_each_device_changes_its_part_of_a_vocabulary_that_is_spread():
    rng = np.random.default_rng(7)
    logits, place = rng.normal(size=(2, V)).astype(np.float32), np.zeros(2, np.int32)
    bits = np.float32(-3).view(np.int32)
    biases = np.array([[0, t, bits, ALWAYS] for t in range(0, V, 3)] + [[1, 40, bits, ALWAYS], [-1] * 4], np.int32)
    whole = np.asarray(add(logits, place, biases))
    parts = [add(logits[:, at : at + 14], place, biases, at) for at in range(0, V, 14)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=-1), whole)
    assert whole[1, 40] == logits[1, 40] - 3
    np.testing.assert_array_equal(whole[0, 1::3], logits[0, 1::3])


def test_counts_along_drafts_are_those_of_the_output_with_the_drafts_before():
    prompt, output, drafts = [5, 6, 5], [8, 9], [9, 5, 9]
    counts = request(prompt, output, frequency_penalty=1.0).counts
    # Two rows with drafts, and between them a row of one position.
    rows = [drafts, [], drafts[::-1]]
    tokens, number = [9, *drafts, 9, 9, *drafts[::-1]], [0, 1, 2, 3, 0, 0, 1, 2, 3]
    found = counts_along_drafts(np.tile(counts, (9, 1)), np.array(tokens), np.array(number), 3, 4)
    outputs = [output + own[:place] for own in rows for place in range(1 + len(own))]
    expected = [request(prompt, each, frequency_penalty=1.0).counts for each in outputs]
    np.testing.assert_array_equal(found, expected)
    same = counts_along_drafts(np.tile(counts, (9, 1)), np.full(9, 9), np.arange(9), 8, 4)
    assert np.asarray(same).max() == 2 * 4 + 1
