"""The kernels for TPUs, run by Pallas's TPU interpreter, give what float64 loops and the plain forms give.

The interpreter plays memories and copies and takes up to a second for a call, so that the cases are small and few. Experts of 16-bit
weights, whose words it cannot read, are run by Pallas's plain one.
"""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from kernel_cases import ROUTINGS, STORED, AttentionCase, ExpertsCase, IndexCase, drawn_from, shared_expert_of
from layouts import TINY, wide

from dsjax.config import ModelConfig, load_config
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.assembly import _refuses_experts, make_step
from dsjax.kernels.pallas import PallasKernels, tpu_attention, tpu_index, tpu_products
from dsjax.kernels.table import OPERATIONS, Kernels, choose_kernels
from dsjax.model.attention import PagedMLA
from dsjax.model.experts import ExpertProduct
from dsjax.model.forms import FORMS
from dsjax.model.fp8_product import WIDEN, ActivationScheme
from dsjax.model.paging import Rows
from dsjax.model.transformer import Projections
from sharding import MeshSpec, Rules, fp8

pytestmark = pytest.mark.slow  # all together

FEW = settings(max_examples=2, deadline=None, derandomize=True)

TILES = tpu_attention.TpuAttentionTiles(rows=16, positions=16)
TPU = Kernels(pallas=PallasKernels("tpu", interpret=True))


@FEW
@given(**drawn_from(
    R=[1, 2], C=[1, 3, 9], H=range(1, 6), O=range(1, 21), M=[1, 16, 150], G=[1, 4, 16], longest=[1, 16, 17, 40], stored=[4, 2],
    spare=[0, 3], holes=[False, True],
))  # fmt: skip
def test_attention_is_softmax_over_each_rows_pages(spare, **drawn):
    case = AttentionCase.drawn(N=1, U=1, absorbs=False, **drawn)
    found = case.by(tpu_attention.latent_attention, TILES, spare=spare)
    # Scores of M + O products reach 15; e to an error of a few units in their last place.
    np.testing.assert_allclose(found, case.expected(), atol=2e-4, rtol=2e-4)


def test_a_tpu_takes_the_kernels_by_itself_and_says_which_caches_experts_and_keys_they_cannot_read():
    chosen = choose_kernels("auto", "tpu", np.dtype(np.float32), devices=1, cache=None)
    assert chosen.pallas == PallasKernels("tpu")
    assert chosen.name("decode attention") == "pallas"
    left = dataclasses.replace(chosen, left_plain=("prefill attention",))
    plain = dict.fromkeys(("prefill attention", "hyper-connections", "router"), "plain")
    assert {name: left.name(name) for name in OPERATIONS} == dict.fromkeys(OPERATIONS, "pallas") | plain
    bf16 = np.dtype(ml_dtypes.bfloat16)
    assert tpu_attention.refuses(16, bf16) == "" == tpu_attention.refuses(8, np.dtype(np.float32))
    assert "that 16 divides, and it is 8" in tpu_attention.refuses(8, bf16)
    assert "no FP8 cache" in tpu_attention.refuses(64, fp8.E4M3)
    config, spec = load_config("deepseek-v3"), MeshSpec.parse("dp=32")
    assert {_refuses_experts(config, spec, weights, WIDEN) for weights in ("bf16", "mixed", "fp8")} == {""}
    assert "take bfloat16 and FP8 weights, and these are f32" in _refuses_experts(config, spec, "f32", WIDEN)
    assert "quantise no activations" in _refuses_experts(config, spec, "fp8", ActivationScheme(dynamic=True))
    bf16 = np.dtype(jnp.bfloat16)
    assert tpu_index.takes(128, bf16, 16)
    assert not tpu_index.takes(128, bf16, 8), "half a tile of the core's memory"
    assert not tpu_index.takes(64, bf16, 16), "half a register"
    assert not tpu_index.takes(128, np.dtype(fp8.E4M3), 32)


