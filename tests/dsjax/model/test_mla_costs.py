"""Costs of the five MLA forms and parameter counts: the published figures of V3, and the model's own shapes."""

import dataclasses
import math

import pytest

from dsjax.config import bundled_models, load_config
from dsjax.model.cache_groups import BF16
from dsjax.model.forms import FORMS
from dsjax.model.mla_costs import mla_cost, weight_values
from dsjax.model.parameter_counts import attention_parameters, parameter_counts
from dsjax.model.parameter_table import abstract_parameters
from sharding import fp8

V3, V32 = load_config("deepseek-v3"), load_config("deepseek-v3.2")
ABSORBED = ("A_CC", "A_CC_ME", "AM_CC_ME")


def decode(form, context, **options):
    return mla_cost(V3, form, rows=1, chunk=1, context=context, **options)


def test_parameters_of_v3_are_those_of_its_checkpoint():
    assert parameter_counts(V3) == {
        "embedding": 926_679_040, "head": 926_679_040, "mla": 187_107_328, "dense_mlp": 396_361_728, "expert": 44_040_192,
        "shared_experts": 44_040_192, "router": 1_835_008, "router_bias": 256, "layer_norms": 14_336, "dense_layer": 583_483_392,
        "moe_layer": 11_507_286_272, "final_norm": 7_168, "mtp_module": 11_610_068_224, "main_model": 671_026_419_200,
        "mtp": 11_610_068_224, "active": 37_552_297_472,
    }  # fmt: skip


DIRECT = dataclasses.replace(V3.mla, q_lora_rank=None)
BIASED, NONE = {"attention_bias": True}, ("n_shared_experts", "n_routed_experts", "num_nextn_predict_layers")
CHANGES = [{"mla": DIRECT}, BIASED, BIASED | {"mla": DIRECT}, {"tie_word_embeddings": True}]
CHANGES += [{name: 0} for name in (*NONE, "first_k_dense_replace")]


@pytest.mark.parametrize(
    "config", [*map(load_config, bundled_models()), *(dataclasses.replace(V3, **change) for change in CHANGES)], ids=str
)
def test_counts_of_bundled_models_and_of_every_switch_are_the_sums_of_their_parameters(config):
    sizes = {path: math.prod(info.shape) for path, info in abstract_parameters(config, weights="f32").items()}
    counts = parameter_counts(config)
    assert counts["mtp"] == sum(size for path, size in sizes.items() if path.startswith("mtp."))
    assert counts["main_model"] == sum(size for path, size in sizes.items() if not path.startswith("mtp."))
    attention = sum(size for path, size in sizes.items() if ".attn." in path and not path.startswith("mtp."))
    kinds = [kind.attention for run in config.layer_runs for kind in run.kinds * run.count]
    assert sum(counts[kind] for kind in kinds) == attention


# DESIGN.md, over 61 layers.
@pytest.mark.parametrize(
    ("form", "attention", "expansion"),
    [("CD", 4.997e6, 0), ("CC", 4.997e6, 2_046.8e6), *((form, 16.990e6, 0) for form in ABSORBED)],
)
def test_decode_flops_of_v3_grow_with_the_context_as_published(form, attention, expansion):
    near, far = decode(form, 1000), decode(form, 2000)
    assert 61 * (far.attention_flops - near.attention_flops) / 1000 == pytest.approx(attention, rel=1e-3)
    assert 61 * (far.expansion_flops - near.expansion_flops) / 1000 == pytest.approx(expansion, rel=1e-3)
    assert far.linear_flops == near.linear_flops


def test_linear_and_head_flops_of_a_v3_token_are_73_25_g():
    counts = parameter_counts(V3)
    per_moe_layer = (V3.num_experts_per_tok + V3.n_shared_experts) * counts["expert"] + counts["router"]
    mlps = 3 * counts["dense_mlp"] + 58 * per_moe_layer
    total = 61 * decode("A_CC", 1).linear_flops + 2 * (mlps + counts["head"])
    assert total == pytest.approx(73.25e9, rel=1e-4)


def test_item_sizes_count_bytes_and_a_token_writes_the_entry_that_its_form_reads():
    def written(config, form, dtype=BF16):
        return mla_cost(config, form, rows=1, chunk=1, context=9, cache_dtype=dtype).cache_write_bytes

    assert [written(V3, form) for form in FORMS] == [81_920, 1_152, 1_152, 1_152, 1_152]
    assert [written(V32, "A_CC_ME", dtype) for dtype in (BF16, fp8.E4M3)] == [1_152 + 256, 656 + 132]
    narrow = {"weight_itemsize": 1, "cache_dtype": fp8.E4M3, "activation_itemsize": 1}
    two, one = decode("A_CC_ME", 1000), decode("A_CC_ME", 1000, **narrow)
    assert (one.weight_bytes * 2, one.activation_bytes * 2) == (two.weight_bytes, two.activation_bytes)
    assert (one.cache_read_bytes, one.cache_write_bytes) == (656_000, 656)  # FP8's scales and rotary keys are wider
    assert two.bytes == two.weight_bytes + two.cache_read_bytes + two.cache_write_bytes + two.activation_bytes
    assert two.cache_write_bytes == 1_152


