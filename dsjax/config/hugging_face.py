"""Conversion between Hugging Face's `config.json` and the fields of `ModelConfig`: spellings, defaults, keys without effect."""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from dsjax.config.attention import INDEXER_KEYS, IndexerConfig, MlaConfig
from dsjax.config.checks import check_choice, check_mapping, reject, required
from dsjax.config.deepseek_v4 import read_v4
from dsjax.config.families import FAMILIES, SPARSE, WITH_TEXT_PART, Family
from dsjax.config.quantization import read_quantization
from dsjax.config.rope import read_rope
from dsjax.errors import ConfigError

_CONVERTED_FIELDS = ("rope", "quantization", "torch_dtype", "eos_token_id", "router", "mla", "v4")
"""Fields of `ModelConfig` that `config.json` spells differently, in several ways, or not at all."""
_ALIASES = {
    "num_mtp_layers": "num_nextn_predict_layers",
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
}
"""Aliases of fields, from the `attribute_map` of the family's configurations in transformers."""
_MLA_FIELDS = tuple(field.name for field in dataclasses.fields(MlaConfig) if field.name != "indexer")
_REQUIRED_WITH_EXPERTS = ("moe_intermediate_size", "num_experts_per_tok")
_SHARED_KEYS = ("quantization_config", "torch_dtype", "dtype", "bos_token_id", "eos_token_id", "pad_token_id")
"""Keys that a model with a text part may put at the top level instead of in `text_config`."""
# Read elsewhere in this file, or without any effect on inference.
_OTHER_KEYS = (
    "rope_theta", "rope_scaling", "rope_parameters", "rope_interleave", "quantization_config", "torch_dtype", "dtype", "eos_token_id",
    "qk_head_dim", "q_head_dim", "head_dim", "num_key_value_heads", "indexer_rope_interleave", "_name_or_path",
    "architectures", "attention_dropout", "auto_map", "aux_loss_alpha", "chunk_size_feed_forward", "ep_size", "id2label",
    "is_encoder_decoder", "label2id", "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id",
    "mlp_layer_types", "pretraining_tp", "problem_type", "return_dict", "seq_aux", "transformers_version",
    "unsloth_fixed", "use_cache", "index_skip_topk_offset", "embedding_dropout", "output_dropout",
    "router_aux_loss_coef", "router_jitter_noise",
    # Keys that transformers 4 writes for every model, and its generation settings.
    "add_cross_attention", "is_decoder", "pruned_heads", "tf_legacy_loss", "tie_encoder_decoder", "torchscript", "use_bfloat16",
    "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "length_penalty", "max_length", "min_length",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_scores", "remove_invalid_values",
    "repetition_penalty", "return_dict_in_generate", "temperature", "top_k", "top_p", "typical_p",
)  # fmt: skip
# Keys that would change the arithmetic, each with the only value that does not.
_UNSUPPORTED = {
    "mlp_bias": False,
    "sliding_window": None,
    "partial_rotary_factor": 1,
    "moe_router_enable_expert_bias": True,
    "use_qk_norm": True,  # sarvam's: the norms of the latents
    # Layers that reuse the tokens selected by an earlier layer (GLM-5.2).
    "index_topk_freq": 1,
    "index_topk_pattern": None,
    "index_share_for_mtp_iteration": False,
}
_SUPPORTED_LAYER_LISTS = {"layer_types": "indexed_attention", "indexer_types": "full"}
"""Lists of layer kinds in models with sparse attention, each with the only supported kind."""


def _same_named_fields(config: Any) -> tuple[list[str], list[str]]:
    """Return the `ModelConfig` fields that `config.json` has under the same names: the required and the optional ones.

    A missing or null optional field has the dataclass's default.
    """
    fields = [field for field in dataclasses.fields(config) if field.name not in _CONVERTED_FIELDS]
    needed = [field.name for field in fields if field.default is dataclasses.MISSING]
    return needed, [field.name for field in fields if field.name not in needed]


