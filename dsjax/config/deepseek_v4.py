"""DeepSeek-V4's own fields of `config.json`, in DeepSeek's and in transformers' spelling."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from dsjax.config.attention import INDEXER_KEYS, IndexerConfig, check_rotated
from dsjax.config.checks import check_integer, check_mapping, check_number, reject, required
from dsjax.config.layers import LayerKind, LayerRun, in_runs
from dsjax.config.rope import RopeConfig, read_rope
from dsjax.errors import ConfigError

KINDS = {
    "window": "sliding_attention",
    "csa": "compressed_sparse_attention",
    "hca": "heavily_compressed_attention",
}
"""Kinds of attention → transformers' `layer_types`: sliding window only; window plus overlapping compressed entries chosen by an indexer;
window plus all non-overlapping compressed entries."""
RATES = (4, 128)
INDEX_FORMAT = "fp4"
"""Format to which DeepSeek's code rounds index queries and keys (`--index-scores`)."""
REFUSED = {
    "mla_prefill": "it has no MLA",
    "mla_decode": "it has no MLA",
}
"""Engine options that V4 does not support, and why (`dsjax/engine/setup/combinations.py`)."""
_LATER = ("dspark_", "engram_", "kv_source_layer", "index_source_layer", "candidate_", "text_config", "vision_config")
"""Name prefixes of fields in later releases of the family that would change the arithmetic."""
_INTEGERS = ("head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "sliding_window", "hc_mult", "hc_sinkhorn_iters")
_READ_HERE = ("intermediate_size", "layer_types", "compress_ratios", "mlp_layer_types", "num_hash_layers")
_OWN = (*_INTEGERS, "hc_eps", "swiglu_limit")


@dataclasses.dataclass(frozen=True)
class DeepseekV4:
    """Attention, residual and experts of DeepSeek-V4.

    attention: each layer's key in `KINDS`. head_dim: width of a head, and of the single key and value that all heads share; the last
    `qk_rope_head_dim` values rotate. q_lora_rank: width of the query latent. indexer: of "csa" layers. rates: tokens per compressed
    entry in "csa" and "hca" layers. compress_rope: rotation in "csa" and "hca" layers; window-only layers use the model's `rope`.
    num_hash_layers: number of hash-routed layers; they come first and select experts by token id. o_groups, o_lora_rank: of the output
    projection. hc_mult: residual streams. hc_sinkhorn_iters: iterations that make their mixing matrix doubly stochastic. hc_eps: added
    to each divisor. first: index in the model of a stage's first layer. borders: layer indices at which a new run starts.
    """

    attention: tuple[str, ...]
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    indexer: IndexerConfig
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_rope: RopeConfig
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    num_hash_layers: int
    swiglu_limit: float
    rates: tuple[int, int] = RATES
    first: int = 0
    borders: tuple[int, ...] = ()

    def __post_init__(self):
        for name in _INTEGERS:
            check_integer(name, getattr(self, name), least=1)
        check_rotated(self.qk_rope_head_dim, self.indexer)
        check_integer("num_hash_layers", self.num_hash_layers, least=0)
        check_number("hc_eps", self.hc_eps, least=0)
        check_number("swiglu_limit", self.swiglu_limit, least=0, above=True)
        for name, rate in zip(("csa", "hca"), self.rates, strict=True):
            check_integer(f"compress_rates.{KINDS[name]}", rate, least=2)
        if self.rates[1] % self.rates[0]:
            raise reject(
                "compress_rates",
                self.rates,
                "a second rate that the first divides, so that a page holds whole windows of both",
            )
        if not self.compress_rope.interleave:
            raise reject("rope_interleave", False, "true: deepseek_v4 rotates interleaved pairs")

    @property
    def qk_nope_head_dim(self) -> int:
        """Unrotated values per head."""
        return self.head_dim - self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Query, key and value width per head."""
        return self.head_dim

    v_head_dim = latent_dim = qk_head_dim

    def rate(self, attention: str) -> int | None:
        """Return the tokens per compressed entry; None for window-only layers."""
        return dict(zip(("csa", "hca"), self.rates, strict=True)).get(attention)

    @property
    def layer_runs(self) -> tuple[LayerRun, ...]:
        """The layers by kind. Flash: two window-only layers, one hash-routed layer, then the two other kinds interleaved 20 times."""
        mlps = ["hash" if layer < self.num_hash_layers else "moe" for layer in range(len(self.attention))]
        layers, ends = list(zip(self.attention, mlps, strict=True)), (0, *self.borders, len(mlps))
        return tuple(run for at, end in pairwise(ends) for run in in_runs(layers[at:end], self.first + at))

    def part(self, first: int, layers: int) -> DeepseekV4:
        """Return the configuration of only these layers. Their stacks keep the names that they have in the whole model."""
        hashed = min(max(self.num_hash_layers - first, 0), layers)
        attention = self.attention[first : first + layers]
        return dataclasses.replace(self, attention=attention, num_hash_layers=hashed, first=first)

    @property
    def mtp_kind(self) -> LayerKind:
        """Kind of the MTP module's layer: window-only attention, normal routing."""
        return LayerKind("mtp.layers", "moe", "window")

    def to_dict(self) -> dict[str, Any]:
        """Return V4's fields of `config.json` in transformers' spelling, without the rotations."""
        layers = len(self.attention)
        return {
            **{name: getattr(self, name) for name in (*_OWN, "qk_rope_head_dim")},
            **self.indexer.to_dict(),
            "layer_types": [KINDS[kind] for kind in self.attention],
            "mlp_layer_types": ["hash_moe"] * self.num_hash_layers + ["moe"] * (layers - self.num_hash_layers),
            "compress_rates": dict(zip((KINDS["csa"], KINDS["hca"]), self.rates, strict=True)),
        }


def read_v4(raw: Mapping[str, Any]) -> tuple[dict[str, Any], DeepseekV4]:
    """Split a `config.json` into the fields shared by all families and V4's own.

    Raises:
        ConfigError: a field is missing, invalid, or named like a field of a later release.
    """
    later = sorted(str(key) for key in raw if str(key).startswith(_LATER))
    if later:
        raise ConfigError(
            f"config fields {', '.join(f'`{key}`' for key in later)}: of a later release than DeepSeek-V4; DSpark blocks, Engram, shared "
            "compression and images are not supported"
        )
    raw = dict(raw)
    layers = check_integer("num_hidden_layers", required(raw, "num_hidden_layers"), least=1)
    width = check_integer("head_dim", required(raw, "head_dim"), least=2)
    rotated = raw.pop("qk_rope_head_dim", None)
    factor = raw.pop("partial_rotary_factor", None)
    if rotated is None:
        rotated = int(width * (64 / 512 if factor is None else check_number("partial_rotary_factor", factor, least=0)))
    if check_integer("qk_rope_head_dim", rotated, least=2) > width:
        raise reject("qk_rope_head_dim", rotated, f"at most head_dim, {width}")
    if raw.pop("num_key_value_heads", 1) != 1:
        raise reject("num_key_value_heads", "several", "1: all heads share one key, which is the value, too")
    if raw.get("norm_topk_prob", True) is not True:
        raise reject("norm_topk_prob", raw["norm_topk_prob"], "true: the weights of the chosen experts are normalised")
    given = dict(check_mapping("compress_rates", raw.pop("compress_rates", None) or {}))
    given |= {
        KINDS[name]: raw.pop(f"compress_rate_{name}") for name in ("csa", "hca") if f"compress_rate_{name}" in raw
    }
    rates = tuple(given.get(KINDS[name], rate) for name, rate in zip(("csa", "hca"), RATES, strict=True))
    main, compress = _ropes(raw)
    experts = raw.pop("expert_dtype", None)
    if experts is not None and raw.get("quantization_config") is not None:
        raw["quantization_config"] = {
            "expert_dtype": experts,
            **check_mapping("quantization_config", raw["quantization_config"]),
        }
    attention, hashed = _attention(raw, layers), _hash_layers(raw, layers)
    own = {name: required(raw, name) for name in _OWN} | {"qk_rope_head_dim": rotated}
    own |= {"compress_rope": compress, "num_hash_layers": hashed, "rates": rates}
    fields = DeepseekV4(attention, **own, indexer=IndexerConfig.read(raw))
    shared = {key: value for key, value in raw.items() if key not in (*_OWN, *_READ_HERE, *INDEXER_KEYS)}
    shared |= {"intermediate_size": required(raw, "moe_intermediate_size"), "rope_parameters": main}
    return {**shared, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}, fields


def _attention(raw: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Return each layer's kind of attention, from `layer_types` or DeepSeek's `compress_ratios`, which ends with the MTP module's."""
    named, names = "layer_types", {theirs: ours for ours, theirs in KINDS.items()}
    if raw.get(named) is None:
        named, names = "compress_ratios", {0: "window", **dict(zip(RATES, ("csa", "hca"), strict=True))}
    types = required(raw, named)
    if named == "compress_ratios" and isinstance(types, Sequence) and any(types[layers:]):
        raise reject(named, list(types[layers:]), "0 behind the model's own layers: the MTP module has a window alone")
    if (
        not isinstance(types, Sequence)
        or len(types) < layers
        or any(kind not in tuple(names) for kind in types[:layers])
    ):
        raise reject(named, types, f"{layers} of {', '.join(map(str, names))}")
    return tuple(names[kind] for kind in types[:layers])


def _hash_layers(raw: Mapping[str, Any], layers: int) -> int:
    """Return the number of hash-routed layers, from `mlp_layer_types` or DeepSeek's `num_hash_layers`."""
    types = raw.get("mlp_layer_types")
    if types is None:
        return min(check_integer("num_hash_layers", required(raw, "num_hash_layers"), least=0), layers)
    hashed = list(types).count("hash_moe") if isinstance(types, Sequence) else 0
    if not isinstance(types, Sequence) or list(types) != ["hash_moe"] * hashed + ["moe"] * (layers - hashed):
        raise reject("mlp_layer_types", types, f'{layers} layers, "hash_moe" ones first and then "moe" ones')
    return hashed


def _ropes(raw: dict[str, Any]) -> tuple[dict[str, Any], RopeConfig]:
    """Return the rotation of window-only layers, as `read_rope` input, and of compressing layers, without YaRN's sin and cos scaling."""
    given = check_mapping("rope_parameters", raw.pop("rope_parameters", None) or {})
    scaling = check_mapping("rope_scaling", raw.pop("rope_scaling", None) or {})
    theta, compress_theta = raw.pop("rope_theta", 10_000.0), raw.pop("compress_rope_theta", 160_000.0)
    if "main" in given and "compress" in given:
        main, compress = (check_mapping(f"rope_parameters.{name}", given[name]) for name in ("main", "compress"))
    else:
        main, compress = {"rope_theta": theta}, {**(given or scaling), "rope_theta": compress_theta}
    main, compress = (
        {key: value for key, value in one.items() if key != "partial_rotary_factor"} for one in (main, compress)
    )
    rope = read_rope({"rope_parameters": compress})
    if rope.type == "yarn" and rope.attention_factor is None:
        rope = dataclasses.replace(rope, attention_factor=1.0)
    return main, rope
