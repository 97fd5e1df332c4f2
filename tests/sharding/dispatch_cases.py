"""Position-coded tokens, experts that multiply by a number, and the routings that matter: a wrong row shows as a wrong number.

Every value is a small integer, so float32 results are exact whatever the order of additions.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sharding import MeshSpec
from sharding.dispatch import DispatchConfig, dispatch

D, K = 8, 4
WIDTH = 8  # of an expert, divisible by every tp here

LAYOUTS = (
    "dp=1", "dp=8", "dp=2,tp=4", "tp=8", "tp=8,ep=1", "dp=8,ep=2", "dp=32", "dp=4,tp=8", "dp=16,tp=2,ep=8", "dp=8,tp=4,ep=2",
    "dp=4,tp=2,ep=1", "dp=8,ep=2,etp=4", "dp=8,tp=2,ep=4,etp=4", "dp=8,tp=4,ep=8,etp=2",
)  # fmt: skip


def places(spec):
    """Give for each device the number of its copy of the experts, and its place in that copy's EP group."""
    index = dict(zip(spec.axes, np.unravel_index(np.arange(spec.num_devices), spec.shape), strict=True))
    sizes = dict(zip(spec.axes, spec.shape, strict=True))
    place = np.zeros(spec.num_devices, int)
    for axis in spec.expert_axes:
        place = place * sizes[axis] + index[axis]
    return index["dp"], place


def coded_experts(params, rows, ids, weights):
    """Expert e multiplies its row by the sum of its codes; with the width split, this rank's part of that sum."""
    gain = params["code"].sum(axis=1).astype(jnp.float32)
    factor = jnp.sum(jnp.where(ids >= 0, weights * gain[ids], 0), axis=1)
    return (rows.take(jnp.arange(rows.shape[0]), axis=0).astype(jnp.float32) * factor[:, None]).astype(rows.dtype)


def codes(gains):
    """``[experts, WIDTH]`` whose rows sum to the experts' gains, unevenly over the width."""
    code = np.zeros((len(gains), WIDTH), np.float32)
    code[:, 0] = np.asarray(gains) + 28
    code[:, 1:] = -np.arange(1, WIDTH)
    return code


def coded_rows(tokens):
    """``x[t, d] = 1 + t D + d``: token and column can be read off."""
    return 1.0 + np.arange(tokens * D, dtype=np.float32).reshape(tokens, D)


def expected(x, slots, weights):
    """``y[t] = x[t] Σ_k w[t, k] (slot[t, k] + 1)``."""
    return x * np.sum(np.where(slots >= 0, weights * (slots + 1), 0), axis=1, keepdims=True)


def routings(tokens, experts, ranks, seed=0):
    """Slots ``[tokens, K]`` by name, distinct in a row; tokens lie rank by rank over ``ranks`` devices."""
    rng = np.random.default_rng(seed)
    spread = np.stack([rng.permutation(experts)[:K] for _ in range(tokens)]).astype(np.int32)
    some = np.where(rng.random((tokens, 1)) < 0.3, -1, np.where(rng.random((tokens, K)) < 0.2, -1, spread))
    one_expert = np.full((tokens, K), -1, np.int32)
    one_expert[:, 2] = experts - 1
    last = experts - min(experts, K)  # the last experts lie on the last rank, or the last few
    one_rank = np.stack([last + rng.permutation(experts - last)[:K] for _ in range(tokens)])
    per_rank = tokens // ranks
    one_holder = np.where(np.arange(tokens)[:, None] // per_rank == ranks // 2, spread, -1)
    single = np.where(np.arange(tokens)[:, None] == tokens - 2, spread, -1)
    return {
        "random, some idle": some,
        "every token to one expert": one_expert,
        "every token to the last experts": one_rank,
        "one rank has all tokens": one_holder,
        "one token in all": single,
        "no token": np.full((tokens, K), -1, np.int32),
    }


def weights_of(tokens, seed=1):
    """Small integers ``[tokens, K]`` as float32."""
    return np.random.default_rng(seed).integers(1, 5, size=(tokens, K)).astype(np.float32)


def assert_sums(call, slots, err_msg="", extra=0):
    """Hold a dispatch of coded rows to the sums of one device; its report. extra: what is added to the sums."""
    x, weights = coded_rows(len(slots)), weights_of(len(slots))
    y, report = call(x, slots, weights)
    np.testing.assert_array_equal(y, expected(x, slots, weights) + extra, err_msg=err_msg)
    return report


def compiled(
    layout, config: DispatchConfig, experts, *, local_experts=coded_experts, dtype=np.float32, fused_shared=False
):
    """``(spec, call)``: ``call(x, slots, weights) -> (y, report)`` on ``layout``, one compiled program.

    Expert e multiplies by e + 1. fused_shared: each rank has one more for its tokens, which multiplies by 500 + its place in its EP group.
    """
    spec = MeshSpec.parse(layout)
    gains = np.arange(experts) + 1
    if fused_shared:
        own = 500 + np.arange(spec.ep_size)[:, None]
        gains = np.concatenate([np.reshape(gains, (spec.ep_size, -1)), own], axis=1).reshape(-1)
    mesh = spec.build()
    specs = {"code": P(spec.expert_axes, spec.expert_width_axes or None)}
    params = {"code": jax.device_put(codes(gains), NamedSharding(mesh, specs["code"]))}

    @jax.jit
    def step(x, slots, weights, params):
        x = x.astype(dtype)
        return dispatch(spec, mesh, config, x, slots, weights, params, local_experts, specs, experts, fused_shared)

    def call(x, slots, weights):
        # Steps enqueued without waiting can deadlock the emulated collectives.
        return jax.block_until_ready(step(x, slots, weights, params))

    return spec, call
