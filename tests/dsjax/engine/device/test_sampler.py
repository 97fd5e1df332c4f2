"""The next token: greedy, drawn from the right distribution, reproducible wherever a row stands."""

from typing import NamedTuple

import jax
import numpy as np
import pytest
import scipy.special

from dsjax.engine.contract.sampling_params import MAX_LOGPROBS
from dsjax.engine.device import sampler
from dsjax.engine.device.sampler import NONE_ALLOWED, SamplingOps, SlotSampling, greedy
from dsjax.model.softmax import log_softmax

V = 24
DRAWS = 4096
LOGITS = (np.random.default_rng(0).normal(size=V) * 1.5).astype(np.float32)

run, scores_of, threshold = jax.jit(sampler.sample), jax.jit(sampler.score), jax.jit(sampler._threshold)


class Row(NamedTuple):
    """A row's settings, as ``SlotSampling`` has them, and how many tokens it has made."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    seed_high: int = 0
    made: int = 0


def settings(ranks: int, count: int, rows_of_ranks=()) -> tuple[SlotSampling, np.ndarray]:
    """Rows by rank, and how many tokens each has made; those without settings are greedy."""
    dtypes = {"seed": np.uint32, "seed_high": np.uint32, "top_k": np.int32, "made": np.int32}
    arrays = {name: np.zeros((ranks, count), dtypes.get(name, np.float32)) for name in Row._fields}
    arrays["top_p"][:] = 1
    for rank, rows in enumerate(rows_of_ranks):
        for row, one in enumerate(rows):
            for name, value in one._asdict().items() if one else ():
                arrays[name][rank, row] = value
    made = arrays.pop("made")
    unused = dict.fromkeys(("num_prompt_tokens", "presence", "frequency", "repetition"), made)
    return SlotSampling(**arrays, **unused), made


def sampled(logits, rows_of_requests, changed=None):
    """Tokens of ``[B, R, V]`` logits, or of what they were changed to, for requests by rank; rows without one are greedy."""
    logits = np.asarray(logits, np.float32)
    rows, made = settings(*logits.shape[:2], rows_of_requests)
    given = [one for own in rows_of_requests for one in own if one is not None]
    wanted = SamplingOps(np.array(any(one.top_k > 0 or one.top_p < 1 for one in given)))
    return jax.device_get(run(logits, logits if changed is None else changed, rows, made, wanted))


def distribution(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """How probable each token is: temperature, min-p, then top-k, then the smallest set that reaches top-p."""
    scaled = logits.astype(np.float64) / temperature
    probs = np.exp(scaled - scaled.max())
    probs[probs < min_p] = 0
    order = np.argsort(-probs)
    if top_k > 0:
        probs[order[top_k:]] = 0
    probs /= probs.sum()
    reached = np.cumsum(probs[order])
    probs[order[1:][reached[:-1] >= top_p]] = 0
    return probs / probs.sum()


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 2.0, "top_k": 12, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 3, "top_p": 0.01},
        {"temperature": 1.0, "top_p": 1e-46},
        {"temperature": 1.0, "top_k": 1000},
        {"temperature": 1.0, "min_p": 0.3},
        {"temperature": 2.0, "min_p": 0.5, "top_p": 0.9},
        {"temperature": 0.7, "min_p": 0.05, "top_k": 4},
        {"temperature": 1.0, "min_p": 1.0},
    ],
)
def test_tokens_are_drawn_from_the_distribution_that_the_parameters_mean(params):
    rows = [Row(seed=seed, **params) for seed in range(DRAWS)]
    assert_drawn_from(distribution(LOGITS, **params), rows)


def test_draws_of_one_request_are_as_independent_as_those_of_many():
    assert_drawn_from(distribution(LOGITS), [Row(made=made, seed=7) for made in range(DRAWS)])


def assert_drawn_from(expected, rows):
    counts = np.bincount(sampled(np.broadcast_to(LOGITS, (1, DRAWS, V)), [rows])[0], minlength=V)
    support = expected > 0
    assert not counts[~support].any()
    # χ² of the draws has (support − 1) degrees of freedom k: mean k, variance 2k. Six standard deviations above and a bit
    # for its tail; the seeds are fixed, so this passes always or never.
    degrees = support.sum() - 1
    statistic = np.sum((counts - DRAWS * expected)[support] ** 2 / (DRAWS * expected[support]))
    assert statistic <= degrees + 6 * np.sqrt(2 * degrees) + 6


def test_greedy_takes_the_most_probable_and_of_equals_the_lowest():
    logits = np.zeros((2, 3, V), np.float32)
    logits[0, 0, [9, 4, 20]] = 2.5
    logits[0, 1, 23] = 1.0
    logits[1, 0] = -1e4
    expected = [[4, 23, 0], [0, 0, 0]]
    assert greedy(logits).tolist() == expected
    assert sampled(logits, [[]]).tolist() == expected


@pytest.mark.parametrize("params", [{}, {"top_k": 4, "top_p": 0.9}])
def test_the_same_seed_gives_the_same_token_in_any_row_and_rank_and_company(params):
    mine = Row(made=3, seed=42, temperature=1.0, **params)
    others = [Row(made=1, seed=s, temperature=0.3, top_k=2) for s in range(2)]
    alone = sampled(LOGITS[None, None], [[mine]])[0, 0]
    rng = np.random.default_rng(1)
    for rank, row in [(0, 0), (0, 2), (1, 1)]:
        logits = rng.normal(size=(2, 3, V)).astype(np.float32)
        logits[rank, row] = LOGITS
        requests = [[*others, None] for _ in range(2)]
        requests[rank][row] = mine
        assert sampled(logits, requests)[rank, row] == alone
    elsewhere = {sampled(LOGITS[None, None], [[Row(made=m, seed=42, temperature=1.0)]])[0, 0] for m in range(9)}
    assert len(elsewhere) > 1


def test_no_two_seeds_of_64_bits_share_their_noise_and_small_ones_fold_into_key_0():
    seeds = [0, 1, 2**32 - 1, 2**32, 2**32 + 1, 2**63, 2**64 - 3, 2**64 - 2, 2**64 - 1]
    high, low = np.array([divmod(seed, 2**32) for seed in seeds], np.uint32).T[:, None]
    uniform = jax.jit(sampler._uniform)
    noise = np.stack([uniform(high, low, np.full((1, len(seeds)), made, np.int32))[0] for made in range(4)])
    assert len({*map(tuple, noise.T.tolist())}) == len(seeds)
    for seed, drawn in zip(seeds[:3], noise.T, strict=False):
        key = jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), np.uint32(seed))
        assert drawn.tolist() == [jax.random.uniform(jax.random.fold_in(key, made)) for made in range(4)]


def test_every_token_can_be_drawn_where_all_are_kept_beside_a_truncated_row():
    logits = np.full((1, 2, V), -60.0, np.float32)
    logits[..., 0] = 0  # the others have probabilities of 1e-26, which vanish in the sum but not in the set
    rows, _ = settings(1, 2, [[Row(temperature=1.0), Row(temperature=1.0, top_p=0.5)]])
    assert threshold(logits, rows).tolist() == [[-60.0, 0.0]]


def test_what_is_kept_is_what_sorting_in_float64_keeps():
    rng = np.random.default_rng(3)
    for kind in range(6):
        logits = (rng.normal(size=(1, 64, 300)) * rng.choice([0.1, 1, 10])).astype(np.float32)
        logits = np.round(logits) if kind % 3 == 0 else logits  # ties
        logits[..., :: 3 if kind % 2 else 1000] = -np.inf  # dropped before
        rows, _ = settings(1, 64)
        rows.top_p[:] = rng.choice([0.01, 0.3, 0.9, 0.999, 1], size=(1, 64))
        rows.top_k[:] = rng.choice([0, 1, 3, 50, 300, 500], size=(1, 64))
        found = np.asarray(threshold(logits, rows))[0]
        cases = zip(found, logits[0].astype(np.float64), rows.top_p[0], rows.top_k[0], strict=True)
        for least, x, top_p, top_k in cases:
            values = np.unique(x)[::-1]
            enough = [np.sum(x >= value) >= (top_k or 300) for value in values]
            values = values[: enough.index(True) + 1] if True in enough else values
            probs = np.exp(x - x.max()) * (x >= values[-1])
            mass = np.array([probs[x >= value].sum() for value in values]) / probs.sum()
            reached = mass >= top_p
            expected = values[np.argmax(reached)] if reached.any() and top_p < 1 else values[-1]
            differing = (x >= min(least, expected)) & (x < max(least, expected))
            assert probs[differing].sum() / probs.sum() < 1e-6  # float32's sums of 300 numbers


def test_a_row_whose_every_token_is_forbidden_gets_none_and_its_neighbour_does():
    changed = np.stack([np.full(V, -np.inf), LOGITS]).astype(np.float32)[None]
    for params in ({"temperature": 0}, {"temperature": 1.0, "top_p": 0.5}, {"temperature": 1.0, "min_p": 0.5}):
        tokens = sampled(np.zeros((1, 2, V)), [[Row(**params), Row(temperature=0)]], changed)
        assert tokens.tolist() == [[NONE_ALLOWED, int(np.argmax(LOGITS))]]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_gives_minus_one_and_its_neighbours_their_tokens(bad):
    logits, rows = np.broadcast_to(LOGITS, (2, 3, V)).copy(), [[Row(seed=seed) for seed in range(3)]] * 2
    clean = sampled(logits, rows)
    logits[1, 1, 17] = bad
    broken, row = sampled(logits, rows), np.zeros((2, 3), bool)
    row[1, 1] = True
    np.testing.assert_array_equal(broken, np.where(row, -1, clean))
    assert np.all(np.isfinite(scores_of(logits, broken).logprobs[~row]))
    np.testing.assert_array_equal(greedy(logits), np.where(row, -1, np.argmax(LOGITS)))


def test_logprobs_are_the_log_softmax_of_the_logits():
    rng = np.random.default_rng(4)
    logits, tokens = (rng.normal(size=(2, 3, V)) * 4).astype(np.float32), rng.integers(V, size=(2, 3))
    found, exact = scores_of(logits, tokens), scipy.special.log_softmax(logits.astype(np.float64), axis=-1)
    chosen = np.take_along_axis(exact, tokens[..., None], axis=-1)
    np.testing.assert_allclose(found.logprobs, chosen[..., 0], atol=2e-6)  # float32 of values up to 20
    np.testing.assert_array_equal(found.ranks, 1 + np.sum(exact > chosen, axis=-1))
    assert found.top_tokens.shape == found.top_logprobs.shape == (2, 3, MAX_LOGPROBS)
    np.testing.assert_array_equal(found.top_tokens, np.argsort(-logits, axis=-1, kind="stable")[..., :MAX_LOGPROBS])
    np.testing.assert_allclose(found.top_logprobs, np.take_along_axis(exact, found.top_tokens, axis=-1), atol=2e-6)
    assert np.all(np.diff(found.top_logprobs, axis=-1) <= 0)
    trainers = np.take_along_axis(np.asarray(log_softmax(logits)), tokens[..., None], axis=-1)
    np.testing.assert_array_equal(found.logprobs, trainers[..., 0])


def test_the_greedy_token_s_logprob_is_the_greatest_to_the_bit_and_ranks_first():
    rng = np.random.default_rng(8)
    logits = (rng.normal(size=(4, 64, 512)) * 20).astype(np.float32)
    logits[0, :32] = np.round(logits[0, :32])  # ties
    tokens = np.asarray(greedy(logits))
    np.testing.assert_array_equal(sampled(logits, [[]] * 4), tokens)
    found = scores_of(logits, tokens)
    assert np.all(found.logprobs == found.top_logprobs[..., 0])
    assert np.all(tokens == found.top_tokens[..., 0])
    assert np.all(found.ranks == 1)
