"""Every dispatch on every layout returns exactly the single-device sums, and counts what it moved."""

import dataclasses
import itertools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dispatch_cases import (
    LAYOUTS,
    K,
    coded_experts,
    coded_rows,
    codes,
    compiled,
    expected,
    places,
    routings,
    weights_of,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from quick_compilation import QUICK_COMPILATION

from sharding import MeshError, MeshSpec
from sharding.dispatch import DispatchConfig, Exchange, ExpertsOfMesh, dispatch, further_together, resolved_method
from sharding.dispatch.group import ExpertGroup

EXPERTS, TOKENS = 32, 3  # tokens of a device
METHODS = {
    "gather": DispatchConfig("gather", report=True),
    "padded": DispatchConfig("padded", report=True),
    "padded, capacity 1": DispatchConfig("padded", capacity=1, report=True),
    "ragged": DispatchConfig("ragged", report=True),
    "padded, chunks": DispatchConfig("padded", capacity=1, chunk_tokens=2, report=True),
    "hierarchical": DispatchConfig("hierarchical", devices_per_host=4, report=True),
    "hierarchical, hosts of 8": DispatchConfig("hierarchical", devices_per_host=8, report=True),
    "hierarchical, capacity 1": DispatchConfig("hierarchical", capacity=1, devices_per_host=2, report=True),
    "hierarchical, chunks": DispatchConfig("hierarchical", capacity=1, chunk_tokens=2, devices_per_host=4, report=True),
}
ANY = ("gather", "padded, capacity 1", "ragged")
# Where the ranks of an EP group are on several hosts, some of them on one.
IN_TWO_STAGES = [
    *(("dp=8", method) for method in METHODS if method.startswith("hier") and "of 8" not in method),
    ("tp=8", "hierarchical"),
    ("dp=32", "hierarchical, capacity 1"),
    ("dp=4,tp=8", "hierarchical, hosts of 8"),
    ("dp=16,tp=2,ep=8", "hierarchical"),
    ("dp=16,tp=2,ep=8", "hierarchical, capacity 1"),
    ("dp=8,tp=2,ep=4,etp=4", "hierarchical, hosts of 8"),
    ("dp=8,tp=4,ep=8,etp=2", "hierarchical"),
]
# Chunks, and a capacity that needs no further rounds, are the same code on every layout: three of them are enough.
SOME = ("dp=1", "dp=8", "dp=8,tp=4,ep=2")
CASES = [(layout, method) for layout in LAYOUTS for method in ANY] + IN_TWO_STAGES
CASES += itertools.product(SOME, ("padded", "padded, chunks"))


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
@pytest.mark.parametrize(("layout", "method"), CASES)
def test_every_dispatch_equals_the_single_device_sums_on_every_layout(layout, method):
    spec, call = compiled(layout, METHODS[method], EXPERTS)
    tokens = TOKENS * spec.num_devices
    x, weights = coded_rows(tokens), weights_of(tokens)
    for name, slots in routings(tokens, EXPERTS, spec.num_devices).items():
        y, report = call(x, slots, weights)
        np.testing.assert_array_equal(y, expected(x, slots, weights), err_msg=name)
        loads, sent, received = expected_counts(spec, slots, EXPERTS)
        np.testing.assert_array_equal(report["tokens_per_expert"], loads, err_msg=name)
        np.testing.assert_array_equal(report["rows_sent"], sent, err_msg=name)
        np.testing.assert_array_equal(np.sum(report["rows_received"]), np.sum(received), err_msg=name)
        if spec.num_devices > 1 and "capacity" not in method and "chunks" not in method:
            assert set(np.asarray(report["rounds"])) == {1}, name
    if spec.num_devices == 1:
        assert report["rounds"].tolist() == [0]


BY_CHOICE = {name: dataclasses.replace(config, by_choice=True) for name, config in METHODS.items()}


CASES_BY_CHOICE = [("dp=1", "gather"), *itertools.product(LAYOUTS[1::3], (*ANY, "padded, chunks")), *IN_TWO_STAGES]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "method", "home"), [(*case, bool(place % 2)) for place, case in enumerate(CASES_BY_CHOICE)]
)
def test_every_dispatch_by_choice_equals_the_single_device_sums(layout, method, home):
    spec, call = compiled(layout, BY_CHOICE[method], EXPERTS, home=home)
    tokens = TOKENS * spec.num_devices
    x, weights = coded_rows(tokens), weights_of(tokens)
    gain = 500 + np.repeat(places(spec)[1], TOKENS)[:, None]
    for name, slots in routings(tokens, EXPERTS, spec.num_devices).items():
        y, report = call(x, slots, weights)
        own = home * x * gain * (slots >= 0).any(axis=1, keepdims=True)
        np.testing.assert_array_equal(y, expected(x, slots, weights) + own, err_msg=name)
        loads, sent, received = expected_counts(spec, slots, EXPERTS)
        np.testing.assert_array_equal(report["tokens_per_expert"], loads)
        if method == "gather":  # other methods send a row for each choice
            np.testing.assert_array_equal(report["rows_sent"], sent, err_msg=name)
            np.testing.assert_array_equal(report["rows_received"], received, err_msg=name)


