"""Every dispatch on every layout returns exactly the single-device sums, and counts what it moved."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dispatch_cases import (
    LAYOUTS,
    K,
    assert_sums,
    coded_experts,
    coded_rows,
    codes,
    compiled,
    places,
    routings,
    weights_of,
)
from jax.sharding import PartitionSpec as P

from sharding import MeshError, MeshSpec
from sharding.dispatch import DispatchConfig, Exchange, ExpertsOfMesh, dispatch, resolved_method
from sharding.dispatch.transit import in_turn

EXPERTS, TOKENS = 32, 3  # tokens of a device
METHODS = {
    "gather": DispatchConfig("gather", capacity=64, report=True),  # so many that terms come back as columns, too
    "padded": DispatchConfig("padded", report=True),
    "padded, capacity 1": DispatchConfig("padded", capacity=1, report=True),
    "ragged": DispatchConfig("ragged", report=True),
    "padded, chunks": DispatchConfig("padded", capacity=1, chunk_tokens=2, report=True),
    "hierarchical": DispatchConfig("hierarchical", devices_per_host=4, report=True),
    "hierarchical, hosts of 8": DispatchConfig("hierarchical", devices_per_host=8, report=True),
    "hierarchical, capacity 1": DispatchConfig("hierarchical", capacity=1, devices_per_host=2, report=True),
    "hierarchical, chunks": DispatchConfig("hierarchical", capacity=1, chunk_tokens=2, devices_per_host=4, report=True),
}
ONE_STAGE = ("gather", "padded, capacity 1", "ragged")
IN_TWO_STAGES = [
    ("tp=8", "hierarchical"), ("dp=32", "hierarchical, capacity 1"), ("dp=4,tp=8", "hierarchical, hosts of 8"),
    ("dp=16,tp=2,ep=8", "hierarchical, capacity 1"), ("dp=8,tp=2,ep=4,etp=4", "hierarchical, hosts of 8"),
    ("dp=8,tp=4,ep=8,etp=2", "hierarchical"),
]  # fmt: skip
OTHERS = [(layout, ONE_STAGE[place % 3]) for place, layout in enumerate(one for one in LAYOUTS if one != "dp=8")]
# layout, method, whether terms return by choice: one layout takes every method both ways, each other one or two in turn.
DRAWN = [
    *(("dp=8", method, False) for method in METHODS if method != "hierarchical, hosts of 8"),
    *(("dp=8", method, True) for method in (*ONE_STAGE, "padded, chunks", "hierarchical, chunks")),
    *((*case, place % 2 == 1) for place, case in enumerate((*OTHERS, *IN_TWO_STAGES))),
]
# And whether each rank has an expert for its own tokens.
CASES = [(*case, place % 5 < 2) for place, case in enumerate(DRAWN)]


def expected_counts(spec, slots, experts):
    """Counts by plain NumPy, from the routing alone: tokens per expert on each rank, rows sent and received by each."""
    per_rank = experts // spec.ep_size
    holder = slots // per_rank  # place in the EP group
    copy, place = places(spec)
    loads = np.zeros((spec.num_devices, per_rank), int)
    sent, received = np.zeros(spec.num_devices, int), np.zeros(spec.num_devices, int)
    tokens = len(slots) // spec.num_devices
    for t, row in enumerate(slots):
        home = t // tokens
        reached = set()
        for k in np.flatnonzero(row >= 0):
            for device in np.flatnonzero((copy == copy[home]) & (place == holder[t, k])):
                loads[device, row[k] % per_rank] += 1
                reached.add(int(device))
        sent[home] += len(reached - {home})
        for device in reached - {home}:
            received[device] += 1
    return loads, sent, received


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "method", "by_choice", "home"), CASES)
def test_every_dispatch_equals_the_single_device_sums_on_every_layout(layout, method, by_choice, home):
    """An expert that each rank has for its own tokens adds to their sums and sends no row."""
    spec, call = compiled(layout, dataclasses.replace(METHODS[method], by_choice=by_choice), EXPERTS, fused_shared=home)
    tokens = TOKENS * spec.num_devices
    own = home * coded_rows(tokens) * (500 + np.repeat(places(spec)[1], TOKENS)[:, None])
    for name, slots in routings(tokens, EXPERTS, spec.num_devices).items():
        report = assert_sums(call, slots, name, extra=own * (slots >= 0).any(axis=1, keepdims=True))
        loads, sent, received = expected_counts(spec, slots, EXPERTS)
        np.testing.assert_array_equal(report["tokens_per_expert"], loads, err_msg=name)
        if method == "gather" or not by_choice:  # by choice, other methods send a row for each choice
            np.testing.assert_array_equal(report["rows_sent"], sent, err_msg=name)
            np.testing.assert_array_equal(np.sum(report["rows_received"]), np.sum(received), err_msg=name)
        if method == "gather":
            np.testing.assert_array_equal(report["rows_received"], received, err_msg=name)
        if spec.num_devices == 1:
            assert report["rounds"].tolist() == [0]
        elif not by_choice and "capacity" not in method and "chunks" not in method:
            assert set(np.asarray(report["rounds"])) == {1}, name


@pytest.mark.parametrize("by_choice", [False, True])
@pytest.mark.parametrize(("method", "stages"), [("padded", 1), ("hierarchical", 2)])
def test_each_stage_of_an_exchange_is_a_part_of_its_own_with_one_collective(method, stages, by_choice):
    config = DispatchConfig(method, capacity=4, by_choice=by_choice, devices_per_host=2)
    spec = MeshSpec.parse("dp=8")
    mesh, tokens = spec.build(), TOKENS * 8
    params = codes(np.arange(EXPERTS) + 1)
    experts = ExpertsOfMesh(coded_experts, {"code": params}, {"code": P(spec.expert_axes, None)})
    x, weights = coded_rows(tokens), weights_of(tokens)
    slots = routings(tokens, EXPERTS, 8)["random, some idle"]
    exchange = Exchange.of(spec, mesh, config, x, slots, EXPERTS)
    assert len(exchange.dispatch_stages) == len(exchange.combine_stages) == stages
    found = []

    def counted(part, transit):
        found.append(str(jax.make_jaxpr(part)(transit)).count("all_to_all["))
        return part(transit)

    def step():
        counting = lambda stages: [partial(counted, stage) for stage in stages]  # noqa: E731
        sent = in_turn(counting(exchange.dispatch_stages), exchange.prepare(x, slots, weights))
        return in_turn(counting(exchange.combine_stages), exchange.compute(sent, experts))

    jax.eval_shape(step)
    assert found == [1] * 2 * stages


def unequal_experts(params, rows, ids, weights):
    """Experts whose results must be rounded: their sum depends on its order."""
    rows = rows.take(jnp.arange(rows.shape[0]), axis=0)
    gain = jnp.sin(params["code"][:, 0])
    out = jnp.zeros(rows.shape)
    for k in range(ids.shape[1]):
        out = out + jnp.where(ids[:, k, None] >= 0, rows * (weights[:, k] * gain[ids[:, k]])[:, None], 0)
    return out


@pytest.mark.slow
def test_by_choice_a_tokens_sum_has_one_order_on_every_mesh_with_every_method():
    tokens = 64
    rng = np.random.default_rng(3)
    x = rng.normal(size=(tokens, 8)).astype(np.float32)
    weights = (rng.random((tokens, K)) * 10.0 ** rng.integers(-3, 3, (tokens, K))).astype(np.float32)
    slots = np.stack([rng.permutation(EXPERTS)[:K] for _ in range(tokens)]).astype(np.int32)

    def sums(layout, name, by_choice=True):
        config = dataclasses.replace(METHODS[name], by_choice=by_choice)
        _, call = compiled(layout, config, EXPERTS, local_experts=unequal_experts)
        return np.asarray(call(x, slots, weights)[0])

    one = sums("dp=1", "gather")
    cases = [("dp=8", name) for name in (*ONE_STAGE, "hierarchical, capacity 1")]
    for case in (*cases, ("dp=4,tp=2", "padded, capacity 1"), ("dp=16", "gather")):
        np.testing.assert_array_equal(sums(*case), one, err_msg=str(case))
    assert not np.array_equal(sums("dp=8", "padded, capacity 1", by_choice=False), one)  # where ranks add first


def rounds_of(layout, config, first):
    """Rounds that each of eight devices runs where the first tokens have these experts, and the others none."""
    _, call = compiled(layout, config, EXPERTS)
    slots = np.full((TOKENS * 8, K), -1, np.int32)
    slots[: len(first), 0] = first
    return assert_sums(call, slots)["rounds"].tolist()


@pytest.mark.parametrize(("capacity", "rounds"), [(1, 3), (2, 2)])
def test_only_the_group_that_overflows_runs_further_rounds(capacity, rounds):
    config = DispatchConfig("padded", capacity=capacity, report=True)
    every_token_of_the_first_group = [EXPERTS - 1] * 2 * TOKENS
    assert rounds_of("dp=8,ep=2", config, every_token_of_the_first_group) == [rounds] * 2 + [1] * 6


def test_all_ranks_run_the_rounds_of_the_one_whose_rows_for_a_rank_or_for_a_host_are_most():
    # Of the first rank, two rows for the last and one for its neighbour.
    found = rounds_of("dp=8", METHODS["hierarchical, capacity 1"], [EXPERTS - 1, EXPERTS - 1, EXPERTS - 5])
    # Two blocks of two rows for that host; two rows of the first for one rank: each block comes twice.
    assert found == [4] * 8


def test_auto_takes_two_stages_of_the_hosts_that_it_is_told_of_and_none_where_terms_come_back_apart():
    spec, shape = MeshSpec.parse("dp=16,tp=2"), {"tokens": 256, "top_k": 8, "experts": 64}

    def method(platform="gpu", **options):
        return resolved_method(spec, DispatchConfig(**options), platform=platform, **shape)

    assert method(devices_per_host=8) == "hierarchical"
    assert method() == method(devices_per_host=32) == "padded"
    assert method(devices_per_host=8, by_choice=True) == "padded"
    assert method("cpu", devices_per_host=8) == method("cpu") == "gather"


def test_tokens_that_do_not_divide_over_tp_are_padded_and_cut_again():
    spec, call = compiled("dp=2,tp=4", DispatchConfig("padded"), EXPERTS)
    tokens = 3 * spec.dp_size  # 3 tokens of a DP rank over 4 tp ranks
    assert assert_sums(call, routings(tokens, EXPERTS, 2)["random, some idle"]) is None


def test_what_does_not_divide_is_an_error_with_the_numbers():
    _, call = compiled("dp=8", DispatchConfig(), EXPERTS)
    with pytest.raises(MeshError, match=r"9 tokens do not divide over dp=8"):
        call(coded_rows(9), np.zeros((9, K), np.int32), weights_of(9))
    spec = MeshSpec.parse("dp=8")
    with pytest.raises(MeshError, match=r"30 physical experts are not divisible by ep=8; add 2 redundant"):
        dispatch(spec, spec.build(), DispatchConfig(), jnp.ones((8, 2)), jnp.zeros((8, K), int), jnp.ones((8, K)),
                 jnp.ones((30, 2)), coded_experts, None)  # fmt: skip
    with pytest.raises(MeshError, match="dispatch method 'fastest'"):
        DispatchConfig("fastest")
    with pytest.raises(MeshError, match="capacity=0"):
        DispatchConfig(capacity=0)


def test_the_native_ragged_all_to_all_gets_the_offsets_that_its_documentation_asks_for(monkeypatch):
    """GPU and TPU take ``lax.ragged_all_to_all``, which CPU lacks: here the documented semantics stand in for it."""
    from jax import lax

    from sharding.dispatch import ragged

    def documented(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
        everyone = [lax.all_gather(a, axis_name) for a in (operand, input_offsets, send_sizes, output_offsets)]
        me = lax.axis_index(axis_name)
        place = jnp.arange(operand.shape[0])
        for operand, starts, sizes, lands in zip(*everyone, strict=True):
            run = (place >= starts[me]) & (place < starts[me] + sizes[me])
            target = jnp.where(run, place - starts[me] + lands[me], output.shape[0])
            output = output.at[target].set(operand, mode="drop")
        sent_here = everyone[2][:, me]
        return jnp.where(jnp.all(sent_here == recv_sizes), output, jnp.zeros_like(output))

    monkeypatch.setattr(lax, "ragged_all_to_all", documented)
    monkeypatch.setattr(ragged, "NATIVE_PLATFORMS", ("cpu",))
    spec, call = compiled("dp=8,tp=4,ep=2", METHODS["ragged"], EXPERTS)
    for name, slots in routings(TOKENS * spec.num_devices, EXPERTS, spec.num_devices).items():
        assert_sums(call, slots, name)


def test_the_native_ragged_all_to_all_lowers_for_cuda():
    from sharding.dispatch.group import ExpertGroup
    from sharding.dispatch.ragged import ragged_exchange

    spec = MeshSpec.parse("dp=8")
    group = ExpertGroup.of(spec, EXPERTS, "gpu")
    ones = jnp.ones((8,), jnp.int32)

    def exchange(rows):
        return ragged_exchange(group, rows, jnp.zeros_like(rows), ones, ones, offsets_G=ones, most=3)

    over = jax.sharding.PartitionSpec(spec.token_axes)
    step = jax.shard_map(exchange, mesh=spec.build(), in_specs=over, out_specs=over, check_vma=False)
    text = jax.jit(step).trace(jnp.ones((64, 4), jnp.uint16)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @ragged_all_to_all") == 1
    assert 'all_to_all"(' not in text
