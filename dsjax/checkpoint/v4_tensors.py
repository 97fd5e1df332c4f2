"""DeepSeek-V4's tensor names, translated from checkpoints with DeepSeek's names or from checkpoints saved by transformers.

dsjax uses transformers' names, except that each expert has its own tensor with DeepSeek's name. As in V3, the MTP module's layer follows
the model's layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from dsjax.checkpoint.safetensors import TensorSpec

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
MODEL = {}
for _ours, _theirs in (("attn.compressor", "compressor"), ("attn.indexer.compressor", "compressor.indexer")):
    LAYER |= {
        f"{_ours}.kv.weight": (f"self_attn.{_theirs}.kv_proj.weight",),
        f"{_ours}.gate.weight": (f"self_attn.{_theirs}.gate_proj.weight",),
        f"{_ours}.bias": (f"self_attn.{_theirs}.position_bias",),
        f"{_ours}.norm.scale": (f"self_attn.{_theirs}.kv_norm.weight",),
    }
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

_RENAMED = [
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^(layers|mtp|embed|norm|hc_head)\b", r"model.\1"),
        (r"^model\.hc_head_", "model.hc_head_"),
        (r"^hc_head_", "model.hc_head_"),
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
        (r"(experts\..*|experts)\.gate_proj\.", r"\1.w1."),
        (r"(experts\..*|experts)\.down_proj\.", r"\1.w2."),
        (r"(experts\..*|experts)\.up_proj\.", r"\1.w3."),
    )
]
_MODULE = re.compile(r"^model\.mtp\.(\d+)\.")
_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")
_FUSED = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}


def renamed(name: str, layers: int) -> str:
    """Translate a tensor's name; a dsjax name stays as it is. layers: number of model layers, which the MTP modules' layers follow."""
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    module = _MODULE.match(name)
    if module:
        name = f"model.layers.{layers + int(module[1])}.{name[module.end() :]}"
        name = re.sub(r"^(model\.layers\.\d+)\.norm\.", r"\1.shared_head.norm.", name)
    return name


def lost_names(names: Iterable[str], layers: int, experts: int) -> set[str]:
    """Translate the tensor names of a damaged file. A lost scale gets both scale names, since the dtype of its matrix is unknown."""
    found = set()
    for name in (renamed(name, layers) for name in names):
        if fused := _EXPERTS.fullmatch(name):
            found |= {f"{fused[1]}.{expert}.{part}.weight" for expert in range(experts) for part in _FUSED[fused[2]]}
        elif matrix := _matrix_of(name):
            found |= {f"{matrix}_scale_inv", f"{matrix}_scale"}
        else:
            found.add(name)
    return found


def _matrix_of(name: str) -> str | None:
    """Return the matrix whose scales a tensor holds; None if it holds no scales."""
    return name.removesuffix(".scale") + ".weight" if name.endswith(".scale") and "_hc." not in name else None


@dataclass(frozen=True)
class V4Tensors(Mapping):
    """A checkpoint's tensors under dsjax's names, with V3's names for scales and one tensor per expert."""

    tensors: Mapping[str, object]
    specs: Mapping[str, TensorSpec]
    # each tensor's name in the checkpoint; for a part of a tensor ``[E, rows, columns]`` also expert, first row and number of rows
    kept: Mapping[str, tuple[str, tuple[int, int, int] | None]]

    @classmethod
    def of(cls, tensors: Mapping[str, object], specs: Mapping[str, TensorSpec], layers: int) -> V4Tensors:
        """Wrap the tensors of a checkpoint whose model has ``layers`` layers."""
        found, kept = {}, {}

        def keep(name: str, original: str, spec: TensorSpec, part=None) -> None:
            found[name] = spec
            kept[name] = (original, part)

        for original, spec in specs.items():
            name = renamed(original, layers)
            experts = _EXPERTS.fullmatch(name)
            if experts:
                for expert in range(spec.shape[0]):
                    parts = _FUSED[experts[2]]
                    rows = spec.shape[1] // len(parts)
                    for place, part in enumerate(parts):
                        own = TensorSpec(spec.dtype, (rows, spec.shape[2]))
                        keep(f"{experts[1]}.{expert}.{part}.weight", original, own, (expert, place * rows, rows))
                continue
            matrix = _matrix_of(name)
            if matrix is None:
                keep(name, original, spec)
                continue
            fp8 = specs.get(original.removesuffix("scale") + "weight")
            is_fp8 = fp8 is not None and fp8.dtype.name == "float8_e4m3fn"
            keep(matrix + ("_scale_inv" if is_fp8 else "_scale"), original, spec)
        return cls(tensors, found, kept)

    def __getitem__(self, name: str):
        original, part = self.kept[name]
        return self.tensors[original] if part is None else _Part(self.tensors[original], *part)

    def __iter__(self):
        return iter(self.kept)

    def __len__(self) -> int:
        return len(self.kept)


@dataclass(frozen=True)
class _Part:
    """Rows of one expert in a tensor ``[E, rows, columns]``."""

    tensor: object
    expert: int
    first: int
    rows: int

    @property
    def dtype(self) -> np.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.tensor.shape[2]

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        start, stop, _ = index[0].indices(self.rows)
        return self.tensor[self.expert : self.expert + 1, self.first + start : self.first + stop, index[1]][0]
