"""Tokens of one mesh get the sums of experts on another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sharding import MeshSpec, fp8
from sharding.dispatch import ExpertsOfMesh
from sharding.dispatch.between import Between, ExpertHalf, to_experts, to_tokens
from sharding.dispatch.wire import WireFormat

TOKENS, WIDTH, TOP_K, EXPERTS = 6, 128, 3, 12


def scaled(params, rows, ids_NK, weights_NK):
    """Experts that multiply a row by a number of their own."""
    numbers_NK = jnp.where(ids_NK >= 0, params[jnp.maximum(ids_NK, 0)] * weights_NK, 0)
    return rows.take(jnp.arange(rows.shape[0]), axis=0) * jnp.sum(numbers_NK, axis=1, keepdims=True)


def tokens_of(experts_devices, seed=3, busiest=None):
    """Rows, choices and weights of six tokens, the fifth of which is padding. busiest: an expert device that all tokens use, too."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(TOKENS, WIDTH)).astype(np.float32)
    slots = np.array([rng.permutation(EXPERTS)[:TOP_K] for _ in range(TOKENS)], np.int32)
    if busiest is not None:
        own = EXPERTS // experts_devices
        slots[:, 0] = busiest * own + np.arange(TOKENS) % own
        others = [slot for slot in range(EXPERTS) if slot // own != busiest]
        slots[:, 1:] = [rng.permutation(others)[: TOP_K - 1] for _ in range(TOKENS)]
    slots[4] = -1
    return x, slots, rng.random((TOKENS, TOP_K), np.float32), rng.random(EXPERTS, np.float32)


def exchanged(between, half, x, slots, weights, numbers):
    """The tokens' sums, and in how many rounds they came."""
    compute = jax.jit(lambda rows, params: half.compute(rows, ExpertsOfMesh(scaled, params, P(half.spec.expert_axes))))

    def there_and_back(rows):
        return to_tokens(between, half, compute(to_experts(between, half, rows), numbers))

    pack = jax.jit(between.pack)
    rows, counts = pack(x, slots, weights, 0)
    rounds = between.rounds(counts)
    if rounds == 1:
        return np.asarray(jax.jit(between.add)(there_and_back(rows), slots)), 1
    described = between.described_terms
    kept = jax.device_put(np.zeros(described.shape, described.dtype), described.sharding)
    for r in range(rounds):
        kept = jax.jit(between.store_terms)(kept, there_and_back(pack(x, slots, weights, r)[0]), slots, r)
    return np.asarray(jax.jit(between.sum_terms)(kept, slots)), rounds


def sides(spec, num_experts_devices, by_choice, wire="compute", **more):
    spec, there = MeshSpec.parse(spec), MeshSpec(dp_size=num_experts_devices)
    devices = jax.devices()
    mesh, expert_mesh = spec.arrange(devices[: spec.num_devices]), there.arrange(devices[-there.num_devices :])
    format = WireFormat(WIDTH, TOP_K, jnp.dtype("float32"), wire == "fp8")
    between = Between(spec, mesh, there, num_experts_devices, TOKENS, EXPERTS, format, by_choice, **more)
    per_device = EXPERTS // num_experts_devices
    return between, ExpertHalf(there, expert_mesh, 0, per_device, format, between.returns_terms)


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
    between, half = sides(spec, num_experts_devices, by_choice, wire)
    x, slots, weights, numbers = tokens_of(num_experts_devices)
    y, rounds = exchanged(between, half, x, slots, weights, numbers)
    sent = fp8.dequantise(*fp8.quantise(jnp.asarray(x))) if wire == "fp8" else x
    expected = np.asarray(sent) * np.sum(np.where(slots >= 0, numbers[slots] * weights, 0), axis=1, keepdims=True)
    assert rounds == 1
    np.testing.assert_allclose(y, expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(("spec", "num_experts_devices", "by_choice"), [("dp=2", 3, True), ("dp=1,tp=2", 6, False)])
def test_rows_beyond_the_capacity_come_in_further_rounds_and_change_no_bit(spec, num_experts_devices, by_choice):
    given = tokens_of(num_experts_devices, busiest=1)
    enough, half = sides(spec, num_experts_devices, by_choice)
    narrow, _ = sides(spec, num_experts_devices, by_choice, fixed_capacity=1)
    one, rounds = exchanged(enough, half, *given)
    more, narrow_rounds = exchanged(narrow, half, *given)
    assert (rounds, narrow_rounds) == (1, 3)  # each of two token devices has three tokens, or two and padding
    np.testing.assert_array_equal(more, one)


def test_a_row_goes_to_the_devices_that_have_experts_for_it_and_to_no_others():
    between, _ = sides("dp=2", 6, True)
    x, slots, weights, _ = tokens_of(6)
    rows, counts = jax.jit(between.pack)(x, slots, weights, 0)
    wanted = [[np.sum((slots[s * 3 : s * 3 + 3] // 2 == e).any(axis=1)) for e in range(6)] for s in range(2)]
    np.testing.assert_array_equal(counts, wanted)
    for device, arrived in enumerate(rows):
        _, ids, _, _ = between.wire.unpack(arrived)
        used = (np.asarray(ids) // 2 == device).any(axis=1).reshape(2, between.capacity)
        np.testing.assert_array_equal(used.sum(axis=1), np.array(wanted)[:, device])
        np.testing.assert_array_equal(used, np.arange(between.capacity) < used.sum(axis=1)[:, None])
        assert (np.asarray(ids)[~used.reshape(-1)] == -1).all()


def test_even_routing_sends_the_bytes_that_are_reckoned_in_one_round():
    spec, there = MeshSpec.parse("dp=8"), MeshSpec(dp_size=24)
    wire = WireFormat(7168, 8, jnp.dtype("bfloat16"), True)
    between = Between(spec, spec.arrange(jax.devices()[:8]), there, 24, 8 * 128, 264, wire, False)
    assert between.capacity == 60
    sent, returned = (between.round_rows * size for size in (wire.row_bytes, between.bytes_back))
    assert (sent, returned) == (85_754_880, 165_150_720)
    rng = np.random.default_rng(0)
    slots = np.array([rng.permutation(264)[:8] for _ in range(1024)], np.int32)
    x, weights = np.zeros((1024, 7168), jnp.bfloat16), np.ones((1024, 8), np.float32)
    rows, counts = jax.eval_shape(between.pack, x, slots, weights)
    assert sum(one.size * one.dtype.itemsize for one in rows) == sent
    assert counts.shape == (8, 24)
    on_devices = (slots[:, :, None] // 11 == np.arange(24)).any(axis=1)
    assert on_devices.reshape(8, 128, 24).sum(axis=1).max() <= 60  # one round
