"""Configurations: the released models' figures, both spellings, and errors that name the field."""

import dataclasses
import functools
import json
import re
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsjax.config import ModelConfig, QuantizationConfig, RopeConfig, bundled_models, load_config
from dsjax.errors import ConfigError, UserError
from dsjax.model.parameter_counts import parameter_counts

REFERENCE = Path(__file__).parents[3] / ".." / "shared" / "reference" / "deepseek-r1.config.json"
DEEPSEEK = ("deepseek-r1", "deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "deepseek-v3.1")
V32 = ("deepseek-v3.2", "deepseek-v3.2-exp", "deepseek-v3.2-speciale")
NEIGHBOURS = ("glm-4.7-flash", "glm-5", "glm-5.1", "kimi-k2", "kimi-k2.5", "moonlight", "sarvam-105b")
RELEASED = (*DEEPSEEK, *V32, *NEIGHBOURS)


def changed(name: str, /, **changes) -> dict:
    """A bundled model's config.json as a dict; `changes` of `...` remove a key."""
    raw = load_config(name).to_dict() | changes
    return {key: value for key, value in raw.items() if value is not ...}


v2, v3 = functools.partial(changed, "deepseek-v2"), functools.partial(changed, "deepseek-v3")

V32_INDEXER = {"model_type": "deepseek_v32", "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}
GLM_INDEXER = V32_INDEXER | {"model_type": "glm_moe_dsa"}
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}


def int4(**weights) -> dict:
    """Kimi-K2.5's `quantization_config`, with some fields of its weights changed."""
    written = dict(load_config("kimi-k2.5").quantization.to_dict())
    group = written["config_groups"]["group_0"]
    return written | {"config_groups": {"group_0": group | {"weights": group["weights"] | weights}}}


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.skipif(not REFERENCE.exists(), reason="shared/reference is not here")
def test_bundled_r1_equals_the_released_config():
    assert load_config("deepseek-r1") == load_config(REFERENCE)


# Released sizes: V3's from its tensors (DESIGN.md); the others' public figures are 236 B, 15.7 B, 1.04 T (1,026 B
# without rounding up), 16 B, 744 B, 30 B, 105 B, with 21 B, 2.4 B, 32 B, 3 B active. The exact numbers below are this arithmetic's.
@pytest.mark.parametrize(
    ("name", "main_model", "active"),
    [
        ("deepseek-v3", 671_026_419_200, 37_552_297_472),
        ("deepseek-v3.1", 671_026_419_200, 37_552_297_472),
        ("deepseek-r1", 671_026_419_200, 37_552_297_472),
        ("deepseek-v3.2", 671_877_944_064, 38_403_822_336),  # V3's, and 61 indexers of 13,959,424
        ("deepseek-v2", 235_741_434_880, 21_375_800_320),
        ("deepseek-v2-lite", 15_706_484_224, 2_661_150_208),
        ("deepseek-v4-flash", 284_334_567_511, 13_801_959_511),  # published: 284 B, 13 B
        ("deepseek-v4-pro", 1_572_999_528_803, 49_781_408_099),  # 1.6 T, 49 B
        ("kimi-k2", 1_026_408_232_448, 32_861_500_928),
        ("moonlight", 15_960_111_872, 2_914_776_192),
        ("kimi-k2.5", 1_026_408_232_448, 32_861_500_928),
        ("glm-5.1", 743_911_218_432, 41_784_728_832),
        ("glm-4.7-flash", 29_943_393_920, 3_896_766_080),
        ("sarvam-105b", 106_031_767_424, 12_414_902_144),
    ],
)
def test_released_models_have_their_public_sizes(name, main_model, active):
    counts = parameter_counts(load_config(name))
    assert counts["main_model"] == pytest.approx(main_model, rel=1e-6)
    assert counts["active"] == pytest.approx(active, rel=1e-6)


def test_layers_are_dense_where_their_kinds_say_so_or_there_are_no_experts():
    kinds = ["dense"] * 2 + ["sparse"] * 59
    raw = v3(**V32_INDEXER, mlp_layer_types=kinds, layer_types=["indexed_attention"] * 61)
    assert ModelConfig.from_dict(raw).num_dense_layers == 2
    for experts in (0, None, ...):
        config = ModelConfig.from_dict(v3(n_routed_experts=experts, num_experts_per_tok=None, n_group=None))
        assert (config.num_dense_layers, config.num_moe_layers, config.is_moe) == (61, 0, False)
    config = ModelConfig.from_dict(v3(first_k_dense_replace=99))
    assert (config.num_dense_layers, config.num_moe_layers) == (61, 0)


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_model_is_bundled_gives_no_warning_and_reads_back_equal_from_its_dict(name):
    assert name in bundled_models()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = load_config(name)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_the_two_spellings_of_rope_mean_the_same():
    original = v3()
    scaling = {key: value for key, value in original["rope_scaling"].items() if key != "type"}
    modern = v3(rope_theta=..., rope_scaling=..., torch_dtype=..., dtype="bfloat16")
    modern["rope_parameters"] = {**scaling, "rope_type": "yarn", "rope_theta": original["rope_theta"]}
    assert ModelConfig.from_dict(modern) == ModelConfig.from_dict(original)
    both = original | {"rope_parameters": modern["rope_parameters"]}
    assert ModelConfig.from_dict(both) == ModelConfig.from_dict(original)
    rope = load_config("kimi-k2").rope  # bundled in the spelling of transformers 5
    assert (rope.type, rope.theta, rope.factor, rope.beta_fast) == ("yarn", 50000.0, 32.0, 1.0)


def test_yarn_corrects_the_softmax_scale_by_mscale_all_dim_squared():
    # V3: 0.1 ln 40 + 1 = 1.36889; V2: 0.0707 ln 40 + 1 = 1.26080.
    assert load_config("deepseek-v3").softmax_scale == pytest.approx(192**-0.5 * 1.3688879454**2)
    assert load_config("deepseek-v2").softmax_scale == pytest.approx(192**-0.5 * 1.2608037774**2)
    assert load_config("moonlight").softmax_scale == pytest.approx(192**-0.5)
    without = ModelConfig.from_dict(v3(rope_scaling={key: YARN[key] for key in YARN if key != "mscale_all_dim"}))
    assert without.softmax_scale == pytest.approx(192**-0.5)


def test_eos_may_be_one_id_several_or_none():
    found = [ModelConfig.from_dict(v3(eos_token_id=eos)).eos_token_id for eos in (1, [1, 7], None, ...)]
    assert found == [(1,), (1, 7), (), ()]


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("num_mtp_layers", "num_nextn_predict_layers"),
        ("num_experts", "n_routed_experts"),
        ("num_local_experts", "n_routed_experts"),
        ("num_shared_experts", "n_shared_experts"),
    ],
)
def test_a_field_is_read_by_the_other_name_that_transformers_has_for_it(alias, name):
    raw = v3()
    renamed = v3(**{name: ..., alias: raw[name]})
    assert ModelConfig.from_dict(renamed) == ModelConfig.from_dict(raw)
    assert ModelConfig.from_dict(renamed | {name: None}) == ModelConfig.from_dict(raw)
    with pytest.raises(ConfigError, match=f"{alias}.*{name}"):
        ModelConfig.from_dict(raw | {alias: raw[name] + 1})


