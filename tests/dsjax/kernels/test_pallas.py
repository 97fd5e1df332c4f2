"""The Pallas kernels, run by their interpreter, give what the plain forms give, over shapes of all kinds.

The interpreter takes a tenth of a second and more for a call, so that the cases are small and few.
"""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from goldens.our_model import bound
from kernel_cases import STORED, AttentionCase, DenseCase, ExpertsCase, IndexCase, scaled, shared_expert_of, spread
from layouts import TINY, wide, widths
from step_model import Model
from test_kernel_order import kernel_arrays, shape

from dsjax.config import ModelConfig, QuantizationConfig
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.assembly import make_step
from dsjax.errors import UserError
from dsjax.kernels.pallas import activations, addressing, attention, cost, experts, heads, index, products
from dsjax.kernels.pallas.shared_memory import Cores
from dsjax.kernels.table import OPERATIONS, Kernels, choose_kernels
from dsjax.model.experts import ExpertProduct
from dsjax.model.fp8_product import ActivationScheme, block_product
from sharding import MeshSpec, fp8
from sharding.dispatch.wire import WireFormat

pytestmark = pytest.mark.slow  # all together

PALLAS = choose_kernels("pallas", "cpu", np.dtype(np.float32), devices=1, cache=None)


def attention_of(case, tiles=(16, 16), **options):
    return case.by(attention.latent_attention, attention.AttentionTiles(*tiles), **options)


@spread(
    seed=range(5),
    R=[3, 1, 2],
    C=[20, 1, 9],
    H=[2, 5, 1],
    O=[20, 4, 1],
    M=[150, 16, 1, 128],
    G=[4, 16, 1],
    longest=[70, 17, 16, 1],
    stored=[4, 2, 1],
    holes=[True, False],
    tiles=[(16, 16), (16, 32), (64, 16)],
)
def test_attention_is_softmax_over_each_rows_pages(seed, R, C, H, O, M, G, longest, stored, holes, tiles):
    """A tile holds tokens of several positions, or heads of one; a token sees itself where the cache has holes."""
    case = drawn_attention(seed, R=R, C=C, H=H, O=O, M=M, G=G, longest=longest, stored=stored, holes=holes)
    # Scores of M + O products reach 15; e to an error of a few units in their last place.
    np.testing.assert_allclose(attention_of(case, tiles), case.expected(), atol=2e-4, rtol=2e-4)


def drawn_attention(seed, **sizes):
    """Queries in latent space, two rows of them unless something else is said."""
    return AttentionCase.drawn(seed, **{"R": 2, "N": 1, "U": 1, "G": 4, "absorbs": False} | sizes)


def test_a_row_of_no_queries_reads_nothing_and_gives_zeros():
    case = drawn_attention(2, C=1, H=2, O=4, M=16, longest=30)
    latent = case.latent.copy()
    latent[:, case.tables[1]] = np.nan
    case = dataclasses.replace(case, latent=latent, length=np.array([1, 0], np.int32))
    found = attention_of(case)
    assert np.all(np.isfinite(found[0]))
    assert not found[1].any()


def test_splitting_a_row_s_context_over_every_core_changes_a_result_by_rounding_alone():
    assert attention.split_context(2, 512, cores=132) == 66  # one user of 128 heads at 32,768 tokens
    assert attention.split_context(2, 512, cores=78) == 39  # on an H20
    assert attention.split_context(2, 64, cores=132) == 16, "at 4,096 tokens; shorter parts cost more to merge"
    assert attention.split_context(256, 512, cores=132) == 1
    case = drawn_attention(5, C=2, H=2, O=4, M=16, longest=520)
    case = dataclasses.replace(case, start=np.array([518, 20], np.int32), length=np.array([2, 1], np.int32))
    split, whole = (attention_of(case, cores=Cores(count=count)) for count in (132, 2))
    assert attention.split_context(2, 33, 132) == 8  # more parts than the shorter row has blocks
    assert attention.split_context(2, 33, 2) == 1
    np.testing.assert_allclose(split, whole, atol=2e-6)
    np.testing.assert_allclose(whole, case.expected(), atol=2e-4)


def test_bfloat16_queries_and_cache_give_bfloat16_of_nearly_the_same():
    case = drawn_attention(7, C=1, H=4, O=8, M=32, longest=60, stored=2)
    rounded = {name: getattr(case, name).astype(ml_dtypes.bfloat16) for name in ("q_nope", "q_rope")}
    case = dataclasses.replace(case, **{name: a.astype(np.float32) for name, a in rounded.items()})
    # Weights and results are rounded to 8 bits.
    np.testing.assert_allclose(attention_of(case, dtype=jnp.bfloat16), case.expected(), atol=0.02, rtol=0.02)


