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
COMPRESSING = ("csa", "hca")
RATES = (4, 128)
"""Tokens per compressed entry in layers of each of `COMPRESSING`."""
_LATER = ("dspark_", "engram_", "kv_source_layer", "index_source_layer", "candidate_", "text_config", "vision_config")
"""Name prefixes of fields in later releases of the family that would change the arithmetic."""
_INTEGERS = ("head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "sliding_window", "hc_mult", "hc_sinkhorn_iters")
"""Integers of at least 1."""
_READ_HERE = ("intermediate_size", "layer_types", "compress_ratios", "mlp_layer_types", "num_hash_layers")
"""Fields of `config.json` that this module translates."""
_OWN = (*_INTEGERS, "hc_eps", "swiglu_limit")
"""Fields of `config.json` that `DeepseekV4` keeps unchanged."""


@dataclasses.dataclass(frozen=True)
class DeepseekV4:
    """Attention, residual and experts of DeepSeek-V4."""

    attention: tuple[str, ...]  # each layer's key in `KINDS`
    head_dim: int  # width of a head, and of the single key and value that all heads share
    qk_rope_head_dim: int  # how many of the last values of `head_dim` rotate
    q_lora_rank: int  # width of the query latent
    indexer: IndexerConfig  # of "csa" layers
    o_groups: int  # of the output projection
    o_lora_rank: int  # of the output projection
    sliding_window: int
    compress_rope: RopeConfig  # rotation in "csa" and "hca" layers; window-only layers use the model's `rope`
    hc_mult: int  # residual streams
    hc_sinkhorn_iters: int  # iterations that make the streams' mixing matrix doubly stochastic
    hc_eps: float  # added to each divisor
    num_hash_layers: int  # hash-routed layers; they come first and select experts by token id
    swiglu_limit: float
    rates: tuple[int, int] = RATES  # tokens per compressed entry in "csa" and "hca" layers
    first: int = 0  # index in the model of a stage's first layer
    # layers at which another run starts, to name stacks as a stage does; empty in a `part`
    borders: tuple[int, ...] = ()

    def __post_init__(self):
        for name in _INTEGERS:
            check_integer(name, getattr(self, name), least=1)
        check_rotated(self.qk_rope_head_dim, self.indexer)
        check_integer("num_hash_layers", self.num_hash_layers, least=0)
        check_number("hc_eps", self.hc_eps, least=0)
        check_number("swiglu_limit", self.swiglu_limit, least=0, above=True)
        for kind in COMPRESSING:
            check_integer(f"compress_rates.{KINDS[kind]}", self.rate(kind), least=2)
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
        """Query and key width per head."""
        return self.head_dim

    # The key that all heads share is also the value, and the cached latent.
    v_head_dim = latent_dim = qk_head_dim

    kinds = tuple(KINDS)
    index_format = "fp4"

    def rate(self, attention: str) -> int | None:
        """Return the tokens per compressed entry; None for window-only layers."""
        return dict(zip(COMPRESSING, self.rates, strict=True)).get(attention)

    def compressors(self, kind: str) -> tuple[tuple[int, int, int], ...]:
        """Return (entry width, number of series, rate) of each compressor of a layer."""
        widths = {"csa": (self.head_dim, self.indexer.head_dim), "hca": (self.head_dim,)}.get(kind, ())
        return tuple((width, 2 if kind == "csa" else 1, self.rate(kind)) for width in widths)

    def weights(self, kind: str, heads: int, width: int, tp: int) -> tuple[list[tuple[int, int]], int, int]:
        """See `MlaConfig.weights`. float32: sinks, and the compressors' biases."""
        query, head, inner = self.q_lora_rank, self.head_dim, self.o_groups * self.o_lora_rank // tp
        matrices = [(width, query), (query, heads * head // tp), (width, head)]
        matrices += [(heads * head // self.o_groups, inner), (inner, width)]
        others, in_float32 = query + head, heads // tp
        for entry, series, rate in self.compressors(kind):
            in_float32 += rate * series * entry
            others += 2 * width * series * entry + entry
        if kind == "csa":
            matrices.append((query, self.indexer.n_heads * self.indexer.head_dim))
            others += width * self.indexer.n_heads
        return matrices, others + in_float32, in_float32

    @property
    def layer_runs(self) -> tuple[LayerRun, ...]:
        """The layers by kind. Flash: two window-only layers, one hash-routed layer, then the two other kinds interleaved 20 times."""
        mlps = ["hash" if layer < self.num_hash_layers else "moe" for layer in range(len(self.attention))]
        layers = list(zip(self.attention, mlps, strict=True))
        borders = (0, *self.borders, len(mlps))
        return tuple(run for begin, end in pairwise(borders) for run in in_runs(layers[begin:end], self.first + begin))

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
            "compress_rates": {KINDS[kind]: self.rate(kind) for kind in COMPRESSING},
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
    rates = _read_rates(raw)
    main, compress = _ropes(raw)
    experts = raw.pop("expert_dtype", None)
    if experts is not None and raw.get("quantization_config") is not None:
        raw["quantization_config"] = {
            "expert_dtype": experts,
            **check_mapping("quantization_config", raw["quantization_config"]),
        }
    fields = DeepseekV4(
        attention=_attention(raw, layers),
        num_hash_layers=_hash_layers(raw, layers),
        qk_rope_head_dim=rotated,
        compress_rope=compress,
        rates=rates,
        indexer=IndexerConfig.read(raw),
        **{name: required(raw, name) for name in _OWN},
    )
    shared = {key: value for key, value in raw.items() if key not in (*_OWN, *_READ_HERE, *INDEXER_KEYS)}
    # The other families have dense layers and choose experts by groups; V4 has neither, so give values that stand for none.
    shared |= {"intermediate_size": required(raw, "moe_intermediate_size"), "first_k_dense_replace": 0}
    shared |= {"n_group": 1, "topk_group": 1, "rope_parameters": main}
    return shared, fields


def _read_rates(raw: dict[str, Any]) -> tuple[int, int]:
    """Remove and return the compression rates: transformers' `compress_rates` by layer type, or `compress_rate_csa` and `…_hca`."""
    rates = dict(check_mapping("compress_rates", raw.pop("compress_rates", None) or {}))
    for kind in COMPRESSING:
        if f"compress_rate_{kind}" in raw:
            rates[KINDS[kind]] = raw.pop(f"compress_rate_{kind}")
    return tuple(rates.get(KINDS[kind], default) for kind, default in zip(COMPRESSING, RATES, strict=True))


def _attention(raw: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Return each layer's kind of attention, from `layer_types` or DeepSeek's `compress_ratios`, which ends with the MTP module's."""
    field = "layer_types" if raw.get("layer_types") is not None else "compress_ratios"
    if field == "layer_types":
        kinds = {layer_type: kind for kind, layer_type in KINDS.items()}
    else:
        kinds = {0: "window", **dict(zip(RATES, COMPRESSING, strict=True))}
    values = required(raw, field)
    if field == "compress_ratios" and isinstance(values, Sequence) and any(values[layers:]):
        raise reject(field, list(values[layers:]), "0 after the model's own layers: the MTP module has a window alone")
    is_complete = isinstance(values, Sequence) and len(values) >= layers
    if not is_complete or any(value not in tuple(kinds) for value in values[:layers]):
        raise reject(field, values, f"{layers} of {', '.join(map(str, kinds))}")
    return tuple(kinds[value] for value in values[:layers])


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
    """Return the rotation of window-only layers, as `read_rope` input, and of compressing layers."""
    given = check_mapping("rope_parameters", raw.pop("rope_parameters", None) or {})
    scaling = check_mapping("rope_scaling", raw.pop("rope_scaling", None) or {})
    theta = raw.pop("rope_theta", 10_000.0)
    compress_theta = raw.pop("compress_rope_theta", 160_000.0)
    if "main" in given and "compress" in given:
        main, compress = (check_mapping(f"rope_parameters.{name}", given[name]) for name in ("main", "compress"))
    else:
        main = {"rope_theta": theta}
        compress = {**(given or scaling), "rope_theta": compress_theta}
    main, compress = (
        {key: value for key, value in fields.items() if key != "partial_rotary_factor"} for fields in (main, compress)
    )
    compress_rope = read_rope({"rope_parameters": compress})
    if compress_rope.type == "yarn" and compress_rope.attention_factor is None:
        # V4 does not scale sin and cos, as YaRN does by default.
        compress_rope = dataclasses.replace(compress_rope, attention_factor=1.0)
    return main, compress_rope
