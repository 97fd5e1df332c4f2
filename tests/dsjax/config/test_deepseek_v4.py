"""DeepSeek-V4's configurations: layers by kind, both spellings, and fields that are refused by name."""

import pytest
from v4_models import YARN, v4_config

from dsjax.config import ModelConfig, load_config
from dsjax.config.deepseek_v4 import KINDS
from dsjax.config.layers import in_runs, stacks
from dsjax.errors import ConfigError

FLASH, PRO = (load_config(f"deepseek-v4-{size}") for size in ("flash", "pro"))


def kinds(config):
    return [[(kind.attention, kind.mlp) for kind in run.kinds] + [run.count] for run in config.layer_runs]


def test_layers_of_the_released_models_are_few_runs():
    by_turns = [("hca", "moe"), ("csa", "moe")]
    assert kinds(FLASH) == [[("window", "hash"), 2], [("csa", "hash"), 1], [*by_turns, 20]]
    assert kinds(PRO) == [[("hca", "hash"), 2], [("csa", "hash"), 1], [*by_turns, 29]]
    assert FLASH.v4.mtp_kind.attention == "window"
    assert FLASH.quantization.expert_dtype == PRO.quantization.expert_dtype == "fp4"
    assert {kind.stack: (numbers[0], len(numbers)) for kind, numbers in stacks(FLASH.layer_runs).items()} == {
        "window_hash_0": (0, 2), "csa_hash_2": (2, 1), "hca_moe_3": (3, 20), "csa_moe_4": (4, 20)
    }  # fmt: skip


@pytest.mark.parametrize("layers", ["a", "aab", "abab", "aabab", "abb", "abababc", "abcabc", "aaabbbab"])
def test_every_layer_is_in_one_run_in_its_place(layers):
    runs = in_runs([(letter, "moe") for letter in layers])
    assert "".join(kind.attention for run in runs for kind in run.kinds * run.count) == layers
    assert len({kind.stack for run in runs for kind in run.kinds}) == sum(len(run.kinds) for run in runs)


@pytest.mark.parametrize("config", [FLASH, PRO, ModelConfig.from_dict(v4_config("wch", hashed=2))])
def test_what_is_written_is_read_back(config):
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_deepseeks_spelling_and_transformers_are_one_model():
    theirs = v4_config("wwchch", hashed=2, rates=(4, 128), rope_parameters=YARN)
    apart = {"layer_types", "mlp_layer_types", "compress_rates", "rope_parameters"}
    ours = {key: value for key, value in theirs.items() if key not in apart}
    ours |= {"compress_ratios": [0, 0, 4, 128, 4, 128, 0], "num_hash_layers": 2, "rope_scaling": YARN}
    config = ModelConfig.from_dict(ours)
    assert config == ModelConfig.from_dict(theirs)
    compressed = config.v4.compress_rope
    assert (config.rope.type, compressed.theta, compressed.cos_sin_scale) == ("default", 160_000, 1)
    raw = v4_config("wch")
    rates = raw.pop("compress_rates")
    raw |= {f"compress_rate_{name}": rates[KINDS[name]] for name in ("csa", "hca")}
    assert ModelConfig.from_dict(raw) == ModelConfig.from_dict(v4_config("wch"))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dspark_block_size": 5, "engram_layer_ids": [1]}, "`dspark_block_size`, `engram_layer_ids`"),
        ({"text_config": {}}, "`text_config`"),
        ({"model_type": "deepseek_v41"}, "`model_type`"),
        ({"num_key_value_heads": 2}, "`num_key_value_heads`"),
        ({"layer_types": ["full_attention"] * 3}, "`layer_types`"),
        ({"layer_types": None}, "`compress_ratios`"),
        ({"layer_types": None, "compress_ratios": [0, 4, 128, 4]}, "`compress_ratios`"),
        ({"layer_types": None, "compress_ratios": [0, 4, 64]}, "`compress_ratios`"),
        ({"mlp_layer_types": ["moe", "hash_moe", "moe"]}, "`mlp_layer_types`"),
        ({"mlp_layer_types": None}, "`num_hash_layers`"),
        ({"compress_rates": {KINDS["csa"]: 3}}, "`compress_rates`"),
        ({"compress_rates": [4, 128]}, "`compress_rates`"),
        ({"layer_types": [["sliding_attention"]] * 3}, "`layer_types`"),
        ({"mlp_layer_types": 3}, "`mlp_layer_types`"),
        ({"o_groups": 3}, "`o_groups`"),
        ({"scoring_func": "sigmoid"}, "`scoring_func`"),
        ({"norm_topk_prob": False}, "`norm_topk_prob`"),
        ({"swiglu_limit": 0}, "`swiglu_limit`"),
        ({"qk_rope_head_dim": 18}, "`qk_rope_head_dim`"),
    ],
)
def test_a_field_that_cannot_be_is_named(changes, named):
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_dict(v4_config("wch") | changes)
    assert named in str(error.value)