def product_of(case, dtype=np.float32, **options):
    product = ExpertProduct(weight_dtype=STORED[case.down.itemsize], kernels=PALLAS, **options)
    return case.by(product, rows=jnp.asarray(case.rows, dtype)).astype(np.float64)


@spread(
    seed=range(4),
    X=[4, 1, 3],
    D=[150, 24, 1],
    F=[140, 16, 1],
    N=[60, 7, 1],
    K=[2, 3, 1],
    stored=[1, 4, 2],
    routing=["all", "some", "one expert", "none"],
)
def test_experts_are_those_of_the_plain_form(seed, X, D, F, N, K, stored, routing):
    case = ExpertsCase.drawn(seed, X=X, D=D, F=F, N=N, K=K, stored=stored, routing=routing)
    case.assert_near(product_of(case, mean_load=4.0))
    case.assert_near(case.by(ExpertProduct(weight_dtype=STORED[stored])))


def test_more_pairs_than_a_round_holds_take_further_rounds():
    case = ExpertsCase.drawn(1, X=2, D=24, F=16, N=150, K=2, routing="all")
    assert experts.round_pairs(1.0, 2, 300) == 128  # of 300 pairs: three rounds
    case.assert_near(product_of(case, mean_load=1.0))


@spread(seed=range(3), T=[40, 5, 1], K=[300, 24, 129], N=[150, 1, 128], stored=[1, 4, 2], splits=[3, 1])
def test_a_dense_product_reads_its_layer_of_the_stack(seed, T, K, N, stored, splits):
    case = DenseCase.drawn(seed, K=K, width=N, N=T, stored=stored)
    # The second of three layers, here and below.
    weight, scale = (None if a is None else jnp.asarray(a[[0, 1, 0], :, 0]) for a in (case.weight, case.scale))
    tiles = dataclasses.replace(products.ProductTiles.dense(T, K, N, cores=132), splits=splits)
    given = weight, scale, weight.dtype, jnp.int32(1), jnp.asarray(case.rows)
    case.assert_near(products.dense(*given, interpret=True, tiles=tiles))