@pytest.mark.parametrize("by_choice", [False, True])
@pytest.mark.parametrize("method", ["padded", "hierarchical"])
def test_two_exchanges_run_their_further_rounds_together_before_either_adds(method, by_choice):
    config = DispatchConfig(method, capacity=1, report=True, by_choice=by_choice, devices_per_host=2)
    spec = MeshSpec.parse("dp=8")
    mesh, param_specs = spec.build(), {"code": P(spec.expert_axes, None)}
    params = {"code": jax.device_put(codes(np.arange(EXPERTS) + 1), NamedSharding(mesh, param_specs["code"]))}
    found = routings(TOKENS * 8, EXPERTS, 8)
    # Of the first a rank has three rows for another, so that it needs three rounds; of the second one or two.
    halves = [found["every token to one expert"], found["random, some idle"]]
    x, weights = coded_rows(TOKENS * 8), weights_of(TOKENS * 8)

    @jax.jit
    def step(halves, params):
        experts = ExpertsOfMesh(coded_experts, params, param_specs)
        exchanges = [Exchange.of(spec, mesh, config, x, slots, EXPERTS) for slots in halves]
        sums = [
            one.relay_back(one.answer(one.compute(one.begin(x, slots, weights), experts)))
            for one, slots in zip(exchanges, halves, strict=True)
        ]
        ran = further_together([(one, transit, experts) for one, transit in zip(exchanges, sums, strict=True)])

        def adding(transit):
            return str(jax.make_jaxpr(lambda transit: exchanges[0].add(transit, experts))(transit))

        assert "all_to_all" in adding(sums[0])
        assert "all_to_all" not in adding(ran[0]), "nothing is left to bring"
        return [one.add(transit, experts) for one, transit in zip(exchanges, ran, strict=True)]

    for slots, (y, report) in zip(halves, jax.block_until_ready(step(halves, params)), strict=True):
        np.testing.assert_array_equal(y, expected(x, slots, weights))
        loads, _, _ = expected_counts(spec, slots, EXPERTS)
        np.testing.assert_array_equal(report["tokens_per_expert"], loads)
    assert set(np.asarray(report["rounds"])) != {1}


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
    assert exchange.relays == (stages == 2)
    found = []

    def counted(part, transit):
        found.append(str(jax.make_jaxpr(part)(transit)).count("all_to_all["))
        return part(transit)

    def step():
        sent = counted(exchange.relay, counted(exchange.send, exchange.prepare(x, slots, weights)))
        return counted(exchange.relay_back, counted(exchange.answer, exchange.compute(sent, experts)))

    jax.eval_shape(step)
    assert found == [1, stages - 1] * 2


def test_a_longer_queue_of_terms_takes_further_rounds_which_are_reported():
    spec, call = compiled("dp=8", DispatchConfig("gather", capacity=2, report=True, by_choice=True), EXPERTS)
    tokens = TOKENS * spec.num_devices
    x, slots, weights = coded_rows(tokens), np.full((tokens, K), -1, np.int32), weights_of(tokens)
    slots[:TOKENS, :2] = [EXPERTS - 1, EXPERTS - 2]  # six terms of the first rank's tokens, all of the last rank
    y, report = call(x, slots, weights)
    np.testing.assert_array_equal(y, expected(x, slots, weights))
    assert set(np.asarray(report["rounds"])) == {3}