def text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text part's `config.json` if the model also has a vision part; otherwise return `raw`.

    Raises `ConfigError` if a model outside `WITH_TEXT_PART` has a `text_config`.
    """
    if "text_config" not in raw:
        return raw
    check_choice("model_type", raw.get("model_type"), WITH_TEXT_PART, " of a config.json with a `text_config`")
    text = {"model_type": "deepseek_v3", **check_mapping("text_config", raw["text_config"])}
    text |= {key: raw[key] for key in _SHARED_KEYS if text.get(key) is None and raw.get(key) is not None}
    # The top level decides whether the head is tied, as in transformers.
    return text | {key: raw[key] for key in ("tie_word_embeddings",) if key in raw}


def read_fields(config: type, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments for `ModelConfig`. Raises `ConfigError`; warns about unknown keys."""
    raw = without_aliases(raw)
    v4 = None
    if str(raw.get("model_type")).startswith("deepseek_v4"):
        raw, v4 = read_v4(raw)
    needed, optional = _same_named_fields(config)
    family = FAMILIES[check_choice("model_type", required(raw, "model_type"), tuple(FAMILIES))]
    fields = {name: value for name, value in family.defaults.items() if name not in _MLA_FIELDS}
    fields |= {name: required(raw, name) for name in needed if name in raw or name not in fields}
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
    fields |= {"v4": v4} if v4 is not None else {"mla": _read_mla(raw, family)}
    fields["torch_dtype"] = _read_dtype(raw)
    fields["eos_token_id"] = _read_tokens(raw.get("eos_token_id"))
    fields["rope"] = read_rope(raw)
    fields["quantization"] = read_quantization(raw)
    if raw.get("mlp_layer_types") is not None:
        fields["first_k_dense_replace"] = _dense_layers(raw["mlp_layer_types"], fields["num_hidden_layers"])
    _check_derived(raw, fields)
    _check_unsupported(raw, {*needed, *optional, *_MLA_FIELDS, *INDEXER_KEYS}, family.sparse)
    return fields


def _read_mla(raw: Mapping[str, Any], family: Family) -> MlaConfig:
    """Read MLA's sizes. `q_lora_rank` is required and may be null."""
    with_defaults = {**family.defaults, **raw}
    for name in INDEXER_KEYS:
        if not family.sparse and raw.get(name) is not None:
            only = f"{', '.join(SPARSE[:-1])} and {SPARSE[-1]}"
            raise reject(name, raw[name], f"none: only {only} models have sparse attention")
    sizes = {name: required(with_defaults, name) for name in _MLA_FIELDS}
    return MlaConfig(**sizes, indexer=IndexerConfig.read(raw) if family.sparse else None)