def test_missing_keys_take_the_defaults_of_transformers():
    config = ModelConfig.from_dict(
        v3(torch_dtype=..., topk_method=..., scoring_func=..., rope_scaling=..., rope_interleave=..., topk_group=...)
    )
    assert (config.torch_dtype, config.topk_method, config.scoring_func) == ("float32", "noaux_tc", "sigmoid")
    assert config.rope == RopeConfig(theta=10000.0)
    assert config.topk_group == config.n_group == 8
    config = ModelConfig.from_dict(v2(topk_method=..., scoring_func=..., norm_topk_prob=...))
    assert (config.topk_method, config.scoring_func, config.norm_topk_prob) == ("greedy", "softmax", False)


def test_a_family_s_own_defaults_and_spellings_are_read():
    raw = changed("sarvam-105b", q_lora_rank=..., first_k_dense_replace=..., head_dim=576)
    raw["rope_scaling"] = raw["rope_scaling"] | {"type": "deepseek_yarn", "rope_type": "deepseek_yarn"}
    assert ModelConfig.from_dict(raw) == load_config("sarvam-105b")
    written = load_config("glm-4.7-flash").to_dict()
    assert written["mlp_layer_types"] == ["dense"] + ["sparse"] * 46, "transformers' class reads nothing else"
    del written["mlp_layer_types"], written["first_k_dense_replace"]
    assert ModelConfig.from_dict(written) == load_config("glm-4.7-flash")


