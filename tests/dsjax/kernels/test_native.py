"""The native kernels give what the plain forms give, over shapes of all kinds."""

import ctypes
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from kernel_cases import (
    ATTENTION,
    DENSE,
    EXPERTS,
    INDEX,
    STORED,
    AttentionCase,
    CompressedCase,
    DenseCase,
    ExpertsCase,
    IndexCase,
    as_stored,
    scaled,
)

from dsjax.fp4 import rows as nvfp4_rows
from dsjax.kernels.native_calls import ExchangeInMemory
from dsjax.kernels.table import PLAIN
from dsjax.model.experts import ExpertProduct
from dsjax.model.fp8_product import ActivationScheme
from dsjax.model.sparse.choose import pack
from sharding import fp8
from sharding.cores import most_threads
from sharding.dispatch import DispatchConfig, dispatch
from sharding.mesh import MeshSpec
from sharding.sums import add_as_tree, add_in_order, pieces_here

FEW = settings(max_examples=8, deadline=None, derandomize=True)


def with_threads(kernels, threads):
    return dataclasses.replace(kernels, native=dataclasses.replace(kernels.native, threads=threads))


def experts_of(kernels, case, threads=1):
    return case.by(ExpertProduct(weight_dtype=STORED[case.down.itemsize], kernels=with_threads(kernels, threads)))


def attention_of(kernels, case, form, threads=1, chosen=None, weights=None):
    """weights: ``W^UK`` and ``W^UV`` as a stack of layers, of which the last counts; None: those of the case, in float32."""
    native = with_threads(kernels, threads).native
    filled = None if case.filled is None else jnp.asarray(case.filled, bool)

    def run(queries, cache, rows, *chosen):
        layer = jnp.int32(len(case.latent) - 1)
        return native.attention(f"{form}_attention", *queries, cache, layer, *rows, filled, *chosen, scale=case.scale)

    weights = weights or {"weight": case.weights.reshape(1, len(case.weights), -1)}
    last = jnp.int32(len(weights["weight"]) - 1)
    queries, rows = (case.q_nope, case.q_rope, weights, last), (case.start, case.length, case.tables)
    return np.asarray(jax.jit(run)(queries, case.cache(), rows, *([] if chosen is None else [chosen])))


@pytest.mark.slow
@FEW
@given(**EXPERTS)
def test_experts_are_those_of_the_plain_form(kernels, **drawn):
    case = ExpertsCase.drawn(**drawn)
    case.assert_near(experts_of(kernels, case))
    case.assert_near(case.by(ExpertProduct(weight_dtype=STORED[drawn["stored"]])))


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_and_the_other_rows_change_no_bit_of_an_experts_result(kernels, threads):
    case = ExpertsCase.drawn(1, X=6, D=256, F=32, N=90, K=4, stored=2, routing="all")
    once = experts_of(kernels, case)
    np.testing.assert_array_equal(experts_of(kernels, case, threads), once)
    np.testing.assert_array_equal(experts_of(kernels, case.first(1), threads), once[:1])


@pytest.mark.slow
@pytest.mark.parametrize(("stored", "D", "F"), [(4, 530, 270), (2, 1040, 530), (1, 2060, 1030)])
def test_a_rows_sum_is_the_same_where_matrices_stream_by_and_where_they_are_read_in_panels(kernels, stored, D, F):
    case = ExpertsCase.drawn(8, X=2, D=D, F=F, N=57, K=2, stored=stored, layers=1, routing="one expert")
    every = experts_of(kernels, case)
    expected, size = case.expected()
    assert (np.abs(every - expected) <= 1e-5 * np.maximum(size, 1)).all()
    for count, threads in ((1, 1), (3, 3), (5, 1), (8, 2), (9, 2)):
        np.testing.assert_array_equal(experts_of(kernels, case.first(count), threads), every[:count])