@pytest.mark.parametrize(("T", "H", "N", "U", "M", "stored"), [(5, 3, 12, 7, 40, 4), (20, 2, 128, 256, 130, 1)])
def test_keys_go_into_queries_and_values_onto_results_by_head(T, H, N, U, M, stored):
    rng = np.random.default_rng(T)
    weight = rng.normal(size=(2, M, H * (N + U))).astype(STORED[stored])
    scale = rng.uniform(0.5, 2, size=(2, -(-M // 128), H * (N + U) // 128)).astype(np.float32) if stored == 1 else None
    value = scaled(weight[1], None if scale is None else scale[1], (0, 1))
    keys, values = np.split(value.reshape(M, H, N + U), [N], axis=2)
    cases = (heads.absorb, N, keys, "thn,mhn->thm"), (heads.expand, M, values, "thm,mhu->thu")
    for kernel, width, matrix, by in cases:
        x = rng.normal(size=(T, H, width)).astype(np.float32)
        found = kernel(jnp.asarray(weight), scale, weight.dtype, jnp.int32(1), jnp.asarray(x), U, interpret=True)
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


def test_bfloat16_rows_stay_within_their_rounding():
    case = ExpertsCase.drawn(8, X=3, D=64, F=32, N=20, K=2, stored=2, routing="all")
    case = dataclasses.replace(case, rows=case.rows.astype(ml_dtypes.bfloat16).astype(np.float32))
    expected, size = case.expected()
    # The hidden values, each expert's result and the sum are rounded to 8 bits.
    assert np.all(np.abs(product_of(case, jnp.bfloat16) - expected) <= 0.02 * (size + 0.1))


def test_no_kernel_is_given_a_cache_in_fp8_whose_offsets_would_turn_negative():
    """100,000 tokens of DeepSeek-V3 take 3.1 GB of latents, and 400,000 of V3.2 as many of index keys."""
    e4m3, f32, i32 = fp8.E4M3, np.dtype(np.float32), np.dtype(np.int32)

    def attend(q, rope, cache, layer, start, tables):
        return attention.latent_attention(q, rope, cache, e4m3, layer, start, start, tables, scale=1.0)

    def score(q, weight, cache, layer, positions, tables):
        return index.index_scores(q, weight, cache, e4m3, layer, positions, tables)

    def latents(pages):
        cache = {"latent": shape(61, pages, 16, 512, dtype=e4m3), "scale": shape(61, pages, 16, 4, dtype=f32)}
        cache["rope"] = shape(61, pages, 16, 64)
        rows = shape(dtype=i32), shape(4, dtype=i32), shape(4, 64, dtype=i32)
        return kernel_arrays(attend, shape(4, 1, 16, 512), shape(4, 1, 16, 64), cache, *rows)

    keys = {"index": shape(61, 25_000, 16, 128, dtype=e4m3), "index_scale": shape(61, 25_000, 16, 1, dtype=f32)}
    rows = shape(dtype=i32), shape(4, 1, dtype=i32), shape(4, 64, dtype=i32)
    scored = kernel_arrays(score, shape(4, 1, 64, 128), shape(4, 1, 64), keys, *rows)
    assert all(map(addressing.addressable, [*latents(6250), *scored]))
    assert any(array.size == 61 * 1000 * 16 * 512 for array in latents(1000)), "nothing is copied"
    sizes = (2**31 - 1, 2**31, 2**32 + 1)  # the last is counted in 64 bits
    assert [addressing.addressable(shape(size, dtype=fp8.E4M3)) for size in sizes] == [True, False, True]
    assert addressing.addressable(shape(2**33))


def test_a_layer_of_a_cache_that_is_copied_is_read_as_the_cache_is(monkeypatch):
    case = drawn_attention(7, C=2, H=3, O=4, M=150, longest=40, stored=1)
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
    assert {operation: on_gpu.name(operation) for operation in OPERATIONS} == {
        "decode attention": "pallas", "prefill attention": "pallas", "experts": "pallas", "other products": "pallas",
        "index choice": "pallas", "hyper-connections": "plain", "router": "plain",
    }  # fmt: skip
    assert "interpreter" in PALLAS.note
    with pytest.raises(UserError, match="--kernels is pallas, but these kernels are for GPUs and TPUs"):
        choose("pallas", "metal", np.dtype(np.float32))


def test_a_step_on_two_devices_gives_the_logits_of_one_with_plain_kernels():
    # Layers of a kind: the interpreter's programs are long, and one of dense layers would be as long again.
    config = TINY | {"num_hidden_layers": 2, "first_k_dense_replace": 0} | widths("mxfp4-bf16", 2)

    def logits(mesh, **options):
        """Of two prompts, and of a decode of each."""
        model = Model(mesh, ModelConfig.from_dict(config), weights="nvfp4-bf16", **options)
        rows = [([5, 17, 2, 60, 33, 8], 0, [1, 2]), ([9, 4, 71, 12, 90], 0, [5, 4])]
        prompts, cache = model.run(model.empty_cache(), model.both([()], [rows]))
        decodes, _ = model.run(cache, model.both([[([7], 6, [1, 2]), ([8], 5, [5, 4])]], [()]))
        return np.concatenate([prompts[0, 2:], decodes[0, :2]])

    expected = logits("dp=1", kernels="plain")
    found = logits("tp=2,ep=1", kernels="pallas")
    assert np.abs(found - expected).max() <= bound(expected)


@pytest.mark.parametrize(("scheme", "sliced"), [("dynamic", False), ("none", True)], ids=["in the stack", "sliced"])
def test_products_of_a_layer_on_two_devices_are_those_of_the_plain_form(scheme, sliced):
    config = ModelConfig.from_dict(TINY | wide(2))
    args = EngineArgs(mesh="tp=2", weights="fp8", activation_scheme=scheme, dtype="float32", kernels="pallas")
    spec = MeshSpec.parse("tp=2")
    step = make_step(args, config, spec, spec.build())
    plain = dataclasses.replace(step, kernels=Kernels())
    found, expected = shared_expert_of(step, sliced), shared_expert_of(plain, sliced=True)
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
    assert [step.kernels.name(name) for name in ("experts", "other products")] == ["pallas", "pallas"]


def test_a_scheme_needs_fp8_weights_and_leaves_the_choice_of_kernels_alone():
    def step_of(config=ModelConfig.from_dict(TINY), spec=MeshSpec.parse("dp=1"), **options):
        return make_step(EngineArgs(**options), config, spec, spec.build())

    with pytest.raises(UserError, match=r"--activation-scheme dynamic .* add --weights fp8"):
        step_of(activation_scheme="dynamic")
    dynamic = {"activation_scheme": "dynamic", "weights": "fp8"}
    step, without = step_of(**dynamic), step_of(weights="fp8")
    assert step.kernels == without.kernels
    assert (str(step.scheme), step.scheme.powers) == ("dynamic", False)
    assert str(without.scheme) == "none", "auto, on a CPU"
    v31 = dataclasses.replace(step.config, quantization=QuantizationConfig(scale_fmt="ue8m0"))
    assert step_of(v31, **dynamic).scheme.powers


@spread(seed=range(3), T=[5, 40, 1], K=[300, 129, 24], N=[150, 1, 128], splits=[3, 1], powers=[False, True])
def test_quantised_rows_times_fp8_weights_are_the_plain_form_s(seed, T, K, N, splits, powers):
    case = DenseCase.drawn(seed, K=K, width=N, N=T, stored=1)
    weight, scale, x = case.weight[[0, 1, 0], :, 0].view(np.uint8), case.scale[[0, 1, 0], :, 0], jnp.asarray(case.rows)
    rows, plain = activations.quantise(x, powers=powers, interpret=True), fp8.quantise(x, powers=powers)
    # XLA may divide by multiplying, so that scales differ in their last place, and a value on the edge goes to its neighbour.
    np.testing.assert_allclose(rows.scales, plain.scales, rtol=3e-7)
    steps = [np.asarray(q.values).view(np.int8).astype(int) for q in (rows, plain)]
    assert np.abs(steps[0] - steps[1]).max() <= 1
    tiles = dataclasses.replace(products.ProductTiles.dense(T, K, N, cores=132), splits=splits)
    arguments = jnp.asarray(weight), scale, STORED[1], jnp.int32(1)
    found = products.dense(*arguments, rows, dtype=np.dtype(np.float32), interpret=True, tiles=tiles)
    expected = block_product(rows, weight[1].view(STORED[1]), scale[1], jnp.float32)
    size = np.abs(fp8.dequantise(*plain)) @ (2 * np.abs(weight[1].view(STORED[1]).astype(np.float32)))
    assert np.all(np.abs(found - expected) <= 1e-6 * (size + 1))


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize(("K", "parts", "width"), [(300, 1, 150), (129, 1, 128), (130, 2, 128)])
def test_weights_with_their_depth_last_give_the_same_bits(K, parts, width, quantised):
    case = DenseCase.drawn(0, K=K, width=width, N=5, parts=parts, stored=1)
    weight, scale = (a[:, :, 0] if parts == 1 else a for a in (case.weight.view(np.uint8), case.scale))
    rows = fp8.quantise(jnp.asarray(case.rows)) if quantised else jnp.asarray(case.rows)

    def multiply(weight, **order):
        given = weight, scale, STORED[1], jnp.int32(1)
        return products.dense(*given, rows, dtype=np.dtype(np.float32), interpret=True, **order)

    found = multiply(jnp.moveaxis(weight, 1, -1), depth_last=True)
    np.testing.assert_array_equal(found, multiply(jnp.asarray(weight)))


@pytest.mark.parametrize("kernels", [Kernels(), PALLAS], ids=["plain", "pallas"])
def test_experts_with_their_depth_last_give_the_same_bits(kernels):
    case = ExpertsCase.drawn(0, X=3, D=150, F=140, N=20, K=2, stored=1, routing="some")

    product = ExpertProduct(weight_dtype=STORED[1], mean_load=4.0, kernels=kernels)
    params = case.params()
    moved = {name: np.moveaxis(params[name], at, -1) for name, at in (("gate_up.weight", -3), ("down.weight", -2))}
    found = case.by(dataclasses.replace(product, depth_last=True), params | moved)
    np.testing.assert_array_equal(found, case.by(product))


@spread(
    seed=range(3),
    X=[3, 1, 2],
    D=[150, 24],
    F=[140, 16],
    N=[60, 7, 1],
    wire=[False, True],
    routing=["some", "all", "one expert"],
)
def test_experts_with_quantised_rows_are_those_of_the_plain_form(seed, X, D, F, N, wire, routing):
    case = ExpertsCase.drawn(seed, X=X, D=D, F=F, N=N, K=2, stored=1, routing=routing)
    scheme = ActivationScheme(dynamic=True)
    as_sent = WireFormat(D, 2, jnp.dtype(jnp.float32), fp8=wire)

    def received_by(kernels):
        product = ExpertProduct(weight_dtype=STORED[1], scheme=scheme, mean_load=4.0, kernels=kernels)

        def received(params, *tokens):
            return product(params, *as_sent.unpack(as_sent.pack(*tokens, jnp.int32(0)))[:3])

        return case.by(received)

    found, expected, (_, size) = received_by(PALLAS), received_by(Kernels()), case.expected()
    # A hidden value between two e4m3 numbers can go either way by float32's rounding: at most a few of them, 1/16 of each.
    assert np.all(np.abs(found - expected) <= 0.02 * (size + 1e-3))
    assert np.mean(np.abs(found - expected) > 1e-5 * (size + 1)) < 0.05


@spread(seed=range(3), C=[3, 1], I=[17, 1], A=[64, 4], G=[4, 16], pages=[40, 7], stored=[1, 4, 2], holes=[True, False])
def test_index_scores_give_the_choices_of_a_loop(seed, C, I, A, G, pages, stored, holes):
    case = IndexCase.drawn(seed, R=2, C=C, I=I, A=A, G=G, pages=pages, k=20, stored=stored, holes=holes)
    assert case.chosen_by(index.index_scores) == case.expected()