def test_of_a_model_with_a_vision_part_the_text_part_is_read():
    """Of keys on both levels the text part's count, but for the tied head's: transformers asks the whole for it."""
    text = changed("kimi-k2", bos_token_id=None, quantization_config=..., torch_dtype=..., tie_word_embeddings=True)
    whole = {"model_type": "kimi_k25", "text_config": text, "vision_config": {"patch_size": 14}, "eos_token_id": 7}
    whole |= {"tie_word_embeddings": False, "bos_token_id": 5, "dtype": "bfloat16", "quantization_config": FP8}
    expected = dataclasses.replace(load_config("kimi-k2"), bos_token_id=5)
    assert ModelConfig.from_dict(whole) == expected


def test_keys_that_are_unknown_or_ignored_are_named_in_a_warning():
    with pytest.warns(UserWarning, match="n_routed_expert"):
        ModelConfig.from_dict(v3(n_routed_expert=3))
    # transformers' DeepseekV2TopkRouter deletes the attribute; DeepSeek's remote code would normalise and not scale.
    with pytest.warns(UserWarning, match="norm_topk_prob"):
        assert ModelConfig.from_dict(v2(norm_topk_prob=True)).norm_topk_prob is False


INT4 = (("num_bits", 8, "4"), ("group_size", 128, "32"), ("symmetric", False, "True"), ("actorder", "group", "None"))
QUANTIZATION = [
    ("quant_method", {"quant_method": "gptq"}, '"fp8"'),
    ("weight_block_size", {"quant_method": "fp8"}, "must be given"),
    ("weight_block_size", FP8 | {"weight_block_size": [64, 128]}, "[128, 128]"),
    ("fmt", FP8 | {"fmt": "e5m2"}, '"e4m3"'),
    ("activation_scheme", FP8 | {"activation_scheme": "static"}, '"dynamic"'),
    ("config_groups", int4() | {"config_groups": None}, "a JSON object"),
    *((f"config_groups.group_0.weights.{key}", int4(**{key: value}), said) for key, value, said in INT4),
]
FAULTS = [
    # Changes to V3's config.json, the field that the error names, a part of what it says. The property test below has other values.
    *(({name: ...}, name, "must be given") for name in ("hidden_size", "q_lora_rank", "moe_intermediate_size")),
    *(({name: -1}, name, "-1") for name in ("n_routed_experts", "n_shared_experts", "first_k_dense_replace")),
    *(({name: 0}, name, "above 0") for name in ("routed_scaling_factor", "rms_norm_eps")),
    *(({name: "no"}, name, "true or false") for name in ("norm_topk_prob", "attention_bias", "rope_interleave")),
    ({"model_type": "llama"}, "model_type", '"deepseek_v3"'),
    ({"model_type": ["deepseek_v3"]}, "model_type", "deepseek_v3"),
    ({"hidden_size": -7168}, "hidden_size", "-7168"),
    ({"hidden_size": 7168.0}, "hidden_size", "an integer"),
    ({"hidden_size": True}, "hidden_size", "True"),
    ({"q_lora_rank": 0}, "q_lora_rank", "at least 1"),
    ({"qk_rope_head_dim": 63}, "qk_rope_head_dim", "even"),
    ({"num_key_value_heads": 8}, "num_key_value_heads", "128"),
    ({"num_attention_heads": "128"}, "num_attention_heads", "an integer"),
    ({"head_dim": 128}, "head_dim", "64"),
    ({"qk_head_dim": 128}, "qk_head_dim", "192"),
    ({"n_group": 7}, "n_group", "a divisor of n_routed_experts, which is 256"),
    ({"n_group": 256, "topk_group": 8}, "n_group", "at most 128"),
    ({"topk_group": 9}, "topk_group", "at most n_group, which is 8"),
    ({"topk_group": 1, "num_experts_per_tok": 33}, "num_experts_per_tok", "at most 32"),
    ({"num_experts_per_tok": 0}, "num_experts_per_tok", "at least 1"),
    ({"moe_layer_freq": 2}, "moe_layer_freq", "accepted is 1"),
    ({"topk_method": "best"}, "topk_method", '"noaux_tc"'),
    ({"topk_method": "greedy"}, "topk_method", "deepseek_v3"),
    ({"scoring_func": "softmax"}, "scoring_func", '"sigmoid"'),
    ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor", "nan"),
    ({"hidden_act": "gelu"}, "hidden_act", '"silu"'),
    ({"torch_dtype": "int8"}, "torch_dtype", '"bfloat16"'),
    ({"dtype": "float32"}, "dtype", "bfloat16"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings", "true or false"),
    ({"eos_token_id": 129280}, "eos_token_id", "below vocab_size"),
    ({"eos_token_id": [1, -1]}, "eos_token_id", "-1"),
    ({"bos_token_id": 1.5}, "bos_token_id", "1.5"),
    ({"rope_theta": 0}, "rope_theta", "above 1"),
    ({"rope_scaling": 40}, "rope_scaling", "a JSON object"),
    ({"rope_scaling": YARN | {"type": "linear"}}, "rope_scaling.type", '"yarn"'),
    ({"rope_scaling": YARN | {"rope_type": "default"}}, "rope_scaling.rope_type", "'yarn'"),
    ({"rope_scaling": {"type": "default", "factor": 40}}, "rope_scaling.factor", "no such key"),
    ({"rope_scaling": {"type": "yarn", "factor": 40}}, "rope_scaling.original_max_position_embeddings", "YaRN needs"),
    ({"rope_scaling": YARN | {"factor": 0.5}}, "rope_scaling.factor", "at least 1"),
    ({"rope_scaling": YARN | {"beta_fast": 1, "beta_slow": 32}}, "rope_scaling.beta_fast", "at least beta_slow"),
    ({"rope_scaling": YARN | {"mscael": 1}}, "rope_scaling.mscael", "unknown"),
    ({"rope_scaling": YARN | {"partial_rotary_factor": 0.5}}, "rope_scaling.partial_rotary_factor", "1"),
    ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters", "'yarn'"),
    ({"rope_parameters": YARN | {"factor": 32}}, "rope_parameters", "40"),
    ({"rope_parameters": YARN | {"rope_theta": 50000}}, "rope_parameters", "10000"),
    ({"quantization_config": []}, "quantization_config", "a JSON object"),
    *(({"quantization_config": value}, f"quantization_config.{field}", said) for field, value, said in QUANTIZATION),
    ({"index_topk": 2048}, "index_topk", "only deepseek_v32, deepseek_v4 and glm_moe_dsa"),
    (GLM_INDEXER | {"indexer_rope_interleave": False}, "indexer_rope_interleave", "accepted is True"),
    (V32_INDEXER | {"indexer_rope_interleave": True}, "indexer_rope_interleave", "accepted is False"),
    (GLM_INDEXER | {"indexer_types": ["full"] * 60 + ["shared"]}, "indexer_types", "not supported"),
    (GLM_INDEXER | {"index_topk_freq": 4}, "index_topk_freq", "not supported"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "not supported"),
    ({"text_config": {}}, "model_type", '"kimi_k25"'),
    ({"model_type": "kimi_k25", "text_config": []}, "text_config", "a JSON object"),
    ({"layer_types": ["indexed_attention"]}, "layer_types", "not supported"),
    ({"mlp_layer_types": ["sparse", "dense"]}, "mlp_layer_types", '"dense" ones first'),
    ({"model_type": "deepseek_v32", "index_topk": None}, "index_topk", "at least 1"),
    (V32_INDEXER | {"index_topk": 0}, "index_topk", "at least 1"),
    (V32_INDEXER | {"index_head_dim": 32}, "index_head_dim", "at least qk_rope_head_dim"),
    (V32_INDEXER | {"q_lora_rank": None}, "q_lora_rank", "query latent"),
    (V32_INDEXER | {"rope_interleave": False}, "rope_interleave", "interleaved pairs"),
    ({"mlp_bias": True}, "mlp_bias", "not supported"),
]


@pytest.mark.parametrize(("changes", "field", "said"), FAULTS)
def test_a_faulty_configuration_is_an_error_that_names_the_field(changes, field, said):
    with pytest.raises(ConfigError, match=re.escape(f"`{field}")) as error:
        ModelConfig.from_dict(v3(**changes))
    assert said in str(error.value)
    assert isinstance(error.value, UserError)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"topk_method": "noaux_tc"}, "topk_method"),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"topk_group": 1, "num_experts_per_tok": 21}, "num_experts_per_tok"),
    ],
)
def test_deepseek_v2_has_its_own_limits(changes, field):
    with pytest.raises(ConfigError, match=f"`{field}`"):
        ModelConfig.from_dict(v2(**changes))
    greedy = ModelConfig.from_dict(v2(topk_method="greedy", topk_group=1, num_experts_per_tok=160))
    assert greedy.num_experts_per_tok == 160, "of every expert"


