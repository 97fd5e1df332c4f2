"""Tokens of one mesh get the sums of experts on another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sharding import MeshSpec, fp8
from sharding.dispatch import ExpertsOfMesh
from sharding.dispatch.between import Between
from sharding.dispatch.wire import WireFormat

TOKENS, WIDTH, TOP_K, EXPERTS = 6, 128, 3, 12


def scaled(params, rows, ids_NK, weights_NK):
    """Experts that multiply a row by a number of their own."""
    numbers_NK = jnp.where(ids_NK >= 0, params[jnp.maximum(ids_NK, 0)] * weights_NK, 0)
    return rows.take(jnp.arange(rows.shape[0]), axis=0) * jnp.sum(numbers_NK, axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("spec", "num_experts_devices", "by_choice", "wire"),
    [
        ("dp=2", 3, True, "compute"),
        ("dp=1,tp=4", 2, False, "compute"),  # six tokens of a rank on four devices: two of padding
        ("dp=2", 6, True, "fp8"),  # fewer experts on a device than a token has
        ("dp=3", 1, True, "compute"),
    ],
)
def test_each_token_gets_the_sum_of_its_experts(spec, num_experts_devices, by_choice, wire):
    spec, there = MeshSpec.parse(spec), MeshSpec(dp_size=num_experts_devices)
    devices = jax.devices()
    mesh, expert_mesh = spec.arrange(devices[: spec.num_devices]), there.arrange(devices[-there.num_devices :])
    format = WireFormat(WIDTH, TOP_K, jnp.dtype("float32"), wire == "fp8")
    between = Between(spec, mesh, there, expert_mesh, TOKENS, EXPERTS, format, by_choice)
    rng = np.random.default_rng(3)
    x = rng.normal(size=(TOKENS, WIDTH)).astype(np.float32)
    slots = np.array([rng.permutation(EXPERTS)[:TOP_K] for _ in range(TOKENS)], np.int32)
    slots[4] = -1  # padding
    weights, numbers = rng.random((TOKENS, TOP_K), np.float32), rng.random(EXPERTS, np.float32)

    rows = jax.jit(between.pack)(x, slots, weights)
    experts = lambda params: ExpertsOfMesh(scaled, params, P(there.expert_axes))  # noqa: E731
    answers = jax.jit(lambda rows, params: between.compute(rows, experts(params)))(between.to_experts(rows), numbers)
    y = jax.jit(between.add)(between.to_tokens(answers), slots)

    sent = fp8.dequantise(*fp8.quantise(jnp.asarray(x))) if wire == "fp8" else x
    expected = np.asarray(sent) * np.sum(np.where(slots >= 0, numbers[slots] * weights, 0), axis=1, keepdims=True)
    np.testing.assert_allclose(y, expected, rtol=2e-6, atol=1e-6)
    assert between.bytes_there == sum(one.nbytes for one in between.to_experts(rows)) * there.num_devices
    assert between.bytes_back == sum(one.nbytes for one in answers)