# Nine rows go in panels, fewer stream by; the last scale is beyond float32 where a widening is left 2^8 to multiply by.
@pytest.mark.parametrize(("N", "scale"), [(1, 2.0**121), (2, 1), (8, 2.0**-120), (9, 2.0**121)])
def test_each_value_of_fp8_is_widened_exactly(kernels, N, scale):
    codes, scales = np.arange(256, dtype=np.uint8).view(STORED[1]), np.full((2, 1, 1, 2), scale, np.float32)
    case = DenseCase(np.tile(codes, (2, 1, 1, 1)), scales, np.ones((N, 1), np.float32), False)
    with np.errstate(over="ignore"):
        expected = codes.astype(np.float32) * np.float32(scale)
    expected[np.abs(expected) < np.finfo(np.float32).tiny] = 0  # as XLA's threads have it
    np.testing.assert_array_equal(dense_of(kernels, case)[:, 0], np.tile(expected, (N, 1)))


@pytest.mark.parametrize("F", [32, 528])  # read in place, and by panels
def test_a_share_of_the_experts_width_gives_a_branch_of_the_whole_sum(kernels, F):
    case = ExpertsCase.drawn(4, X=5, D=300, F=F, N=20, K=3, stored=2, routing="all")
    whole = experts_of(kernels, case)

    def share(index, shares):
        part = slice(index * F // shares, (index + 1) * F // shares)
        mine = dataclasses.replace(case, gate_up=case.gate_up[..., part], down=case.down[:, :, part])
        product = ExpertProduct(weight_dtype=STORED[2], kernels=kernels, width_shares=shares)
        return jax.jit(product.terms)(mine.params(), mine.rows, mine.ids, mine.weights)

    for shares in (1, 2, 4, 8):
        terms = add_as_tree(jnp.stack([share(index, shares) for index in range(shares)]))
        np.testing.assert_array_equal(add_in_order(terms, axis=1), whole)


@pytest.mark.parametrize("powers", [False, True])
def test_experts_round_rows_and_hidden_values_to_fp8_as_the_plain_form_does(kernels, powers):
    case = ExpertsCase.drawn(9, X=4, D=300, F=256, N=11, K=2, stored=1)
    scheme = ActivationScheme(dynamic=True, powers=powers)
    products = (ExpertProduct(weight_dtype=STORED[1], kernels=chosen, scheme=scheme) for chosen in (kernels, PLAIN))
    found, plain = map(case.by, products)
    exact, size = case.expected()
    assert np.abs(plain - exact).max() > 1e-3 * size.max(), "activations are quantised at all"
    assert np.all(np.abs(found - plain) <= 2e-5 * size)


@pytest.mark.slow
def test_numbers_of_all_sizes_are_rounded_to_fp8_and_to_nvfp4_alike(kernels):
    """Hidden values go through an expert that is the identity: silu(x) × 1, rounded."""
    rng, N, F = np.random.default_rng(2), 64, 256
    rows = (rng.normal(size=(N, F)) * 10.0 ** rng.integers(-12, 12, size=(N, F))).astype(np.float32)
    rows[3, 5], rows[4, 200], rows[5] = np.nan, np.inf, 0
    rows[6] = 2.0 ** (np.arange(F) % 8)  # with scales that are powers of two, each is half way between two numbers
    gate_up = np.zeros((1, 1, F + 1, 2, F), np.float32)
    gate_up[0, 0, np.arange(F), 1, np.arange(F)], gate_up[0, 0, F, 0] = 1, 100  # silu(100) is 100
    stack = {"gate_up.weight": gate_up, "down.weight": np.eye(F, F + 1, dtype=np.float32)[None, None]}
    wide = np.concatenate([rows, np.ones((N, 1), np.float32)], axis=1)
    one = np.zeros((N, 1), np.int32), np.full((N, 1), 0.01, np.float32)
    hundredfold = rows * np.float32(100)
    for hidden, powers, rounded in (
        ("fp8", False, fp8.dequantise(*fp8.quantise(hundredfold))),
        ("fp8", True, fp8.dequantise(*fp8.quantise(hundredfold, powers=True))),
        ("nvfp4", False, nvfp4_rows.round_trip(hundredfold)),
    ):
        found = kernels.native.experts(stack, jnp.int32(0), wide, *one, hidden=hidden, powers=powers)[:, :F]
        finite = [n for n in range(N) if n not in (3, 4)]
        np.testing.assert_array_equal(np.asarray(found)[finite], np.asarray(rounded * np.float32(0.01))[finite])
        assert np.isnan(np.asarray(found)[3:5]).any(axis=1).all()


def dense_of(kernels, case, rows=None, threads=1, **options):
    rows, native = case.rows if rows is None else rows, with_threads(kernels, threads).native
    found = native.dense(as_stored(case.weight), case.scale, jnp.int32(1), rows, transposed=case.transposed, **options)
    return np.asarray(found).reshape(len(rows), *found.shape[1:])


@pytest.mark.slow
@FEW
@given(**DENSE, pieces=st.sampled_from([1, 2, 8]), threads=st.sampled_from([1, 3]))
def test_the_other_rows_change_no_bit_of_a_rows_product(kernels, pieces, threads, **drawn):
    case = DenseCase.drawn(N=130, **drawn)
    every = dense_of(kernels, case, pieces=pieces, threads=threads)
    case.assert_near(every)
    for count in (1, 2, 5, 8, 9, 97):
        np.testing.assert_array_equal(dense_of(kernels, case, case.rows[:count], pieces=pieces), every[:count])
    empty = np.arange(12) % 3 != 1  # rows of padding, which are passed over
    found = dense_of(kernels, case, np.where(empty[:, None], 0, case.rows[:12]), pieces=pieces, threads=threads)
    expected = np.where(empty.reshape(-1, *[1] * (every.ndim - 1)), np.float32(0), every[:12])
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize(("N", "stored"), [(1, 2), (8, 4), (40, 2)])
def test_columns_and_branches_of_a_product_have_the_bits_of_the_whole(kernels, N, stored):
    case = DenseCase.drawn(9, K=256, width=96, N=N, stored=stored)
    whole = dense_of(kernels, case, pieces=8).reshape(N, 96)
    left = dataclasses.replace(case, weight=case.weight[..., 48:])
    np.testing.assert_array_equal(dense_of(kernels, left, pieces=8).reshape(N, 48), whole[:, 48:])
    for shares in (2, 4, 8):
        parts = zip(*(np.split(array, shares, axis=1) for array in (case.weight, case.rows)), strict=True)
        own = [dataclasses.replace(case, weight=weight, rows=rows) for weight, rows in parts]
        branches = jnp.stack([dense_of(kernels, one, pieces=8 // shares) for one in own])
        np.testing.assert_array_equal(add_as_tree(branches).reshape(N, 96), whole)


@pytest.mark.parametrize("N", [3, 40])
def test_each_group_of_a_matrix_multiplies_values_of_its_own(kernels, N):
    rng = np.random.default_rng(3)
    weight, rows = (rng.normal(0, 1, shape).astype(np.float32) for shape in ((1, 24, 5, 37), (N, 5, 24)))
    rows[1] = 0  # padding
    dense = jax.jit(functools.partial(kernels.native.dense, grouped=True))
    found = np.asarray(dense(weight, None, jnp.int32(0), rows))
    for group in range(5):
        alone = kernels.native.dense(weight[:, :, group], None, jnp.int32(0), rows[:, group])
        np.testing.assert_array_equal(found[:, group], alone)


@pytest.mark.parametrize("width", [1, 16, 37, 256])
def test_norms_are_those_of_the_plain_form_and_each_row_is_by_itself(kernels, width):
    rng = np.random.default_rng(width)
    rows, scale = rng.normal(size=(19, width)).astype(np.float32), rng.normal(size=width).astype(np.float32)
    found = np.asarray(kernels.native.norm(rows, scale, 1e-6))

    def norm(x, shift=0):
        return scale * x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-6) + shift

    wide = rows.astype(np.float64)
    np.testing.assert_allclose(found, norm(wide), rtol=1e-5, atol=1e-6)
    for count in (1, 4):
        np.testing.assert_array_equal(kernels.native.norm(rows[:count], scale, 1e-6), found[:count])
    shifted = kernels.native.norm(rows, scale, 1e-6, scale[::-1])
    expected = norm(wide - wide.mean(axis=1, keepdims=True), scale[::-1])
    np.testing.assert_allclose(shifted, expected, rtol=1e-5, atol=1e-5)


def test_norms_of_many_rows_have_the_same_bits_on_any_number_of_threads(kernels):
    """2,055 rows of 256: enough for several threads, and no whole number of the parts that a thread takes."""
    rows, scale = np.random.default_rng(1).normal(size=(2055, 256)).astype(np.float32), np.ones(256, np.float32)
    found = np.asarray(with_threads(kernels, 3).native.norm(rows, scale, 1e-6))
    np.testing.assert_array_equal(found, with_threads(kernels, 1).native.norm(rows, scale, 1e-6))
    np.testing.assert_array_equal(found[2054:], kernels.native.norm(rows[2054:], scale, 1e-6))


@FEW
@given(**ATTENTION, form=st.sampled_from(["absorbed", "expanded"]), threads=st.sampled_from([1, 3]))
def test_attention_is_softmax_over_each_rows_pages(kernels, form, threads, **drawn):
    case = AttentionCase.drawn(**drawn)
    found = attention_of(kernels, case, form, threads)
    # Scores of N + O or M + O products reach 30 with the widest; e to an error of a few units in their last place.
    np.testing.assert_allclose(found, case.expected(), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_a_query_sees_its_own_slot_even_where_nothing_else_is_filled(kernels, form):
    case = AttentionCase.drawn(3, R=3, C=4, H=8, N=8, O=4, U=8, M=16, G=4, longest=200)
    case = dataclasses.replace(case, filled=np.zeros_like(case.latent[0, ..., 0], np.uint8))
    np.testing.assert_allclose(attention_of(kernels, case, form), case.expected(), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_threads_and_the_other_rows_change_no_bit_of_a_rows_attention(kernels, form):
    case = AttentionCase.drawn(2, R=5, C=6, H=8, N=32, O=16, U=32, M=64, G=16, longest=300, holes=True)
    case = dataclasses.replace(case, length=np.array([6, 0, 3, 6, 1], np.int32))
    once = attention_of(kernels, case, form)
    np.testing.assert_array_equal(attention_of(kernels, case, form, 3), once)
    row = {name: getattr(case, name)[3:4] for name in ("q_nope", "q_rope", "start", "length", "tables")}
    np.testing.assert_array_equal(attention_of(kernels, dataclasses.replace(case, **row), form), once[3:4])
    assert not once[1].any()


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("stored", [2, 1])
def test_attention_widens_stored_weights_to_the_bits_of_float32_ones(kernels, form, stored):
    # Heads of 75 + 43 cut blocks of 128.
    case = AttentionCase.drawn(4, R=3, C=2, H=3, N=75, O=16, U=43, M=150, G=16, longest=90)
    matrix = DenseCase.drawn(5, K=150, width=3 * (75 + 43), N=1, stored=stored)
    arrays = {"weight": as_stored(matrix.weight[:, :, 0])} | ({"scale": matrix.scale[:, :, 0]} if stored == 1 else {})
    value = scaled(matrix.weight[1, :, 0], None if stored > 1 else arrays["scale"][1], (0, 1)).astype(np.float32)
    widened = dataclasses.replace(case, weights=value.reshape(150, 3, -1))
    found = attention_of(kernels, case, form, weights=arrays)
    np.testing.assert_array_equal(found, attention_of(kernels, widened, form))


@pytest.mark.parametrize(("stored", "H"), [(4, 3), (2, 16), (1, 8)])
def test_a_token_alone_has_the_bits_of_it_behind_others(kernels, stored, H):
    """Few queries have their scores summed by another loop than many, which fill several vectors."""
    case = AttentionCase.drawn(3, R=4, C=6, H=H, N=32, O=16, U=32, M=65, G=16, longest=300, holes=True, stored=stored)
    case = dataclasses.replace(case, length=np.full(4, 6, np.int32))
    last = {name: getattr(case, name)[:, 5:] for name in ("q_nope", "q_rope")}
    alone = dataclasses.replace(case, **last, start=case.start + 5, length=np.ones(4, np.int32))
    found, among = (attention_of(kernels, one, "absorbed") for one in (alone, case))
    np.testing.assert_array_equal(found[:, 0], among[:, 5])


@pytest.mark.parametrize(("H", "kind", "threads"), [(50, "hca", 3), (3, "csa", 1)])
def test_attention_of_one_key_value_head_is_a_softmax_with_a_sink_a_window_and_entries(kernels, H, kind, threads):
    case = CompressedCase.drawn(8, R=2, C=3, H=H, M=37, G=8, E=4, longest=60, kind=kind, holes=True)
    found = case.by(with_threads(kernels, threads).native.compressed_attention)
    np.testing.assert_allclose(found, case.expected(), rtol=1e-5, atol=1e-5)


def test_a_row_of_no_queries_reads_nothing(kernels):
    case = AttentionCase.drawn(2, R=2, C=1, H=2, N=8, O=4, U=8, M=16, G=4, longest=30)
    # Were it read, this table would lead far out of the cache.
    tables = np.stack([case.tables[0], np.full_like(case.tables[1], 2**30)])
    case = dataclasses.replace(case, length=np.array([1, 0], np.int32), tables=tables)
    for form in ("absorbed", "expanded"):
        found = attention_of(kernels, case, form)
        assert np.all(np.isfinite(found[0]))
        assert not found[1].any()


def test_what_a_query_has_not_chosen_is_left_out_like_what_is_not_there(kernels):
    case = AttentionCase.drawn(6, R=3, C=50, H=2, N=8, O=4, U=8, M=16, G=4, longest=150, holes=True)
    R, C, S = *case.q_rope.shape[:2], case.tables.shape[1] * 4
    there = np.broadcast_to(case.filled[case.tables].reshape(R, 1, S), (R, C, S)).copy()
    for row, query in np.ndindex(R, C):
        there[row, query, min(case.start[row] + query, S - 1)] = 1
    chosen = pack(jnp.asarray(there, bool))
    found = attention_of(kernels, dataclasses.replace(case, filled=None), "expanded", chosen=chosen)
    np.testing.assert_array_equal(found, attention_of(kernels, case, "expanded"))


def choice_of(kernels, case, threads=1):
    """Chosen positions, their numbers, and the words, of the native kernel."""

    def run(query, weight, cache, positions, tables, filled):
        layer, native = jnp.int32(len(case.keys) - 1), with_threads(kernels, threads).native
        return native.index_choice(query, weight, cache, layer, positions, tables, filled, case.k)

    arrays = (case.query, case.weight, case.cache(), case.positions, case.tables, case.filled)
    return [np.asarray(part) for part in jax.jit(run)(*arrays)]


@FEW
@given(**INDEX, threads=st.sampled_from([1, 3]))
def test_index_choices_are_the_highest_scores_and_of_equal_ones_the_first(kernels, threads, **drawn):
    case = IndexCase.drawn(**drawn)
    chosen, count, words = choice_of(kernels, case, threads)
    case.assert_chosen(chosen)
    bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little").reshape(count.size, -1)
    for number, marked, expected in zip(count.reshape(-1), bits, case.expected(), strict=True):
        assert number == len(expected)
        assert np.flatnonzero(marked).tolist() == expected


def meeting(native, kind):
    """``(run, expected)`` of four devices that exchange rows in memory, or whose experts read each other's.

    ``run(places, groups)`` takes the place and the group that each device says it has; kind: ``gather``, ``swap`` or ``experts``.
    """
    case, mesh = ExpertsCase.drawn(6, X=8, D=24, F=16, N=16, K=2, routing="all"), MeshSpec.parse("dp=4").build()
    layer = (stack := case.params()).pop("layer")

    def meet(stack, rows, ids, weights, place, group):
        if kind == "experts":
            where = {"ranks": 4, "held": 2, "pieces": pieces_here(16, 1)}
            return native.experts_together(stack, layer, rows, ids, weights, place[0], group[0], **where)[0]
        return native.exchange(rows, place[0], group[0], ranks=4, gathers=kind == "gather")

    spread = P(mesh.axis_names)
    specs = dict.fromkeys(stack, P(None, mesh.axis_names)), *[spread] * 5
    compiled = jax.jit(jax.shard_map(meet, mesh=mesh, in_specs=specs, out_specs=spread, check_vma=False))

    def run(places=range(4), groups=(0, 0, 0, 0)):
        own = (np.array([*values], np.int32) for values in (places, groups))
        return np.asarray(jax.block_until_ready(compiled(stack, case.rows, case.ids, case.weights, *own)))

    swapped = case.rows.reshape(4, 4, 24).swapaxes(0, 1).reshape(16, 24)
    return run, {"gather": np.tile(case.rows, (4, 1)), "swap": swapped, "experts": case}[kind]


@pytest.mark.parametrize(("place", "kind"), [(7, "gather"), (-1, "swap"), (1, "swap"), (1, "experts"), (-1, "experts")])
def test_devices_whose_places_are_not_all_different_fail_and_none_waits_for_them(kernels, place, kind):
    run, expected = meeting(kernels.native, kind)
    with pytest.raises(Exception, match="had not the places 0 to ranks - 1"):
        run([0, 1, place, 3])
    np.testing.assert_array_equal(run(), experts_of(kernels, expected) if kind == "experts" else expected)


@pytest.mark.parametrize("kind", ["gather", "experts"])
def test_who_waits_in_memory_for_a_device_that_does_not_come_is_told_in_time(kernels, kind):
    """One is taken to another group, as if its program had failed before."""
    run, expected = meeting(dataclasses.replace(kernels.native, patience=1), kind)
    with pytest.raises(Exception, match="did not come to an exchange with the others in 1 s"):
        run(groups=[0, 0, 1, 0])
    np.testing.assert_array_equal(run(), experts_of(kernels, expected) if kind == "experts" else expected)


def test_rows_that_are_no_equal_blocks_are_refused_as_the_program_is_made(kernels):
    with pytest.raises(ValueError, match="6 rows are exchanged between 4 devices"):
        kernels.native.exchange(jnp.zeros((6, 2)), jnp.int32(0), jnp.int32(0), ranks=4, gathers=False)


@pytest.mark.parametrize("gathers", [True, False])
def test_a_device_that_is_at_an_exchange_along_other_axes_meets_nobody_of_the_one_before(kernels, gathers):
    """Blocks are equal. A row of the mesh is late at the exchange along rows, when the other one is at the exchange along columns."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("row", "column"))
    in_memory = ExchangeInMemory(kernels.native, mesh.axis_names)

    def by_xla(rows, axes, ranks, gathers):
        if gathers:
            return jax.lax.all_gather(rows, axes, axis=0, tiled=True)
        return jax.lax.all_to_all(rows, axes, split_axis=0, concat_axis=0, tiled=True)

    def exchanged(exchange, rows):
        turns = 1_000_000 * jax.lax.axis_index("row")
        late = rows + 0 * jax.lax.fori_loop(0, turns, lambda _, x: jnp.sin(x + rows[0, 0]), 0.0)
        first = exchange(late, ("column",), 2, gathers)
        return exchange(first[2:6] if gathers else first[::-1], ("row",), 2, gathers)

    spread, rows = P(mesh.axis_names), np.arange(16 * 3, dtype=np.float32).reshape(16, 3)
    on_mesh = functools.partial(jax.shard_map, mesh=mesh, in_specs=spread, out_specs=spread, check_vma=False)
    mine, theirs = (jax.jit(on_mesh(functools.partial(exchanged, one)))(rows) for one in (in_memory, by_xla))
    np.testing.assert_array_equal(mine, theirs)


def test_an_expert_that_no_device_has_is_none_where_experts_read_in_memory(kernels):
    case = ExpertsCase.drawn(7, X=8, D=24, F=16, N=8, K=3, routing="some")
    expected = experts_of(kernels, case)
    case.ids[case.ids < 0] = 8
    np.testing.assert_array_equal(dispatched(kernels, case, "dp=4")[0], expected)


@pytest.mark.parametrize("wrong", ["too many experts", "rows of whole numbers", "fewer weights than choices"])
def test_experts_together_that_do_not_fit_are_refused_and_read_nothing(kernels, wrong):
    case = ExpertsCase.drawn(8, X=2, D=24, F=16, N=4, K=2, routing="all")
    rows = case.rows.view(np.int32) if wrong == "rows of whole numbers" else case.rows
    weights = case.weights[:, :1] if wrong == "fewer weights than choices" else case.weights
    options = {"ranks": 1, "held": 3 if wrong == "too many experts" else 2}
    zero = (stack := case.params()).pop("layer") * 0
    call = jax.jit(lambda *tokens: kernels.native.experts_together(stack, zero, *tokens, zero, zero, **options))
    with pytest.raises(Exception, match="experts were given other"):
        jax.block_until_ready(call(rows, case.ids, weights))


def test_experts_together_keep_memory_for_the_threads_that_compute_and_not_for_all_of_xlas(kernels):
    case = ExpertsCase.drawn(9, X=16, D=24, F=16, N=16, K=4, routing="all")
    desks = ctypes.CDLL(str(kernels.native.path)).dsjax_experts_together_desks
    desks.restype = ctypes.c_int64
    before = desks()  # of what computed in this process before, several groups of devices at once
    for _ in range(20):
        dispatched(kernels, case, "dp=8")
    assert 1 <= desks() <= max(before, most_threads())


def dispatched(kernels, case, mesh, **options):
    """What ``dispatch`` gives for the case's rows by choice, whose experts are spread over ``mesh`` and read rows where they lie."""
    product = ExpertProduct(weight_dtype=STORED[case.down.itemsize], kernels=with_threads(kernels, 1))
    spec = MeshSpec.parse(mesh)
    params, on = case.params(), spec.build()
    carried = ExchangeInMemory(kernels.native, on.axis_names, experts_read_tokens=True)
    config = DispatchConfig(by_choice=True, in_memory=carried, **options)
    specs = {name: P() if name == "layer" else P(None, spec.expert_axes) for name in params}
    run = functools.partial(dispatch, spec, on, config, local_experts=product, param_specs=specs)
    call = lambda params, *tokens: run(*tokens, params=params, experts=case.down.shape[1])  # noqa: E731
    return jax.jit(call)(params, case.rows, case.ids, case.weights)


@pytest.mark.parametrize(("mesh", "stored", "N"), [("dp=8", 4, 48), ("dp=4,tp=2,ep=4", 4, 48), ("dp=8,ep=2", 2, 8)])
def test_experts_that_read_tokens_where_they_lie_give_the_sums_of_one_device(kernels, mesh, stored, N):
    case = ExpertsCase.drawn(5, X=16, D=40, F=24, N=N, K=4, stored=stored, routing="some")
    case.ids[: N // 8] = -1  # a rank without a token
    sums, counts = dispatched(kernels, case, mesh, report=True)
    np.testing.assert_array_equal(sums, experts_of(kernels, case))
    gathered, counted = dispatched(kernels, case, mesh, report=True, method="gather")
    np.testing.assert_array_equal(gathered, sums)
    jax.tree.map(np.testing.assert_array_equal, counts, counted)
