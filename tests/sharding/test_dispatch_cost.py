"""The arithmetic of collectives and bytes, held against the program that JAX lowers."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dispatch_cases import LAYOUTS, K, coded_experts, codes
from jax.sharding import PartitionSpec as P

from sharding import MeshSpec
from sharding.dispatch import DispatchConfig, DispatchStatistics, dispatch, dispatch_collectives
from sharding.dispatch.entry import exchange_plan, group_of

pytestmark = pytest.mark.slow  # all together

EXPERTS, TOKENS, WIDTH = 32, 6, 160
BYTES = {"f32": 4, "bf16": 2, "ui32": 4, "ui16": 2, "ui8": 1, "i32": 4}
WHOLE = "dp=8,tp=4,ep=8,etp=2"
"""The layout that every configuration is lowered on; it takes each sixth of the others."""
CONFIGS = {
    "gather": DispatchConfig("gather"),
    "gather fp8": DispatchConfig("gather", wire="fp8"),
    "padded": DispatchConfig("padded"),
    "padded rounds": DispatchConfig("padded", capacity=2),
    "padded chunks": DispatchConfig("padded", chunk_tokens=3),
    "ragged": DispatchConfig("ragged"),
    "hierarchical": DispatchConfig("hierarchical", devices_per_host=8),
    "hierarchical rounds": DispatchConfig("hierarchical", devices_per_host=4, capacity=1),
    "hierarchical by choice": DispatchConfig("hierarchical", devices_per_host=4, by_choice=True),
    "gather by choice": DispatchConfig("gather", by_choice=True, capacity=64),
    "padded by choice": DispatchConfig("padded", by_choice=True),
    "ragged by choice": DispatchConfig("ragged", by_choice=True),
}


def lowered(spec, config, dtype, fused):
    """StableHLO of one layer's dispatch: ``[(kind, operand bytes)]`` in program order. fused: each rank has a fused shared expert."""
    mesh = spec.build()
    specs = {"code": P(spec.expert_axes, spec.expert_width_axes or None)}

    def layer(x, slots, weights, params):
        return dispatch(spec, mesh, config, x, slots, weights, params, coded_experts, specs, EXPERTS, fused)[0]

    total = TOKENS * spec.num_devices
    shapes = jnp.zeros((total, WIDTH), dtype), jnp.zeros((total, K), jnp.int32), jnp.zeros((total, K))
    text = (
        jax.jit(layer).lower(*shapes, {"code": jnp.asarray(codes(np.arange(EXPERTS + fused * spec.ep_size)))}).as_text()
    )
    found = []
    for match in re.finditer(r'"stablehlo\.(all_gather|all_to_all|reduce_scatter)"', text):
        signature = re.compile(r": \(tensor<([\dx]+)x(\w+)>\) -> tensor").search(text, match.end())
        size = np.prod([int(n) for n in signature.group(1).split("x")])
        found.append((match.group(1), int(size) * BYTES[signature.group(2)]))
    for other in ("all_reduce", "collective_permute", "collective_broadcast"):
        assert f"stablehlo.{other}" not in text
    return found


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, jnp.float32) for name in CONFIGS if name != "gather fp8"] + [("gather fp8", jnp.bfloat16)],
)
def test_collectives_and_their_operands_are_those_of_the_lowered_program(name, dtype):
    place, config = list(CONFIGS).index(name), CONFIGS[name]
    for layout, fused in {(WHOLE, True), *((layout, False) for layout in (WHOLE, *LAYOUTS[place % 6 :: 6]))}:
        spec = MeshSpec.parse(layout)
        shape = {"tokens": TOKENS, "width": WIDTH, "top_k": K, "experts": EXPERTS, "dtype": dtype, "platform": "cpu"}
        found = [dispatch_collectives(spec, config, fused_shared=shared, **shape) for shared in (fused, False)]
        expected, further = ([(c.kind, c.operand_bytes) for c in each] for each in found)
        plan = exchange_plan(config, TOKENS, K, group_of(spec, config, EXPERTS, "cpu"))
        if plan.kind.name in ("padded", "hierarchical") and plan.capacity < plan.rows:
            expected += further  # the first round, and the body of the loop over further ones
        ordered = sorted if fused and config.by_choice else list
        assert ordered(lowered(spec, config, dtype, fused)) == ordered(expected), layout