def test_a_changed_copy_is_checked_too():
    with pytest.raises(ConfigError, match="`vocab_size`"):
        dataclasses.replace(load_config("deepseek-v3"), vocab_size=0)
    with pytest.raises(ConfigError, match=r"`quantization_config\.fmt`"):
        QuantizationConfig(fmt="e5m2")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
RAW = v3()
PLACES = [(key,) for key in RAW]
PLACES += [(group, key) for group in ("rope_scaling", "quantization_config") for key in RAW[group]]


@settings(max_examples=300)
@given(place=st.sampled_from(PLACES), value=JSON | st.just(10**400))
def test_any_json_value_anywhere_is_read_or_refused_with_a_config_error(place, value):
    raw = json.loads(json.dumps(RAW))
    target = raw if len(place) == 1 else raw[place[0]]
    target[place[-1]] = value
    try:
        config = ModelConfig.from_dict(raw)
    except ConfigError:
        return
    assert ModelConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "no model configuration"), ("{", "not valid JSON"), ("[]", "a JSON object"), ("{}", "`model_type`")],
)
def test_a_file_that_cannot_be_read_is_an_error_that_names_it(tmp_path, content, said):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(v3()))
    assert load_config(tmp_path) == load_config(path) == load_config("deepseek-v3")
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(ConfigError, match=re.escape(said)) as error:
        load_config(path)
    assert str(path) in str(error.value)


def test_a_file_that_is_too_large_is_not_read_to_its_end_and_an_unknown_name_lists_the_bundled_ones(tmp_path):
    with pytest.raises(ConfigError, match=r"deepseek-v3.*kimi-k2"):
        load_config("deepseek-v33")
    path = tmp_path / "model.bin"
    with path.open("wb") as file:
        file.truncate(10**12)  # on the disk it takes nothing
    with pytest.raises(ConfigError, match=r"model.bin has more than 10,000,000 bytes, expected a config\.json"):
        load_config(path)