def without_aliases(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Rename aliased fields to the names of `ModelConfig`. Raises `ConfigError` if both names have different values."""
    renamed = {key: value for key, value in raw.items() if key not in _ALIASES}
    for alias, name in _ALIASES.items():
        value, own_value = raw.get(alias), renamed.get(name)
        if value is not None and own_value not in (None, value):
            raise reject(alias, value, f"{own_value!r}, equal to {name}")
        if value is not None:
            renamed[name] = value
    return renamed


def _read_dtype(raw: Mapping[str, Any]) -> Any:
    """Return the weights' dtype from either of its keys; float32 if neither is given, as in transformers."""
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
    """Raise `ConfigError` if a derived key (transformers writes some) contradicts the keys that it follows from."""
    if "mla" not in fields:
        return
    mla, heads = fields["mla"], fields["num_attention_heads"]
    rope = mla.qk_rope_head_dim
    derived = {
        "head_dim": (rope, "qk_rope_head_dim, which transformers means by it"),
        "indexer_rope_interleave": (
            FAMILIES[raw["model_type"]].index_interleave,
            f"how the indexer of {raw['model_type']} rotates in transformers",
        ),
    }
    if isinstance(heads, int):
        derived["num_key_value_heads"] = (heads, "num_attention_heads: MLA has one key a query head")
    derived["qk_head_dim"] = derived["q_head_dim"] = (mla.qk_head_dim, "qk_nope_head_dim + qk_rope_head_dim")
    if raw.get("head_dim") == mla.kv_lora_rank + rope:
        del derived["head_dim"]  # the width of a cached token, which sarvam's configurations give for vLLM
    for key, (expected, why) in derived.items():
        if raw.get(key) is not None and raw[key] != expected:
            raise reject(key, raw[key], f"{expected!r}, equal to {why}")


def _dense_layers(kinds: Any, layers: int) -> int:
    """Return the number of dense layers in `mlp_layer_types`, which transformers uses instead of `first_k_dense_replace`."""
    dense = sum(kind == "dense" for kind in kinds) if isinstance(kinds, list | tuple) else -1
    if dense < 0 or list(kinds) != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise reject("mlp_layer_types", kinds, f'{layers} layers, "dense" ones first and then "sparse" ones')
    return dense


def _check_unsupported(raw: Mapping[str, Any], fields: set[str], sparse: bool) -> None:
    for key, harmless in _UNSUPPORTED.items():
        if key in raw and raw[key] is not None and raw[key] != harmless:
            raise ConfigError(f"config field `{key}`: found {raw[key]!r}; this architecture is not supported")
    for key, kind in _SUPPORTED_LAYER_LISTS.items():
        kinds = raw.get(key)
        if kinds is not None and (not sparse or any(found != kind for found in kinds)):
            raise ConfigError(f"config field `{key}`: found {kinds!r}; this architecture is not supported")
    known = {*fields, *_OTHER_KEYS, *_UNSUPPORTED, *_SUPPORTED_LAYER_LISTS}
    unknown = sorted(str(key) for key, value in raw.items() if key not in known and value is not None)
    if unknown:
        warnings.warn(f"config.json has keys that are unknown here and are ignored: {', '.join(unknown)}", stacklevel=4)


def write_fields(config: Any) -> dict[str, Any]:
    """Return a `ModelConfig`'s `config.json` in the original spelling (`rope_scaling`, `torch_dtype`), or for V4 in transformers'."""
    written: dict[str, Any] = {"architectures": [config.family.architecture]}
    needed, optional = _same_named_fields(config)
    written |= {name: getattr(config, name) for name in (*needed, *optional)}
    written["num_key_value_heads"] = config.num_attention_heads
    written["n_routed_experts"] = config.n_routed_experts or None
    written |= config.rope.to_dict()
    if config.v4 is not None:
        written = _write_v4(config, written)
    else:
        written |= {name: getattr(config.mla, name) for name in _MLA_FIELDS}
        if config.mla.indexer is not None:
            written |= config.mla.indexer.to_dict()
            del written["rope_interleave"]  # transformers' classes have no such field
        if config.family.index_interleave:
            written["indexer_rope_interleave"] = True
    if config.family.requires_mlp_list:
        dense = config.num_dense_layers
        written["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (config.num_hidden_layers - dense)
    written["torch_dtype"] = config.torch_dtype
    eos = config.eos_token_id
    written["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos) or None
    if config.quantization is not None:
        written["quantization_config"] = config.quantization.to_dict()
    return dict(sorted(written.items()))


def _write_v4(config: Any, written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a V4 configuration: its own, and those it shares with other families."""
    absent = ("first_k_dense_replace", "moe_layer_freq", "n_group", "topk_group", "intermediate_size")
    kept = {name: value for name, value in written.items() if name not in absent and not name.startswith("rope_")}
    ropes = {"main": config.rope, "compress": config.v4.compress_rope}
    spelt = {
        name: {"rope_theta": rope.theta, **(rope.to_dict()["rope_scaling"] or {"rope_type": rope.type})}
        for name, rope in ropes.items()
    }
    return kept | {"num_key_value_heads": 1, "rope_parameters": spelt} | config.v4.to_dict()
