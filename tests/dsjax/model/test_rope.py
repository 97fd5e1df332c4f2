"""Rotary embedding at the widths of real models. `test_goldens.py` compares every switch of it with transformers."""

import jax.numpy as jnp
import numpy as np
import pytest

from dsjax.config import RopeConfig
from dsjax.model.rope import Rotation, inverse_frequencies

# Values printed by transformers 5.23's DeepseekV3RotaryEmbedding; one unit in the last place of float32 is 1.2e-7.
V3 = {0: 1.0, 10: 0.05623412877321243, 11: 0.039006926119327545, 16: 0.005500000435858965, 22: 0.00017782794020604342,
      23: 3.333803397254087e-05, 31: 3.3338035336782923e-06}  # fmt: skip
KIMI_K2 = {10: 0.034007277339696884, 16: 0.004472136031836271, 22: 1.8378419554210268e-05, 31: 8.764412768869079e-07}


@pytest.mark.parametrize(
    ("options", "reference"),
    [
        ({"theta": 10000.0, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}, V3),
        ({"theta": 50000.0, "factor": 32, "beta_fast": 1.0, "beta_slow": 1.0}, KIMI_K2),
    ],
)
def test_yarn_frequencies_are_those_of_transformers(options, reference):
    ours = inverse_frequencies(RopeConfig(type="yarn", original_max_position_embeddings=4096, **options), 64)
    assert (ours.dtype, ours.shape) == (np.float32, (32,))
    np.testing.assert_allclose(ours[list(reference)], list(reference.values()), rtol=1.3e-7)


def test_bfloat16_is_rotated_in_float32_and_rounded_once():
    x = jnp.asarray(np.random.default_rng(3).normal(size=(50, 6)), jnp.bfloat16)
    turn = Rotation.at(jnp.arange(1000, 1050), RopeConfig(theta=100.0), 6)
    rotated = turn(x)
    assert rotated.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rotated, turn(x.astype(jnp.float32)).astype(jnp.bfloat16))
