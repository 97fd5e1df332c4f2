"""DeepSeek-V4's tensor names, translated from checkpoints with DeepSeek's names or from checkpoints saved by transformers.

dsjax uses transformers' names, except that each expert has its own tensor with DeepSeek's name. As in V3, the MTP module's layer follows
the model's layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dsjax.checkpoint.safetensors import TensorSpec

# Parameter path → tensor name, in a layer after "model.layers.N."; tensors of one parameter are concatenated.
LAYER = {
    "attn.q_a_norm.scale": ("self_attn.q_a_norm.weight",),
    "attn.kv.weight": ("self_attn.kv_proj.weight",),
    "attn.kv_norm.scale": ("self_attn.kv_norm.weight",),
    "attn.sink": ("self_attn.sinks",),
    "attn.o_a.weight": ("self_attn.o_a_proj.weight",),
    "attn.o_b.weight": ("self_attn.o_b_proj.weight",),
    "attn.indexer.query.weight": ("self_attn.compressor.indexer.q_b_proj.weight",),
    "attn.indexer.head_weights.weight": ("self_attn.compressor.indexer.scorer.weights_proj.weight",),
    "moe.router.experts_of_token": ("mlp.gate.tid2eid",),
}
for _part, _owner in (("experts", "experts.{expert}"), ("shared", "shared_experts")):
    LAYER[f"moe.{_part}.gate_up.weight"] = tuple(f"mlp.{_owner}.{name}.weight" for name in ("w1", "w3"))
    LAYER[f"moe.{_part}.down.weight"] = (f"mlp.{_owner}.w2.weight",)
for _ours, _theirs in (("attn.compressor", "compressor"), ("attn.indexer.compressor", "compressor.indexer")):
    LAYER |= {
        f"{_ours}.kv.weight": (f"self_attn.{_theirs}.kv_proj.weight",),
        f"{_ours}.gate.weight": (f"self_attn.{_theirs}.gate_proj.weight",),
        f"{_ours}.bias": (f"self_attn.{_theirs}.position_bias",),
        f"{_ours}.norm.scale": (f"self_attn.{_theirs}.kv_norm.weight",),
    }
MODEL = {}
for _ours, _theirs in (("weight", "fn"), ("base", "base"), ("scale", "scale")):
    LAYER |= {
        f"{block}_residual.{_ours}": (f"{name}.{_theirs}",) for block, name in (("attn", "attn_hc"), ("mlp", "ffn_hc"))
    }
    MODEL[f"residual.{_ours}"] = f"model.hc_head.hc_{_theirs}"
MTP = {
    "embed_proj.weight": "e_proj.weight",
    "hidden_proj.weight": "h_proj.weight",
    **{path: name.removeprefix("model.") for path, name in MODEL.items()},
}

# Applied in this order, each to the result of those before it.
_REPLACEMENTS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^(layers|mtp|embed|norm|hc_head)\b", r"model.\1"),
        (r"^hc_head_", "model.hc_head_"),
        (r"^(model\.mtp\.\d+)\.norm\.", r"\1.shared_head.norm."),
        (r"^model\.embed\.", "model.embed_tokens."),
        (r"^head\.", "lm_head."),
        (r"\bhc_head_(fn|base|scale)$", r"hc_head.hc_\1"),
        (r"\.attn\.", ".self_attn."),
        (r"\.ffn\.", ".mlp."),
        (r"\.attn_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
        (r"\.attn_sink$", ".sinks"),
        (r"\.indexer\.compressor\.", ".compressor.indexer."),
        (r"\.self_attn\.indexer\.", ".self_attn.compressor.indexer."),
        (r"\.indexer\.weights_proj\.", ".indexer.scorer.weights_proj."),
        (r"(\.self_attn\b.*)\.norm\.", r"\1.kv_norm."),
        (r"\.q_norm\.", ".q_a_norm."),
        (r"\.ape$", ".position_bias"),
        (r"\.w(q_a|q_b|kv|o_a|o_b)\.", r".\1_proj."),
        (r"\.wgate\.", ".gate_proj."),
        (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
        (r"(experts\b.*)\.gate_proj\.", r"\1.w1."),
        (r"(experts\b.*)\.down_proj\.", r"\1.w2."),
        (r"(experts\b.*)\.up_proj\.", r"\1.w3."),
    )
]
_MTP_MODULE = re.compile(r"^model\.mtp\.(\d+)\.")
_FUSED_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")
_FUSED_PARTS = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}


def dsjax_name(name: str, layers: int) -> str:
    """Translate a tensor's name; a dsjax name stays as it is. layers: number of model layers, which the MTP modules' layers follow."""
    for pattern, replacement in _REPLACEMENTS:
        name = pattern.sub(replacement, name)
    return _MTP_MODULE.sub(lambda module: f"model.layers.{layers + int(module[1])}.", name)


def lost_names(names: Iterable[str], layers: int, experts: int) -> set[str]:
    """Translate the tensor names of a damaged file. A lost scale gets both scale names, since the dtype of its matrix is unknown."""
    lost = set()
    for name in (dsjax_name(name, layers) for name in names):
        if fused := _FUSED_EXPERTS.fullmatch(name):
            parts = _FUSED_PARTS[fused[2]]
            lost |= {f"{fused[1]}.{expert}.{part}.weight" for expert in range(experts) for part in parts}
        elif matrix := _matrix_of(name):
            lost |= {f"{matrix}_scale_inv", f"{matrix}_scale"}
        else:
            lost.add(name)
    return lost


def _matrix_of(name: str) -> str | None:
    """Return the matrix whose scales a tensor holds; None if it holds no scales."""
    return name.removesuffix(".scale") + ".weight" if name.endswith(".scale") and "_hc." not in name else None


class _Origin(NamedTuple):
    """A tensor of the checkpoint; if ``expert`` is not None, ``rows`` rows of one expert in a tensor ``[E, rows, columns]``."""

    tensor_name: str
    expert: int | None = None
    first_row: int = 0
    rows: int = 0


@dataclass(frozen=True)
class V4Tensors(Mapping):
    """A checkpoint's tensors under dsjax's names, with V3's names for scales and one tensor per expert."""

    tensors: Mapping[str, object]  # under the checkpoint's names
    specs: Mapping[str, TensorSpec]
    origins: Mapping[str, _Origin]

    @classmethod
    def of(cls, tensors: Mapping[str, object], specs: Mapping[str, TensorSpec], layers: int) -> V4Tensors:
        """Wrap a checkpoint's tensors, with ``specs`` under its own names. layers: number of model layers."""
        own_specs, origins = {}, {}
        for original, spec in specs.items():
            name = dsjax_name(original, layers)
            if fused := _FUSED_EXPERTS.fullmatch(name):
                parts = _FUSED_PARTS[fused[2]]
                rows = spec.shape[1] // len(parts)
                for expert in range(spec.shape[0]):
                    for index, part in enumerate(parts):
                        own_name = f"{fused[1]}.{expert}.{part}.weight"
                        own_specs[own_name] = TensorSpec(spec.dtype, (rows, spec.shape[2]))
                        origins[own_name] = _Origin(original, expert, index * rows, rows)
                continue
            if matrix := _matrix_of(name):
                weight = specs.get(original.removesuffix("scale") + "weight")
                is_fp8 = weight is not None and weight.dtype.name == "float8_e4m3fn"
                name = matrix + ("_scale_inv" if is_fp8 else "_scale")
            own_specs[name], origins[name] = spec, _Origin(original)
        return cls(tensors, own_specs, origins)

    def __getitem__(self, name: str):
        origin = self.origins[name]
        tensor = self.tensors[origin.tensor_name]
        return tensor if origin.expert is None else _Part(tensor, origin)

    def __iter__(self):
        return iter(self.origins)

    def __len__(self) -> int:
        return len(self.origins)


@dataclass(frozen=True)
class _Part:
    """The rows of one expert that ``origin`` describes."""

    tensor: object
    origin: _Origin

    @property
    def dtype(self) -> np.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.origin.rows, self.tensor.shape[2]

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        expert, first_row = self.origin.expert, self.origin.first_row
        start, stop, _ = index[0].indices(self.origin.rows)
        return self.tensor[expert : expert + 1, first_row + start : first_row + stop, index[1]][0]
