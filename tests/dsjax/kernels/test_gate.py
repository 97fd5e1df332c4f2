"""The gate of a SwiGLU MLP."""

import numpy as np
import pytest

from dsjax.kernels.gate import gated


def test_is_silu_of_the_gate_times_up():
    # silu(1) = 1 / (1 + e⁻¹)
    np.testing.assert_allclose(
        gated(np.float32([0, 1, -30]), np.float32([5, 2, 1])), [0, 1.4621172, -2.8e-12], rtol=1e-2
    )


@pytest.mark.parametrize(
    ("gate", "up", "same_as"),
    [(50.0, 1.0, (10.0, 1.0)), (-50.0, 1.0, (-50.0, 1.0)), (1.0, 50.0, (1.0, 10.0)), (1.0, -50.0, (1.0, -10.0))],
)
def test_a_limit_clips_the_gate_from_above_and_up_on_both_sides(gate, up, same_as):
    # transformers' DeepseekV4MLP: gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    arrays = (np.float32([value]) for value in (gate, up))
    assert gated(*arrays, limit=10.0) == gated(*(np.float32([value]) for value in same_as))
