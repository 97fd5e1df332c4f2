"""The Pallas kernels, run by their interpreter, give what the plain forms give, over shapes of all kinds.

The interpreter takes a tenth of a second and more for a call, so that the cases are small and few.
"""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import STORED, AttentionCase, ExpertsCase, IndexCase
from layouts import MODELS, TINY, answer, difference, wide, write_checkpoint

from dsjax.bench.modules.setting import random_parameter
from dsjax.config import ModelConfig, QuantizationConfig
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.assembly import make_step
from dsjax.errors import UserError
from dsjax.kernels.pallas import activations, addressing, attention, cost, experts, heads, index, products
from dsjax.kernels.table import Kernels, choose_kernels
from dsjax.model.experts import ExpertProduct
from dsjax.model.fp8_product import ActivationScheme, block_product
from dsjax.model.sparse import choose
from sharding import MeshSpec, fp8
from sharding.dispatch.wire import WireFormat

pytestmark = pytest.mark.slow  # all together

FEW = settings(max_examples=4, deadline=None, derandomize=True)
PALLAS = choose_kernels("pallas", "cpu", np.dtype(np.float32), devices=1, cache=None)


def attention_of(case, tiles=None, *, joined=False, filled=None, dtype=np.float32):
    cache = case.cache()
    if joined:
        cache = {"joined": np.concatenate(list(cache.values()), axis=-1)}
    return np.asarray(
        attention.latent_attention(
            jnp.asarray(case.q_nope, dtype),
            jnp.asarray(case.q_rope, dtype),
            cache,
            case.latent.dtype,
            jnp.int32(len(case.latent) - 1),
            *(jnp.asarray(a) for a in (case.start, case.length, case.tables)),
            filled,
            scale=case.scale,
            interpret=True,
            tiles=tiles or attention.AttentionTiles(rows=16, positions=16),
        )
    ).astype(np.float64)


@FEW
@given(
    seed=st.integers(0, 2**31),
    R=st.integers(1, 3),
    C=st.sampled_from([1, 3, 20]),
    H=st.integers(1, 5),
    O=st.integers(1, 20),
    M=st.sampled_from([1, 16, 40, 128, 150]),
    G=st.sampled_from([1, 4, 16]),
    longest=st.sampled_from([1, 16, 17, 70]),
    kept=st.sampled_from([(4, False), (4, True), (2, False), (2, True), (1, False)]),
)
def test_attention_is_softmax_over_each_rows_pages(seed, R, C, H, O, M, G, longest, kept):
    stored, joined = kept
    case = AttentionCase.drawn(
        seed, R=R, C=C, H=H, N=1, O=O, U=1, M=M, G=G, longest=longest, stored=stored, absorbs=False
    )
    found = attention_of(case, joined=joined)
    # Scores of M + O products reach 15; e to an error of a few units in their last place.
    np.testing.assert_allclose(found, case.expected(), atol=2e-4, rtol=2e-4)


def test_holes_are_not_seen_but_a_token_sees_itself():
    case = AttentionCase.drawn(3, R=2, C=3, H=2, N=1, O=4, U=1, M=16, G=4, longest=40, absorbs=False)
    case = dataclasses.replace(case, length=np.array([3, 2], np.int32))
    filled = np.random.default_rng(0).random(case.latent.shape[1:3]) < 0.5
    found = attention_of(case, filled=jnp.asarray(filled))
    # The same with the holes far away: a latent that scores nothing and is nothing.
    for r, c in [(0, 0), (0, 2), (1, 1)]:
        at = case.start[r] + c
        seen = filled[case.tables[r]].reshape(-1)[: at + 1]
        seen[at] = True
        latent, rope = (
            a[-1][case.tables[r]].reshape(-1, a.shape[-1])[: at + 1][seen] for a in (case.latent, case.rope)
        )
        scores = (case.q_nope[r, c] @ latent.T + case.q_rope[r, c] @ rope.T) * case.scale
        probs = np.exp(scores - scores.max(axis=1, keepdims=True))
        expected = probs / probs.sum(axis=1, keepdims=True) @ latent
        np.testing.assert_allclose(found[r, c], expected, atol=2e-4, rtol=2e-4)


def test_a_row_of_no_queries_reads_nothing_and_gives_zeros():
    case = AttentionCase.drawn(2, R=2, C=1, H=2, N=1, O=4, U=1, M=16, G=4, longest=30, absorbs=False)
    latent = case.latent.copy()
    latent[:, case.tables[1]] = np.nan
    case = dataclasses.replace(case, latent=latent, length=np.array([1, 0], np.int32))
    found = attention_of(case)
    assert np.all(np.isfinite(found[0]))
    assert not found[1].any()