def unequal_experts(params, rows, ids, weights):
    """Experts whose results must be rounded: their sum depends on its order."""
    rows = rows.take(jnp.arange(rows.shape[0]), axis=0)
    gain = jnp.sin(params["code"][:, 0])
    out = jnp.zeros(rows.shape)
    for k in range(ids.shape[1]):
        out = out + jnp.where(ids[:, k, None] >= 0, rows * (weights[:, k] * gain[ids[:, k]])[:, None], 0)
    return out


def test_by_choice_a_tokens_sum_has_one_order_on_every_mesh_with_every_method():
    tokens = 64
    rng = np.random.default_rng(3)
    x = rng.normal(size=(tokens, 8)).astype(np.float32)
    weights = (rng.random((tokens, K)) * 10.0 ** rng.integers(-3, 3, (tokens, K))).astype(np.float32)
    slots = np.stack([rng.permutation(EXPERTS)[:K] for _ in range(tokens)]).astype(np.int32)
    found = {
        (layout, name, by_choice): np.asarray(
            compiled(
                layout, dataclasses.replace(METHODS[name], by_choice=by_choice), EXPERTS, local_experts=unequal_experts
            )[1](x, slots, weights)[0]
        )
        for layout in ("dp=1", "dp=2", "dp=8", "dp=4,tp=2", "dp=32")
        for name in ("gather", "padded, capacity 1", "ragged", "hierarchical, capacity 1")
        for by_choice in (True, False)
    }
    one = found["dp=1", "gather", True]
    different = {case[2] for case, y in found.items() if not np.array_equal(y, one)}
    assert different == {False}  # where ranks add first, some mesh or other gives other bits


HOME_CASES = [(layout, method) for layout in ("tp=8,ep=1", "dp=8,tp=4,ep=2") for method in ANY]
HOME_CASES += [("dp=8", "padded, chunks"), *IN_TWO_STAGES[::3]]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "method"), [("dp=1", "gather"), *HOME_CASES, ("dp=4,tp=8", "ragged")])
def test_an_expert_that_each_rank_has_for_its_own_tokens_adds_to_theirs_and_sends_no_row(layout, method):
    spec, call = compiled(layout, METHODS[method], EXPERTS, home=True)
    tokens = TOKENS * spec.num_devices
    x, weights = coded_rows(tokens), weights_of(tokens)
    own = places(spec)[1]
    gain = 500 + np.repeat(own, TOKENS)[:, None]
    for name, slots in routings(tokens, EXPERTS, spec.num_devices).items():
        y, report = call(x, slots, weights)
        used = (slots >= 0).any(axis=1, keepdims=True)
        np.testing.assert_array_equal(y, expected(x, slots, weights) + x * gain * used, err_msg=name)
        loads, sent, received = expected_counts(spec, slots, EXPERTS)
        np.testing.assert_array_equal(report["tokens_per_expert"], loads, err_msg=name)
        np.testing.assert_array_equal(report["rows_sent"], sent, err_msg=name)
        if method == "gather":
            np.testing.assert_array_equal(report["rows_received"], received, err_msg=name)


def test_only_the_group_that_overflows_runs_further_rounds():
    spec, call = compiled("dp=8,ep=2", METHODS["padded, capacity 1"], EXPERTS)
    tokens = TOKENS * spec.num_devices
    slots = np.full((tokens, K), -1, np.int32)
    slots[: 2 * TOKENS, 0] = EXPERTS - 1  # every token of the first of four groups of two ranks
    _, report = call(coded_rows(tokens), slots, weights_of(tokens))
    np.testing.assert_array_equal(report["rounds"], [3, 3, 1, 1, 1, 1, 1, 1])


def test_all_ranks_run_the_rounds_of_the_one_whose_rows_for_a_rank_or_for_a_host_are_most():
    spec, call = compiled("dp=8", METHODS["hierarchical, capacity 1"], EXPERTS)
    tokens = TOKENS * spec.num_devices
    slots = np.full((tokens, K), -1, np.int32)
    slots[:TOKENS, 0] = [
        EXPERTS - 1,
        EXPERTS - 1,
        EXPERTS - 5,
    ]  # of the first rank, two rows for the last and one for its neighbour
    x, weights = coded_rows(tokens), weights_of(tokens)
    y, report = call(x, slots, weights)
    np.testing.assert_array_equal(y, expected(x, slots, weights))
    # Two blocks of two rows for that host; two rows of the first for one rank: each block comes twice.
    assert set(np.asarray(report["rounds"])) == {4}