@pytest.mark.parametrize("form", ["CC", *ABSORBED])
def test_v32_costs_what_v3_does_up_to_index_topk_but_for_its_projections_and_keys(form):
    dense, sparse = (mla_cost(config, form, rows=2, chunk=3, context=2048) for config in (V3, V32))
    assert sparse.linear_flops - dense.linear_flops == 2 * 6 * (
        attention_parameters(V32) - attention_parameters(V3) - 256
    )
    assert (sparse.attention_flops, sparse.index_flops) == (dense.attention_flops, 0)
    assert sparse.cache_read_bytes - dense.cache_read_bytes == 2 * 2048 * 256


def test_v32_attends_to_index_topk_tokens_beyond_which_only_index_scores_and_keys_grow():
    near, far = (mla_cost(V32, "A_CC_ME", rows=1, chunk=1, context=context) for context in (4096, 8192))
    assert far.attention_flops == near.attention_flops == decode("A_CC_ME", 2048).attention_flops
    assert far.index_flops - near.index_flops == 4096 * 2 * 64 * 129
    assert far.cache_read_bytes - near.cache_read_bytes == 4096 * 256
    assert near.cache_read_bytes == 4096 * 256 + 2048 * 1_152
    dense, sparse = (mla_cost(config, "CC", rows=1, chunk=1, context=8192) for config in (V3, V32))
    assert (sparse.attention_flops, sparse.expansion_flops) == (dense.attention_flops, dense.expansion_flops)
    assert sparse.index_flops > 0


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v2-lite", "deepseek-v3.2"])
def test_weights_are_the_layer_without_its_norms(name):
    config, mla = load_config(name), load_config(name).mla
    norms = mla.kv_lora_rank + (mla.q_lora_rank or 0) + 2 * (mla.indexer.head_dim if mla.indexer else 0)
    for form in ("CD", "CC", "A_CC", "A_CC_ME"):
        assert weight_values(config, form) == attention_parameters(config) - norms


@pytest.mark.parametrize("config", [V3, dataclasses.replace(V3, mla=DIRECT)], ids=["compressed", "direct"])
def test_materialised_weights_are_those_of_the_declared_products(config):
    infos = abstract_parameters(config, weights="f32", materialise=True)
    layers = infos["moe_layers.attn_norm.scale"].shape[0]

    def values(name):
        return math.prod(infos[f"moe_layers.attn.{name}"].shape) // layers

    query = config.mla.q_lora_rank or config.hidden_size
    rotary = query * config.num_attention_heads * config.mla.qk_rope_head_dim
    shared = values("kv_a.weight") + (values("q_a.weight") if config.mla.q_lora_rank is not None else 0)
    assert weight_values(config, "AM_CC_ME") == shared + rotary + values("query_key") + values("value_output")


def test_expansion_is_shared_by_the_queries_of_a_chunk_and_a_whole_prompt_attends_to_half_of_itself():
    one, many = (mla_cost(V3, "CC", rows=2, chunk=chunk, context=4096) for chunk in (1, 512))
    assert one.expansion_flops == many.expansion_flops > 0
    assert one.cache_read_bytes == many.cache_read_bytes
    assert many.attention_flops == 512 * one.attention_flops
    assert many.linear_flops == 512 * one.linear_flops
    n = 1024
    whole = mla_cost(V3, "CC", rows=1, chunk=n, context=n, attended=(n + 1) / 2)
    assert whole.attention_flops == 2 * 128 * 320 * n * (n + 1) // 2


def test_heads_are_divided_over_tp_and_latents_are_not():
    alone, shared = (decode("A_CC", 1000, tp=tp) for tp in (1, 8))
    assert shared.attention_flops * 8 == alone.attention_flops
    assert shared.cache_read_bytes == alone.cache_read_bytes
    latent_projections = 7168 * (1536 + 576)
    assert weight_values(V3, "A_CC", tp=8) == (weight_values(V3, "A_CC") - latent_projections) // 8 + latent_projections
    assert decode("CD", 1000, tp=8).cache_read_bytes * 8 == decode("CD", 1000).cache_read_bytes
