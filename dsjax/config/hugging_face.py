"""Between Hugging Face's `config.json` and the fields of `ModelConfig`: spellings, defaults, keys without effect."""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from dsjax.config.checks import reject, required
from dsjax.config.deepseek_v4 import read_v4
from dsjax.config.quantization import read_quantization
from dsjax.config.rope import read_rope
from dsjax.errors import ConfigError

_READ_APART = ("rope", "quantization", "torch_dtype", "eos_token_id", "router", "v4")
"""Fields of `ModelConfig` that are spelt otherwise in `config.json`, in more than one way, or not at all."""
_ALIASES = {
    "num_mtp_layers": "num_nextn_predict_layers",
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
}
"""Other names of fields: the `attribute_map` of transformers' configurations of the family."""
_REQUIRED_WITH_EXPERTS = ("moe_intermediate_size", "num_experts_per_tok")
_ROUTER_DEFAULTS = {
    "deepseek_v2": {"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False},
    "deepseek_v4": {"scoring_func": "sqrtsoftplus"},
}
# Read elsewhere in this file, or without any effect on inference.
_KNOWN_OTHERS = (
    "rope_theta", "rope_scaling", "rope_parameters", "rope_interleave", "quantization_config", "torch_dtype", "dtype", "eos_token_id",
    "qk_head_dim", "head_dim", "num_key_value_heads", "_name_or_path",
    "architectures", "attention_dropout", "auto_map", "aux_loss_alpha", "chunk_size_feed_forward", "ep_size", "id2label",
    "is_encoder_decoder", "label2id", "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id",
    "mlp_layer_types", "layer_types", "pretraining_tp", "problem_type", "return_dict", "seq_aux", "transformers_version",
    "unsloth_fixed", "use_cache",
)  # fmt: skip
# Keys that would change the arithmetic, with the one value under which they do not.
_NOT_BUILT = {"mlp_bias": False, "sliding_window": None}

_ARCHITECTURES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM",
}


def _read_alike(config: Any) -> tuple[list[str], list[str]]:
    """The fields of `ModelConfig` that `config.json` has under their own names: those that it must have, and the others.

    Of the others, missing or null means the dataclass's default. `q_lora_rank` must be there, and may be null.
    """
    fields = [field for field in dataclasses.fields(config) if field.name not in _READ_APART]
    must = [f.name for f in fields if f.default is dataclasses.MISSING or f.name == "q_lora_rank"]
    return must, [field.name for field in fields if field.name not in must]


def read_fields(config: type, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments for `ModelConfig`. Raises `ConfigError`; warns of keys that nobody knows."""
    raw, v4 = _without_aliases(raw), None
    if str(raw.get("model_type")).startswith("deepseek_v4"):
        raw, v4 = read_v4(raw)
    must, optional = _read_alike(config)
    fields = {name: required(raw, name) for name in must}
    fields |= _ROUTER_DEFAULTS.get(fields["model_type"], {}) if isinstance(fields["model_type"], str) else {}
    fields |= {name: raw[name] for name in optional if raw.get(name) is not None}
    if fields.get("n_routed_experts"):
        fields |= {name: required(raw, name) for name in _REQUIRED_WITH_EXPERTS}
        if raw.get("topk_group") is None:
            fields["topk_group"] = fields.get("n_group", 1)
    if fields["model_type"] == "deepseek_v2" and fields["norm_topk_prob"] is True:
        warnings.warn(
            "config field `norm_topk_prob`: found true in a deepseek_v2 model; it is read as false, because "
            "transformers' class ignores it there",
            stacklevel=2,
        )
        fields["norm_topk_prob"] = False
    fields |= {"v4": v4} if v4 is not None else {}
    fields["torch_dtype"] = _read_dtype(raw)
    fields["eos_token_id"] = _read_tokens(raw.get("eos_token_id"))
    fields["rope"] = read_rope(raw)
    fields["quantization"] = read_quantization(raw)
    if raw.get("mlp_layer_types") is not None:
        fields["first_k_dense_replace"] = _dense_layers(raw["mlp_layer_types"], fields["num_hidden_layers"])
    _check_derived(raw, fields)
    _check_unbuilt(raw, {*must, *optional})
    return fields


def _without_aliases(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Read fields that are given by another name. Raises where both names are there with different values."""
    named = {key: value for key, value in raw.items() if key not in _ALIASES}
    for alias, name in _ALIASES.items():
        value, given = raw.get(alias), named.get(name)
        if value is not None and given not in (None, value):
            raise reject(alias, value, f"{given!r}, equal to {name}")
        if value is not None:
            named[name] = value
    return named


def _read_dtype(raw: Mapping[str, Any]) -> Any:
    """The weights' dtype under either of its keys; float32 where neither is given, as in transformers."""
    dtypes = [raw[key] for key in ("torch_dtype", "dtype") if raw.get(key) is not None]
    if len(dtypes) == 2 and dtypes[0] != dtypes[1]:
        raise reject("dtype", dtypes[1], f"what `torch_dtype` says, which is {dtypes[0]!r}, or none")
    return dtypes[0] if dtypes else "float32"


def _read_tokens(ids: Any) -> tuple[Any, ...]:
    """Read `eos_token_id`, which may be missing, one id, or a list of ids."""
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list | tuple) else (ids,)