@pytest.mark.parametrize("form", ["A_CC_ME", "AM_CC_ME"])
def test_what_a_layer_writes_is_attended_to_as_in_the_plain_form(form):
    """Entries are padded to registers; a form that has no kernel reads their own values."""
    config, spec, rng = ModelConfig.from_dict(TINY), MeshSpec.parse("dp=1"), np.random.default_rng(0)
    H, N, O = config.num_attention_heads, config.mla.qk_nope_head_dim, config.mla.qk_rope_head_dim
    M, U, R, C, G = config.mla.kv_lora_rank, config.mla.v_head_dim, 2, 3, 4
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    weight, ahead = (draw(M, H, N), draw(M, H, U)), (draw(1, H, M), draw(H, M, 3))
    stored = SimpleNamespace(weight=SimpleNamespace(info=SimpleNamespace(dtype=jnp.float32)))
    mla = SimpleNamespace(key_value_weight=lambda dtype: weight, kv_b=stored, materialised=lambda dtype: ahead)
    p = Projections(draw(1, R, C, H, N), draw(1, R, C, H, O), draw(1, R, C, 1), draw(1, R, C, M), draw(1, R, C, O))
    tables, positions = jnp.asarray([[[1, 3], [2, 0]]]), jnp.asarray([[[3, 4, 5], [0, 1, 2]]])
    slots = jnp.take_along_axis(tables, positions // G, axis=2) * G + positions % G

    def attended(kernels):
        attention = PagedMLA(spec.build(), Rules.for_mesh(spec), config, "split", jnp.float32, kernels=kernels)
        cache = {name: jnp.zeros((1, 4, G, *width)) for name, (width, _) in attention.arrays.items()}
        flat = jax.tree.map(lambda array: array.reshape(1, R * C, *array.shape[3:]), p)

        def run(cache):
            cache = attention.cache_entries(mla, cache, jnp.int32(0), SimpleNamespace(slots=slots.reshape(1, -1)), flat)
            return attention.attend(mla, FORMS[form], cache, jnp.int32(0), None, Rows(positions, tables), p)

        return np.asarray(jax.jit(run)(cache))

    np.testing.assert_allclose(attended(TPU), attended(Kernels()), atol=1e-4)


@pytest.mark.parametrize("stored", [2, 1])
@FEW
@given(**drawn_from(
    X=range(1, 5), D=[128, 256], F=[128, 384], N=[1, 7, 40], K=[1, 2, 3], routing=ROUTINGS, mean_load=[0.5, 40.0]
))  # fmt: skip
def test_experts_are_those_of_a_loop(stored, mean_load, **drawn):
    case = ExpertsCase.drawn(stored=stored, **drawn)
    case.assert_near(case.by(ExpertProduct(weight_dtype=STORED[stored], kernels=TPU, mean_load=mean_load)))


@FEW
@given(**drawn_from(C=[1, 3, 11], I=[1, 17], pages=[7, 40], stored=[4, 2], holes=[False, True]))
def test_index_scores_give_the_choices_of_a_loop(**drawn):
    case = IndexCase.drawn(R=2, A=128, G=16, k=20, **drawn)
    assert tpu_index.takes(128, case.keys.dtype, 16)
    assert case.chosen_by(tpu_index.index_scores) == case.expected()


def test_tiles_that_are_not_in_use_leave_the_columns_of_the_last_one_alone(monkeypatch):
    monkeypatch.setattr(tpu_products, "LARGEST_BLOCK", 2 * 2 * 128 * 128)  # 128 columns of gate and up, 256 of down
    assert tpu_products.TpuProductTiles.for_load(0.5).rows_first
    product = ExpertProduct(weight_dtype=STORED[1], kernels=TPU, mean_load=0.5)
    for routing in ("one expert", "none"):
        case = ExpertsCase.drawn(0, X=2, D=128, F=256, N=3, K=1, stored=1, routing=routing)
        np.testing.assert_allclose(case.by(product), case.expected()[0], atol=1e-4)


def test_products_with_fp8_matrices_on_two_devices_are_those_of_the_plain_form():
    config = ModelConfig.from_dict(TINY | wide(2) | {"hidden_size": 128})
    spec = MeshSpec.parse("tp=2")
    args = EngineArgs(mesh="tp=2", weights="fp8", activation_scheme="none", dtype="float32", kernels="plain")
    plain = make_step(args, config, spec, spec.build())
    step = dataclasses.replace(plain, kernels=TPU)
    names = step.products.names(step.attention.in_stack([step.prefill_form, step.decode_form]))
    assert names >= {"gate_up", "down"}
    assert "kv_b" not in names
    found, expected = shared_expert_of(step), shared_expert_of(plain, sliced=True)
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