def test_in_two_stages_the_group_is_cut_into_hosts_or_is_one_stage_again():
    def stages(layout, devices_per_host, experts=EXPERTS):
        group = ExpertGroup.of(MeshSpec.parse(layout), experts, "gpu", devices_per_host=devices_per_host)
        return [(one.size, one.experts, one.parts[0]) for one in group.in_two_stages()]

    assert stages("dp=4,tp=8", 8) == [(4, 8, (0, 8, 16, 24)), (8, 1, tuple(range(8)))]
    assert stages("dp=8,tp=2,ep=4,etp=4", 8) == [(2, 16, (0, 2)), (2, 8, (0, 1))]
    shape = {"tokens": TOKENS, "top_k": K, "experts": EXPERTS, "platform": "gpu"}
    for devices, method in ((2, "hierarchical"), (8, "padded"), (1, "padded"), (3, "padded"), (None, "padded")):
        config = DispatchConfig("hierarchical", devices_per_host=devices)
        assert resolved_method(MeshSpec.parse("dp=8"), config, **shape) == method


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
    x, weights = coded_rows(tokens), weights_of(tokens)
    slots = routings(tokens, EXPERTS, 2)["random, some idle"]
    y, report = call(x, slots, weights)
    np.testing.assert_array_equal(y, expected(x, slots, weights))
    assert report is None


def test_a_further_compilation_is_never_needed():
    calls = []

    def counting(*arguments):
        calls.append(1)  # once per trace
        return coded_experts(*arguments)

    spec, call = compiled("dp=8", DispatchConfig("padded", capacity=1), EXPERTS, local_experts=counting)
    tokens = TOKENS * spec.num_devices
    x, weights = coded_rows(tokens), weights_of(tokens)
    cases = routings(tokens, EXPERTS, spec.num_devices)
    call(x, cases["no token"], weights)
    traced = len(calls)
    call(x, cases["every token to one expert"], weights)
    assert len(calls) == traced > 0


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
    for layout in ("dp=8", "dp=8,tp=4,ep=2"):
        spec, call = compiled(layout, METHODS["ragged"], EXPERTS)
        tokens = TOKENS * spec.num_devices
        x, weights = coded_rows(tokens), weights_of(tokens)
        for name, slots in routings(tokens, EXPERTS, spec.num_devices).items():
            np.testing.assert_array_equal(call(x, slots, weights)[0], expected(x, slots, weights), err_msg=name)


def test_the_native_ragged_all_to_all_lowers_for_cuda():
    from sharding.dispatch.group import ExpertGroup
    from sharding.dispatch.ragged import ragged_exchange

    spec = MeshSpec.parse("dp=8")
    group = ExpertGroup.of(spec, EXPERTS, "gpu")
    ones = jnp.ones((8,), jnp.int32)

    def exchange(rows):
        return ragged_exchange(group, rows, jnp.zeros_like(rows), ones, ones, lands_G=ones, most=3)

    over = jax.sharding.PartitionSpec(spec.token_axes)
    step = jax.shard_map(exchange, mesh=spec.build(), in_specs=over, out_specs=over, check_vma=False)
    text = jax.jit(step).trace(jnp.ones((64, 4), jnp.uint16)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @ragged_all_to_all") == 1
    assert 'all_to_all"(' not in text


@pytest.mark.slow
def test_seventy_two_ranks_with_redundant_experts():
    """DEP72: 256 experts and 32 redundant ones, 4 on a rank; more devices than the test process emulates."""
    program = Path(__file__).parent / "dispatch_on_72_ranks.py"
    environment = {
        **os.environ,
        "XLA_FLAGS": " ".join(
            (
                *QUICK_COMPILATION,
                "--xla_force_host_platform_device_count=72 --xla_cpu_collective_call_terminate_timeout_seconds=60",
            )
        ),
        "PJRT_NPROC": "144",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    ran = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.split("\n")[0] == "72 ranks, 288 physical experts: gather padded ragged exact"