def _check_derived(raw: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Raise where a key that follows from others (transformers writes some) contradicts them."""
    rope, nope = fields["qk_rope_head_dim"], fields["qk_nope_head_dim"]
    heads = fields["num_attention_heads"]
    if fields["model_type"] == "deepseek_v4":
        return
    derived = {
        "head_dim": (rope, "qk_rope_head_dim, which transformers means by it"),
    }
    if isinstance(heads, int):
        derived["num_key_value_heads"] = (heads, "num_attention_heads: MLA has one key a query head")
    if isinstance(rope, int) and isinstance(nope, int):
        derived["qk_head_dim"] = (nope + rope, "qk_nope_head_dim + qk_rope_head_dim")
    for key, (expected, why) in derived.items():
        if raw.get(key) is not None and raw[key] != expected:
            raise reject(key, raw[key], f"{expected!r}, equal to {why}")


def _dense_layers(kinds: Any, layers: int) -> int:
    """How many layers `mlp_layer_types` has before the first with experts; transformers goes by it, and not by `first_k_dense_replace`."""
    dense = sum(kind == "dense" for kind in kinds) if isinstance(kinds, list | tuple) else -1
    if dense < 0 or list(kinds) != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise reject("mlp_layer_types", kinds, f'{layers} layers, "dense" ones first and then "sparse" ones')
    return dense


def _check_unbuilt(raw: Mapping[str, Any], fields: set[str]) -> None:
    for key, harmless in _NOT_BUILT.items():
        if key in raw and raw[key] is not None and raw[key] != harmless:
            raise ConfigError(f"config field `{key}`: found {raw[key]!r}; this architecture is not supported")
    kinds = raw.get("layer_types")
    if kinds is not None and (raw["model_type"] != "deepseek_v32" or {*kinds} != {"indexed_attention"}):
        raise ConfigError(f"config field `layer_types`: found {kinds!r}; this architecture is not supported")
    known = {*fields, *_KNOWN_OTHERS, *_NOT_BUILT}
    unknown = sorted(str(key) for key in raw if key not in known)
    if unknown:
        warnings.warn(f"config.json has keys that are unknown here and are ignored: {', '.join(unknown)}", stacklevel=4)


def write_fields(config: Any) -> dict[str, Any]:
    """Return `config.json` of a `ModelConfig` in the original spelling (`rope_scaling`, `torch_dtype`), of a V4 in transformers'."""
    written: dict[str, Any] = {"architectures": [_ARCHITECTURES[config.model_type]]}
    must, optional = _read_alike(config)
    written |= {name: getattr(config, name) for name in (*must, *optional)}
    written["num_key_value_heads"] = config.num_attention_heads
    written["n_routed_experts"] = config.n_routed_experts or None
    written |= config.rope.to_dict()
    if config.v4 is not None:
        written = _write_v4(config, written)
    elif config.model_type == "deepseek_v32":
        del written["rope_interleave"]  # transformers' class has no such field
    else:
        written = {name: value for name, value in written.items() if not name.startswith("index_")}
    written["torch_dtype"] = config.torch_dtype
    eos = config.eos_token_id
    written["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos) or None
    if config.quantization is not None:
        written["quantization_config"] = config.quantization.to_dict()
    return dict(sorted(written.items()))


def _write_v4(config: Any, written: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a V4: those that MLA's sizes stand for, and its own."""
    of_mla = (
        "kv_lora_rank",
        "v_head_dim",
        "qk_nope_head_dim",
        "first_k_dense_replace",
        "moe_layer_freq",
        "n_group",
        "topk_group",
    )
    kept = {
        name: value
        for name, value in written.items()
        if name not in (*of_mla, "intermediate_size") and "rope_" not in name[:5]
    }
    ropes = {"main": config.rope, "compress": config.v4.compress_rope}
    spelt = {
        name: {"rope_theta": rope.theta, **(rope.to_dict()["rope_scaling"] or {"rope_type": rope.type})}
        for name, rope in ropes.items()
    }
    sizes = {"head_dim": config.v_head_dim, "num_key_value_heads": 1, "rope_parameters": spelt}
    return kept | sizes | config.v4.to_dict()
