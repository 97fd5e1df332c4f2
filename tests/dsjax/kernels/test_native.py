"""The native kernels give what the plain forms give, over shapes of all kinds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import STORED, AttentionCase, ExpertsCase

from dsjax.model.experts import ExpertProduct
from sharding.dispatch.wire import WireFormat

FEW = settings(max_examples=12, deadline=None, derandomize=True)


def with_threads(kernels, threads):
    return dataclasses.replace(kernels, native=dataclasses.replace(kernels.native, threads=threads))


def experts_of(kernels, case, threads=1):
    product = ExpertProduct(weight_dtype=STORED[case.down.itemsize], kernels=with_threads(kernels, threads))
    return np.asarray(jax.jit(product)(case.params(), case.rows, case.ids, case.weights))


def attention_of(kernels, case, form, threads=1):
    native = dataclasses.replace(kernels.native, threads=threads)
    kernel = native.absorbed_attention if form == "absorbed" else native.expanded_attention

    def run(case_arrays, cache):
        return kernel(
            *case_arrays[:3],
            cache,
            jnp.int32(len(case.latent) - 1),
            *case_arrays[3:6],
            None if case.filled is None else jnp.asarray(case.filled, bool),
            scale=case.scale,
            value_width=case.value_width,
            latent_width=case.latent.shape[-1],
        )

    arrays = (case.q_nope, case.q_rope, case.weights, case.start, case.length, case.tables)
    return np.asarray(jax.jit(run)(arrays, case.cache()))


@FEW
@given(
    seed=st.integers(0, 2**31),
    X=st.integers(1, 9),
    D=st.integers(1, 300),
    F=st.integers(1, 150),
    N=st.sampled_from([1, 2, 7, 60]),
    K=st.integers(1, 4),
    stored=st.sampled_from([4, 2, 1]),
    routing=st.sampled_from(["all", "some", "one expert", "none"]),
)
def test_experts_are_those_of_the_plain_form(kernels, seed, X, D, F, N, K, stored, routing):
    case = ExpertsCase.drawn(seed, X=X, D=D, F=F, N=N, K=K, stored=stored, routing=routing)
    plain = jax.jit(ExpertProduct(weight_dtype=STORED[stored]))(case.params(), case.rows, case.ids, case.weights)
    expected, size = case.expected()
    # float32 sums of D and of F products: relative to what is added up, a few units in the last place of it
    bound = 1e-6 * (D + F) ** 0.5 * (size + 1)
    assert np.all(np.abs(experts_of(kernels, case) - expected) <= bound)
    assert np.all(np.abs(experts_of(kernels, case) - np.asarray(plain)) <= 2 * bound)


def test_wide_matrices_are_read_in_panels(kernels):
    case = ExpertsCase.drawn(3, X=3, D=700, F=530, N=40, K=2, stored=2, routing="all")
    expected, size = case.expected()
    assert np.all(np.abs(experts_of(kernels, case) - expected) <= 1e-6 * 1230**0.5 * (size + 1))


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_and_the_other_rows_change_no_bit_of_an_experts_result(kernels, threads):
    case = ExpertsCase.drawn(1, X=6, D=256, F=32, N=90, K=4, stored=2, routing="all")
    alone = dataclasses.replace(case, rows=case.rows[:1], ids=case.ids[:1], weights=case.weights[:1])
    once = experts_of(kernels, case)
    np.testing.assert_array_equal(experts_of(kernels, case, threads), once)
    np.testing.assert_array_equal(experts_of(kernels, alone, threads), once[:1])


def test_packed_rows_are_read_in_place(kernels):
    case = ExpertsCase.drawn(5, X=4, D=24, F=8, N=11, K=2)
    wire = WireFormat(24, 2, jnp.dtype(jnp.float32))

    def run(params, rows, ids, weights):
        packed, ids, weights, _ = wire.unpack(wire.pack(rows, ids, weights, jnp.int32(0)))
        return ExpertProduct(kernels=kernels)(params, packed, ids, weights)

    found = jax.jit(run)(case.params(), case.rows, case.ids, case.weights)
    np.testing.assert_array_equal(found, experts_of(kernels, case))


@FEW
@given(
    seed=st.integers(0, 2**31),
    R=st.integers(1, 4),
    C=st.sampled_from([1, 2, 5, 70]),
    H=st.integers(1, 9),
    widths=st.tuples(*(st.integers(1, 70) for _ in "NOU"), st.sampled_from([1, 16, 67, 128, 131])),
    G=st.sampled_from([1, 4, 16]),
    longest=st.sampled_from([1, 64, 65, 200]),
    stored=st.sampled_from([4, 2, 1]),
    form=st.sampled_from(["absorbed", "latent", "expanded"]),
    threads=st.sampled_from([1, 3]),
    holes=st.booleans(),
)
def test_attention_is_softmax_over_each_rows_pages(
    kernels, seed, R, C, H, widths, G, longest, stored, form, threads, holes
):
    N, O, U, M = widths
    sizes = {"R": R, "C": C, "H": H, "N": N, "O": O, "U": U, "M": M, "G": G, "longest": longest}
    case = AttentionCase.drawn(seed, **sizes, stored=stored, absorbs=form != "latent", holes=holes)
    found = attention_of(kernels, case, "expanded" if form == "expanded" else "absorbed", threads)
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


def test_a_row_of_no_queries_reads_nothing(kernels):
    case = AttentionCase.drawn(2, R=2, C=1, H=2, N=8, O=4, U=8, M=16, G=4, longest=30)
    # Were it read, this table would lead far out of the cache.
    tables = np.stack([case.tables[0], np.full_like(case.tables[1], 2**30)])
    case = dataclasses.replace(case, length=np.array([1, 0], np.int32), tables=tables)
    for form in ("absorbed", "expanded"):
        found = attention_of(kernels, case, form)
        assert np.all(np.isfinite(found[0]))
        assert not found[1].any()


def test_the_joined_cache_is_read_like_the_split_one(kernels):
    case = AttentionCase.drawn(4, R=2, C=2, H=3, N=8, O=4, U=8, M=16, G=4, longest=90)
    joined = np.concatenate([case.latent, case.rope], axis=-1)
    found = kernels.native.absorbed_attention(
        *(jnp.asarray(a) for a in (case.q_nope, case.q_rope, case.weights)),
        {"joined": jnp.asarray(joined)},
        jnp.int32(1),
        *(jnp.asarray(a) for a in (case.start, case.length, case.tables)),
        scale=case.scale,
        value_width=8,
        latent_width=16,
    )
    np.testing.assert_array_equal(found, attention_of(kernels, case, "absorbed"))