def test_splitting_a_row_s_context_changes_a_result_by_rounding_alone(monkeypatch):
    case = AttentionCase.drawn(5, R=2, C=2, H=2, N=1, O=4, U=1, M=16, G=4, longest=120, absorbs=False)
    case = dataclasses.replace(case, start=np.array([118, 20], np.int32), length=np.array([2, 1], np.int32))
    assert attention.split_context(2, 8) == 8  # more parts than the shorter row has blocks
    split = attention_of(case)
    monkeypatch.setattr(attention, "CORES", 2)
    whole = attention_of(case)
    np.testing.assert_allclose(split, whole, atol=2e-6)
    np.testing.assert_allclose(whole, case.expected(), atol=2e-4)


def test_a_tile_holds_tokens_of_several_positions_or_heads_of_one():
    case = AttentionCase.drawn(6, R=1, C=9, H=5, N=1, O=4, U=1, M=16, G=4, longest=50, absorbs=False)
    case = dataclasses.replace(case, length=np.array([7], np.int32))
    for rows, positions in ((16, 32), (64, 16)):
        found = attention_of(case, attention.AttentionTiles(rows=rows, positions=positions))
        np.testing.assert_allclose(found, case.expected(), atol=2e-4)


def test_bfloat16_queries_and_cache_give_bfloat16_of_nearly_the_same():
    case = AttentionCase.drawn(7, R=2, C=1, H=4, N=1, O=8, U=1, M=32, G=4, longest=60, stored=2, absorbs=False)
    rounded = {name: getattr(case, name).astype(ml_dtypes.bfloat16) for name in ("q_nope", "q_rope")}
    case = dataclasses.replace(case, **{name: a.astype(np.float32) for name, a in rounded.items()})
    # Weights and results are rounded to 8 bits.
    np.testing.assert_allclose(attention_of(case, dtype=jnp.bfloat16), case.expected(), atol=0.02, rtol=0.02)


def product_of(case, dtype=np.float32, **options):
    product = ExpertProduct(weight_dtype=STORED[case.down.itemsize], kernels=PALLAS, **options)
    return np.asarray(
        jax.jit(product)(case.params(), jnp.asarray(case.rows, dtype), case.ids, case.weights), np.float64
    )


@FEW
@given(
    seed=st.integers(0, 2**31),
    X=st.integers(1, 4),
    D=st.integers(1, 150),
    F=st.integers(1, 140),
    N=st.sampled_from([1, 7, 60]),
    K=st.integers(1, 3),
    stored=st.sampled_from([4, 2, 1]),
    routing=st.sampled_from(["all", "some", "one expert", "none"]),
)
def test_experts_are_those_of_the_plain_form(seed, X, D, F, N, K, stored, routing):
    case = ExpertsCase.drawn(seed, X=X, D=D, F=F, N=N, K=K, stored=stored, routing=routing)
    plain = jax.jit(ExpertProduct(weight_dtype=STORED[stored]))(case.params(), case.rows, case.ids, case.weights)
    expected, size = case.expected()
    found = product_of(case, mean_load=4.0)
    # float32 sums of D and of F products: relative to what is added up, a few units in the last place of it
    bound = 1e-6 * (D + F) ** 0.5 * (size + 1)
    assert np.all(np.abs(found - expected) <= bound)
    assert np.all(np.abs(found - np.asarray(plain)) <= 2 * bound)


def test_more_pairs_than_a_round_holds_take_further_rounds():
    case = ExpertsCase.drawn(1, X=2, D=24, F=16, N=150, K=2, routing="all")
    assert experts.round_pairs(1.0, 2, 300) == 128  # of 300 pairs: three rounds
    expected, size = case.expected()
    assert np.all(np.abs(product_of(case, mean_load=1.0) - expected) <= 1e-5 * (size + 1))


