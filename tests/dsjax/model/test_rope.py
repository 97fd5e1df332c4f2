"""Rotary embedding: frequencies as transformers has them, and scores that depend on distance alone."""

import jax.numpy as jnp
import numpy as np
import pytest

from dsjax.config import RopeConfig
from dsjax.model.rope import Rotation, inverse_frequencies

V3 = RopeConfig(
    theta=10000.0, type="yarn", factor=40, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0
)
KIMI_K2 = RopeConfig(
    theta=50000.0, type="yarn", factor=32, original_max_position_embeddings=4096, beta_fast=1.0, beta_slow=1.0
)
UNROUNDED = RopeConfig(
    theta=1234.5,
    type="yarn",
    factor=3.3,
    original_max_position_embeddings=77,
    beta_fast=7,
    beta_slow=0.5,
    mscale=0.707,
    mscale_all_dim=0.5,
    truncate=False,
)


def test_plain_frequencies_are_powers_of_theta():
    expected = 500.0 ** (-np.arange(0, 10, 2) / 10)
    np.testing.assert_allclose(inverse_frequencies(RopeConfig(theta=500.0), 10), expected, rtol=1e-6)


# Values printed by transformers 5.23's DeepseekV3RotaryEmbedding; one unit in the last place of float32 is 1.2e-7.
@pytest.mark.parametrize(
    ("rope", "dim", "reference"),
    [
        (
            V3,
            64,
            {
                0: 1.0,
                10: 0.05623412877321243,
                11: 0.039006926119327545,
                16: 0.005500000435858965,
                22: 0.00017782794020604342,
                23: 3.333803397254087e-05,
                31: 3.3338035336782923e-06,
            },
        ),
        (
            KIMI_K2,
            64,
            {10: 0.034007277339696884, 16: 0.004472136031836271, 22: 1.8378419554210268e-05, 31: 8.764412768869079e-07},
        ),
        (
            UNROUNDED,
            10,
            {1: 0.1858946979045868, 2: 0.022961802780628204, 3: 0.004232445266097784, 4: 0.0010192791232839227},
        ),
    ],
)
def test_yarn_frequencies_are_those_of_transformers(rope, dim, reference):
    ours = inverse_frequencies(rope, dim)
    assert (ours.dtype, ours.shape) == (np.float32, (dim // 2,))
    np.testing.assert_allclose(ours[list(reference)], list(reference.values()), rtol=1.3e-7)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones():
    plain, yarn = inverse_frequencies(RopeConfig(theta=10000.0), 64), inverse_frequencies(V3, 64)
    # 32 turns in 4,096 positions fall at pair 10.47, one turn at 22.51: rounded outwards to 10 and 23.
    np.testing.assert_array_equal(yarn[:11], plain[:11])
    np.testing.assert_allclose(yarn[23:], plain[23:] / 40, rtol=2e-7)
    share = yarn[11:23] / plain[11:23]
    assert ((share < 1) & (share > 1 / 40)).all()
    assert (np.diff(share) < 0).all()


def test_magnitude_is_that_of_transformers():
    # 0.1 · m · ln(factor) + 1, as a ratio where both mscales are given; transformers ignores mscale without its partner.
    assert V3.cos_sin_scale == 1.0
    assert UNROUNDED.cos_sin_scale == pytest.approx(1.0233219642415354, rel=1e-12)
    assert KIMI_K2.cos_sin_scale == pytest.approx(0.1 * np.log(32) + 1, rel=1e-12)
    alone = RopeConfig(type="yarn", factor=40, original_max_position_embeddings=4096, mscale=0.5)
    assert alone.cos_sin_scale == pytest.approx(1.3688879454113936, rel=1e-12)
    given = RopeConfig(type="yarn", factor=40, original_max_position_embeddings=4096, attention_factor=1.7)
    assert given.cos_sin_scale == 1.7


def scores_by_complex_numbers(q, k, q_positions, k_positions, rope):
    """The definition, in float64: pairs are complex numbers, turned by `exp(i·position·frequency)`."""
    dim = q.shape[-1]
    frequencies = inverse_frequencies(rope, dim).astype(np.float64)
    half = dim // 2

    def turned(x, positions):
        pairs = x[..., 0::2] + 1j * x[..., 1::2] if rope.interleave else x[..., :half] + 1j * x[..., half:]
        return pairs * np.exp(1j * positions[:, None] * frequencies) * rope.cos_sin_scale

    return np.real(turned(q, q_positions) @ turned(k, k_positions).conj().T)


@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("magnitude", [None, 1.3])
def test_scores_are_those_of_the_complex_rotation(interleave, magnitude):
    rope = RopeConfig(
        theta=100.0,
        type="yarn",
        factor=4,
        original_max_position_embeddings=16,
        attention_factor=magnitude,
        interleave=interleave,
    )
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(5, 12)).astype(np.float32), rng.normal(size=(7, 12)).astype(np.float32)
    q_positions, k_positions = np.array([0, 3, 17, 200, 201]), np.arange(7) * 11
    ours_q = Rotation.at(jnp.asarray(q_positions), rope, 12)(q)
    ours_k = Rotation.at(jnp.asarray(k_positions), rope, 12)(k)
    expected = scores_by_complex_numbers(q, k, q_positions, k_positions, rope)
    # float32 angles up to 200 radians are known to 200 · 6e-8.
    np.testing.assert_allclose(ours_q @ ours_k.T, expected, atol=2e-4)


def test_scores_depend_on_the_distance_alone():
    rng = np.random.default_rng(1)
    q, k = rng.normal(size=(1, 8)).astype(np.float32), rng.normal(size=(1, 8)).astype(np.float32)

    def score(q_position, k_position):
        rope = RopeConfig(theta=100.0)
        turned = Rotation.at(jnp.array([q_position]), rope, 8)(q)
        return float((turned @ Rotation.at(jnp.array([k_position]), rope, 8)(k).T)[0, 0])

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert abs(score(9, 4) - score(9, 5)) > 1e-2


def test_the_two_layouts_pair_different_elements():
    x = np.arange(1, 9, dtype=np.float32)[None]
    interleaved = Rotation.at(jnp.array([1]), RopeConfig(theta=100.0), 8)(x)
    halves = Rotation.at(jnp.array([1]), RopeConfig(theta=100.0, interleave=False), 8)(x)
    # The first pair turns by one radian: (1, 2) interleaved, (1, 5) in halves.
    assert float(interleaved[0, 0]) == pytest.approx(np.cos(1) - 2 * np.sin(1), abs=1e-6)
    assert float(halves[0, 0]) == pytest.approx(np.cos(1) - 5 * np.sin(1), abs=1e-6)


def test_all_heads_of_a_token_turn_by_its_position():
    x = np.random.default_rng(2).normal(size=(4, 3, 6)).astype(np.float32)
    turn = Rotation.at(jnp.arange(4), RopeConfig(theta=100.0), 6)
    together = turn(x)
    for head in range(3):
        np.testing.assert_array_equal(together[:, head], turn(x[:, head]))
    np.testing.assert_array_equal(together[0], jnp.concatenate([x[0, :, 0::2], x[0, :, 1::2]], axis=-1))


def test_bfloat16_is_rotated_in_float32_and_rounded_once():
    x = jnp.asarray(np.random.default_rng(3).normal(size=(50, 6)), jnp.bfloat16)
    turn = Rotation.at(jnp.arange(1000, 1050), RopeConfig(theta=100.0), 6)
    rotated = turn(x)
    assert rotated.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rotated, turn(x.astype(jnp.float32)).astype(jnp.bfloat16))