def test_bytes_sent_are_the_rows_of_the_other_ranks():
    shape = {"tokens": 6, "width": 128, "top_k": 4, "experts": 32, "dtype": jnp.bfloat16, "platform": "cpu"}
    there, back = dispatch_collectives(MeshSpec.parse("dp=8"), DispatchConfig("gather"), **shape)
    row = 128 * 2 + 4 * 4 + 4 * 2 + 4  # values, weights, ids, extra
    assert there.bytes_sent == 7 * 6 * row
    assert back.bytes_sent == 7 * 6 * 128 * 2
    there, back = dispatch_collectives(MeshSpec.parse("dp=8"), DispatchConfig("padded", capacity=2), **shape, rounds=3)
    assert (there.bytes_sent, there.times) == (7 * 2 * row, 3)
    fp8, _ = dispatch_collectives(MeshSpec.parse("dp=8"), DispatchConfig("gather", wire="fp8"), **shape)
    assert fp8.bytes_sent == 7 * 6 * (128 + 4 + 4 * 4 + 4 * 2 + 4)


def test_statistics_tell_load_payload_and_padding_and_count_an_expert_once_where_its_width_is_split():
    spec, config = MeshSpec.parse("dp=4,ep=2"), DispatchConfig("padded", capacity=4)
    counts = {  # two layers, four ranks that are two copies of two ranks, two experts on a rank
        "tokens_per_expert": np.array([[[1, 0], [2, 0], [3, 0], [2, 0]], [[0, 4], [0, 0], [0, 0], [0, 0]]]),
        "rows_sent": np.array([[1, 2, 0, 0], [0, 0, 0, 0]]),
        "rows_received": np.array([[2, 1, 0, 0], [0, 0, 0, 0]]),
        "rounds": np.array([[1, 1, 2, 2], [1, 1, 1, 1]]),
    }
    shape = {"width": 16, "top_k": 2, "dtype": jnp.float32, "platform": "cpu"}
    found = DispatchStatistics.of(counts, spec, config, tokens=8, **shape)
    np.testing.assert_array_equal(found.tokens_per_expert, [[4, 0, 4, 0], [0, 4, 0, 0]])
    np.testing.assert_array_equal(found.tokens_per_rank, [[1, 2, 3, 2], [4, 0, 0, 0]])
    assert found.balancedness == pytest.approx((2 + 1) / (3 + 4))
    assert found.layer_balancedness == pytest.approx((2 / 3 + 1 / 4) / 2)
    row = 16 * 4 + 2 * 4 + 2 * 4 + 4 + 16 * 4
    assert found.payload_bytes == 3 * row
    assert found.wire_bytes == (1 + 1 + 2 + 2 + 4) * 4 * row  # rounds × capacity rows for the one other rank
    assert found.padding_share == pytest.approx(1 - 3 / 40)
    in_memory = DispatchConfig(by_choice=True, in_memory=SimpleNamespace(experts_read_tokens=True))
    read = DispatchStatistics.of(counts, spec, in_memory, tokens=8, **shape)
    assert (read.payload_bytes, read.wire_bytes) == (0, 0), "experts that read tokens where they lie are sent none"
    assert found.rounds == 2 + 1
    counts = {name: np.array([3] * 4) for name in ("rows_sent", "rows_received")} | {"rounds": np.array([1] * 4)}
    counts["tokens_per_expert"] = np.array([[3, 5]] * 4)
    split = DispatchStatistics.of(counts, MeshSpec.parse("tp=4,ep=1"), DispatchConfig("gather"), tokens=1, **shape)
    np.testing.assert_array_equal(split.tokens_per_expert, [[3, 5]])
    assert (split.balancedness, split.padding_share) == (1.0, 0.0)