@FEW
@given(
    seed=st.integers(0, 2**31),
    T=st.sampled_from([1, 5, 40]),
    K=st.integers(1, 300),
    N=st.integers(1, 150),
    stored=st.sampled_from([4, 2, 1]),
    splits=st.sampled_from([1, 3]),
)
def test_a_dense_product_reads_its_layer_of_the_stack(seed, T, K, N, stored, splits):
    rng = np.random.default_rng(seed)
    weight, x = rng.normal(size=(3, K, N)).astype(STORED[stored]), rng.normal(size=(T, K)).astype(np.float32)
    scale = rng.uniform(0.5, 2, size=(3, -(-K // 128), -(-N // 128))).astype(np.float32) if stored == 1 else None
    tiles = dataclasses.replace(products.ProductTiles.dense(T, K, N), splits=splits)
    found = products.dense(
        jnp.asarray(weight), scale, weight.dtype, jnp.int32(1), jnp.asarray(x), interpret=True, tiles=tiles
    )
    value = weight[1].astype(np.float64)
    if scale is not None:
        value = value * np.repeat(np.repeat(scale[1], 128, axis=0)[:K], 128, axis=1)[:, :N]
    assert np.all(np.abs(found - x @ value) <= 1e-6 * K**0.5 * (np.abs(x) @ np.abs(value) + 1))


@pytest.mark.parametrize(("T", "H", "N", "U", "M", "stored"), [(5, 3, 12, 7, 40, 4), (20, 2, 128, 256, 130, 1)])
def test_keys_go_into_queries_and_values_onto_results_by_head(T, H, N, U, M, stored):
    rng = np.random.default_rng(T)
    weight = rng.normal(size=(2, M, H * (N + U))).astype(STORED[stored])
    scale, value = None, weight[1].astype(np.float64)
    if stored == 1:
        scale = rng.uniform(0.5, 2, size=(2, -(-M // 128), H * (N + U) // 128)).astype(np.float32)
        value = value * np.repeat(np.repeat(scale[1], 128, axis=0)[:M], 128, axis=1)
    keys, values = np.split(value.reshape(M, H, N + U), [N], axis=2)
    q, out = (rng.normal(size=(T, H, width)).astype(np.float32) for width in (N, M))
    arguments = (jnp.asarray(weight), scale, weight.dtype, jnp.int32(1))
    absorbed = heads.absorb(*arguments, jnp.asarray(q), U, interpret=True)
    expanded = heads.expand(*arguments, jnp.asarray(out), U, interpret=True)
    for found, x, by in ((absorbed, q, "thn,mhn->thm"), (expanded, out, "thm,mhu->thu")):
        matrix = keys if found is absorbed else values
        size = np.einsum(by, np.abs(x), np.abs(matrix))
        assert np.all(np.abs(found - np.einsum(by, x, matrix)) <= 1e-5 * (size + 1))
    assert heads.takes(weight, None, N, U)
    assert heads.takes(weight, weight, N, U) == (stored == 1)  # blocks of 128 that cross no head


def test_a_fused_matrix_gives_gate_and_up_apart():
    rng = np.random.default_rng(0)
    weight, x = rng.normal(size=(2, 20, 2, 12)).astype(np.float32), rng.normal(size=(3, 20)).astype(np.float32)
    found = products.dense(jnp.asarray(weight), None, weight.dtype, jnp.int32(1), jnp.asarray(x), interpret=True)
    np.testing.assert_allclose(found, np.einsum("td,dgf->tgf", x, weight[1]), atol=1e-4)
    assert not products.takes(jnp.zeros((2, 200, 2, 140), jnp.float8_e4m3fn), jnp.zeros((2, 2, 2, 2)))


def test_packed_rows_are_read_as_they_come():
    case = ExpertsCase.drawn(5, X=4, D=24, F=8, N=11, K=2)
    wire = WireFormat(24, 2, jnp.dtype(jnp.float32))

    def run(params, rows, ids, weights):
        packed, ids, weights, _ = wire.unpack(wire.pack(rows, ids, weights, jnp.int32(0)))
        return ExpertProduct(kernels=PALLAS)(params, packed, ids, weights)

    found = jax.jit(run)(case.params(), case.rows, case.ids, case.weights)
    np.testing.assert_array_equal(found, product_of(case))


def test_bfloat16_rows_stay_within_their_rounding():
    case = ExpertsCase.drawn(8, X=3, D=64, F=32, N=20, K=2, stored=2, routing="all")
    case = dataclasses.replace(case, rows=case.rows.astype(ml_dtypes.bfloat16).astype(np.float32))
    expected, size = case.expected()
    # The hidden values, each expert's result and the sum are rounded to 8 bits.
    assert np.all(np.abs(product_of(case, jnp.bfloat16) - expected) <= 0.02 * (size + 0.1))


def test_tiles_fit_the_load_and_all_of_an_expert_s_are_side_by_side():
    assert products.ProductTiles.for_load(0.1).rows == 16
    assert products.ProductTiles.for_load(4).rows == 16
    assert products.ProductTiles.for_load(32).rows == 64
    many = products.ProductTiles.for_load(2048)
    assert many.rows == 128
    assert many.spread * many.rows >= 2048


def test_arrays_whose_offsets_would_turn_negative_are_left_to_the_plain_form():
    sized = lambda size, dtype: jax.ShapeDtypeStruct((size,), dtype)  # noqa: E731
    assert addressing.addressable(sized(2**31 - 1, jnp.float8_e4m3fn))
    assert not addressing.addressable(sized(2**31, jnp.float8_e4m3fn))
    assert addressing.addressable(sized(2**32 + 1, jnp.float8_e4m3fn))  # counted in 64 bits
    assert addressing.addressable(sized(2**33, jnp.bfloat16))


def test_no_kernel_is_given_a_cache_in_fp8_whose_offsets_would_turn_negative():
    """100,000 tokens of DeepSeek-V3 take 3.1 GB of latents, and 400,000 of V3.2 as many of index keys."""
    sized = lambda *dims, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(dims, dtype)  # noqa: E731
    whole = lambda *dims: sized(*dims, dtype=jnp.int32)  # noqa: E731
    e4m3, layer = fp8.E4M3, whole()

    def attend(pages):
        cache = {"latent": sized(61, pages, 16, 512, dtype=e4m3), "scale": sized(61, pages, 16, 4, dtype=jnp.float32)}
        return jax.make_jaxpr(
            lambda q, rope, cache, layer, start, tables: attention.latent_attention(
                q, rope, cache, e4m3, layer, start, start, tables, scale=1.0
            )
        )(
            sized(4, 1, 16, 512),
            sized(4, 1, 16, 64),
            cache | {"rope": sized(61, pages, 16, 64)},
            layer,
            whole(4),
            whole(4, 64),
        )

    def score(pages):
        keys = {
            "index": sized(61, pages, 16, 128, dtype=e4m3),
            "index_scale": sized(61, pages, 16, 1, dtype=jnp.float32),
        }
        return jax.make_jaxpr(
            lambda q, weight, cache, layer, positions, tables: index.index_scores(
                q, weight, cache, e4m3, layer, positions, tables
            )
        )(sized(4, 1, 64, 128), sized(4, 1, 64), keys, layer, whole(4, 1), whole(4, 64))

    for jaxpr in (attend(6250), score(25_000)):
        (call,) = (one for one in jaxpr.eqns if one.primitive.name == "pallas_call")
        assert all(addressing.addressable(value.aval) for value in call.invars)
    assert any(
        value.aval.size == 61 * 1000 * 16 * 512 for one in attend(1000).eqns for value in one.invars
    )  # nothing is copied


@pytest.mark.parametrize("stored", [1, 4])
def test_a_layer_of_a_cache_that_is_copied_is_read_as_the_cache_is(stored, monkeypatch):
    case = AttentionCase.drawn(7, R=2, C=2, H=3, N=1, O=4, U=1, M=150, G=4, longest=40, stored=stored, absorbs=False)
    expected = attention_of(case)
    monkeypatch.setattr(addressing, "addressable", lambda array: False)
    np.testing.assert_array_equal(attention_of(case), expected)


def test_what_a_call_costs_is_counted_from_its_tiles():
    tiles = attention.AttentionTiles()
    told = attention.attention_cost(32, 1, 128, 512, 64, 4096, np.dtype(ml_dtypes.bfloat16), 2, tiles, 2)
    assert told.flops == 2 * 32 * 128 * 4096 * (512 + 512 + 64)
    cache, queries, parts = 32 * 4096 * 576 * 2, 32 * 128 * 576 * 2, 2 * 32 * 128 * 513 * 4
    assert told.bytes == cache + queries + parts
    # Of a whole prompt each tile of queries reads the blocks up to its own last token: 16 tiles of one head's 64 tokens.
    prompt = attention.attention_cost(1, 1024, 1, 512, 64, 1024, np.dtype(np.float32), 4, tiles, 1)
    assert prompt.flops == 2 * 64 * sum(64 * tile for tile in range(1, 17)) * 1088
    assert prompt.dtype == "f32"
    assert cost.expected_tiles(1e-6, 4) == pytest.approx(1e-6, rel=1e-5)


def test_pallas_is_for_gpus_and_says_so_elsewhere():
    choose = lambda *args: choose_kernels(*args, devices=1, cache=None)  # noqa: E731
    on_gpu = choose("auto", "gpu", np.dtype(ml_dtypes.bfloat16))
    assert not on_gpu.pallas.interpret
    assert on_gpu.names("CC", "A_CC_ME") == {
        "decode attention": "pallas", "prefill attention": "pallas", "experts": "pallas", "other products": "pallas",
        "index choice": "pallas",
    }  # fmt: skip
    assert on_gpu.name("decode attention", "CD") == "plain"
    assert "interpreter" in PALLAS.note
    with pytest.raises(UserError, match="--kernels is pallas, but these kernels are for GPUs and TPUs"):
        choose("pallas", "metal", np.dtype(np.float32))


OF_A_KIND = {"num_hidden_layers": 2, "first_k_dense_replace": 0}
"""Layers of a kind: the interpreter's programs are long, and one of dense layers would be as long again."""


@pytest.mark.slow
def test_the_engine_on_two_devices_gives_the_answer_of_one_with_plain_kernels(tmp_path):
    checkpoint = write_checkpoint(tmp_path, **OF_A_KIND)
    expected = answer(checkpoint, "dp=1", "auto", "CC", "A_CC_ME", kernels="plain", new_tokens=6)
    found = answer(checkpoint, "tp=2", "auto", "CC", "AM_CC_ME", kernels="pallas", new_tokens=6)
    assert difference(found, expected) is None


@pytest.mark.parametrize("scheme", ["dynamic", "none"])
@pytest.mark.parametrize("sliced", [False, True], ids=["in the stack", "sliced out of it"])
def test_products_of_a_layer_on_two_devices_are_those_of_the_plain_form(scheme, sliced):
    config = ModelConfig.from_dict(TINY | wide(2))
    args = EngineArgs(mesh="tp=2", weights="fp8", activation_scheme=scheme, dtype="float32", kernels="pallas")
    spec = MeshSpec.parse("tp=2")
    step = make_step(args, config, spec, spec.build())
    plain = dataclasses.replace(step, kernels=Kernels())
    params = {path: random_parameter(info, 3) for path, info in step.table.infos.items() if "moe_layers" in path}
    module = step.table.bind(dict.fromkeys(step.table.infos, jnp.zeros(())) | params).moe_layers
    mlp, x = module.moe.shared, jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, 32)), jnp.float32)
    graph, state = nnx.split(mlp)
    one = nnx.merge(graph, jax.tree.map(lambda array: array[1], state))

    def run(step, mlp):
        return np.asarray(jax.jit(lambda x: mlp(x, step.in_place.multiply(jnp.int32(1))))(x))

    found, expected = run(step, one if sliced else mlp), run(plain, one)
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
    assert {name: step.kernels.name(name) for name in ("experts", "other products")} == dict.fromkeys(
        ("experts", "other products"), "pallas"
    )


def test_a_scheme_needs_fp8_weights_and_leaves_the_choice_of_kernels_alone():
    config, spec = ModelConfig.from_dict(TINY), MeshSpec.parse("dp=1")
    with pytest.raises(UserError, match=r"--activation-scheme dynamic .* add --weights fp8"):
        make_step(EngineArgs(activation_scheme="dynamic"), config, spec, spec.build())
    step = make_step(EngineArgs(activation_scheme="dynamic", weights="fp8"), config, spec, spec.build())
    without = make_step(EngineArgs(weights="fp8"), config, spec, spec.build())
    assert step.kernels == without.kernels
    assert (str(step.scheme), step.scheme.powers) == ("dynamic", False)
    assert str(without.scheme) == "none", "auto, on a CPU"
    v31 = dataclasses.replace(config, quantization=QuantizationConfig(scale_fmt="ue8m0"))
    assert make_step(EngineArgs(activation_scheme="dynamic", weights="fp8"), v31, spec, spec.build()).scheme.powers


@FEW
@given(
    seed=st.integers(0, 2**31),
    T=st.sampled_from([1, 5, 40]),
    K=st.integers(1, 300),
    N=st.integers(1, 150),
    splits=st.sampled_from([1, 3]),
    powers=st.booleans(),
)
def test_quantised_rows_times_fp8_weights_are_the_plain_form_s(seed, T, K, N, splits, powers):
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(3, K, N)).astype(STORED[1]).view(np.uint8)
    scale = rng.uniform(0.5, 2, size=(3, -(-K // 128), -(-N // 128))).astype(np.float32)
    x = jnp.asarray(rng.normal(size=(T, K)).astype(np.float32))
    rows, plain = activations.quantise(x, powers=powers, interpret=True), fp8.quantise(x, powers=powers)
    # XLA may divide by multiplying, so that scales differ in their last place, and a value on the edge goes to its neighbour.
    np.testing.assert_allclose(rows.scales, plain.scales, rtol=3e-7)
    steps = [np.asarray(q.values).view(np.int8).astype(int) for q in (rows, plain)]
    assert np.abs(steps[0] - steps[1]).max() <= 1
    tiles = dataclasses.replace(products.ProductTiles.dense(T, K, N), splits=splits)
    arguments = jnp.asarray(weight), scale, STORED[1], jnp.int32(1)
    found = products.dense(*arguments, rows, dtype=np.dtype(np.float32), interpret=True, tiles=tiles)
    expected = block_product(rows, weight[1].view(STORED[1]), scale[1], jnp.float32)
    size = np.abs(fp8.dequantise(*plain)) @ (2 * np.abs(weight[1].view(STORED[1]).astype(np.float32)))
    assert np.all(np.abs(found - expected) <= 1e-6 * (size + 1))


@FEW
@given(
    seed=st.integers(0, 2**31),
    X=st.integers(1, 3),
    D=st.integers(1, 150),
    F=st.integers(1, 140),
    N=st.sampled_from([1, 7, 60]),
    wire=st.booleans(),
    routing=st.sampled_from(["all", "some", "one expert", "none"]),
)
def test_experts_with_quantised_rows_are_those_of_the_plain_form(seed, X, D, F, N, wire, routing):
    case = ExpertsCase.drawn(seed, X=X, D=D, F=F, N=N, K=2, stored=1, routing=routing)
    scheme = ActivationScheme(dynamic=True)
    plain, pallas = (
        ExpertProduct(weight_dtype=STORED[1], scheme=scheme, mean_load=4.0, kernels=k) for k in (Kernels(), PALLAS)
    )
    as_sent = WireFormat(D, 2, jnp.dtype(jnp.float32), fp8=wire)

    def run(product):
        def received(params, rows, ids, weights):
            packed, ids, weights, _ = as_sent.unpack(as_sent.pack(rows, ids, weights, jnp.int32(0)))
            return product(params, packed, ids, weights)

        return np.asarray(jax.jit(received)(case.params(), case.rows, case.ids, case.weights))

    found, expected, (_, size) = run(pallas), run(plain), case.expected()
    # A hidden value between two e4m3 numbers can go either way by float32's rounding: at most a few of them, 1/16 of each.
    assert np.all(np.abs(found - expected) <= 0.02 * (size + 1e-3))
    assert np.mean(np.abs(found - expected) > 1e-5 * (size + 1)) < 0.05


@FEW
@given(
    seed=st.integers(0, 2**31),
    C=st.integers(1, 3),
    I=st.sampled_from([1, 17]),
    A=st.sampled_from([4, 64]),
    G=st.sampled_from([4, 16]),
    pages=st.sampled_from([7, 40]),
    stored=st.sampled_from([4, 2, 1]),
    holes=st.booleans(),
)
def test_index_scores_give_the_choices_of_a_loop(seed, C, I, A, G, pages, stored, holes):
    case = IndexCase.drawn(seed, R=2, C=C, I=I, A=A, G=G, pages=pages, k=20, stored=stored, holes=holes)
    scores = index.index_scores(
        *(jnp.asarray(a) for a in (case.query, case.weight)),
        case.cache(),
        case.keys.dtype,
        jnp.int32(len(case.keys) - 1),
        *(jnp.asarray(a) for a in (case.positions, case.tables)),
        None if case.filled is None else jnp.asarray(case.filled),
        interpret=True,
    )
    marked = np.asarray(choose(scores, case.k)).reshape(2 * C, -1)
    assert [np.flatnonzero(row).tolist() for row in marked] == case.expected()


def test_an_engine_with_sparse_attention_gives_the_answer_of_the_plain_forms(tmp_path):
    checkpoint = write_checkpoint(tmp_path, **MODELS["v3.2"], **OF_A_KIND)
    few = {"new_tokens": 4}
    plain = answer(checkpoint, "dp=1", "gather", "CC", "A_CC_ME", kernels="plain", **few)
    assert difference(answer(checkpoint, "dp=1", "gather", "CC", "A_CC_ME", kernels="pallas", **few), plain) is None
