"""Mapping between Hugging Face's tensor names and dsjax's parameter paths, for reading and writing.

A parameter consists of *pieces*. Each is one Hugging Face tensor and its place in the parameter (layer, physical expert, gate or up).
``torch.nn.Linear`` stores ``[out, in]`` and dsjax ``[in, out]``, so most pieces are transposed, except for FP8 matrices on GPUs.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dsjax.checkpoint import v4_tensors
from dsjax.config import ModelConfig
from dsjax.config.layers import moe_layers, stacks
from dsjax.model.parameters import ParameterInfo

SCALE_SUFFIX = "_scale_inv"
PACKED_SCALE_SUFFIX, PACKED_GLOBAL_SUFFIX = "_scale", "_scale_2"
"""Suffixes of ModelOpt and Quark. The checkpoint reader first renames other conventions to these."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# dsjax path in the whole model → Hugging Face name.
_MODEL = {
    "embed.weight": EMBEDDING,
    "final_norm.scale": "model.norm.weight",
    "head.weight": HEAD,
}
# dsjax path in a stack of layers → Hugging Face names in a layer; two names are gate and up, stacked.
_LAYER = {
    "attn_norm.scale": ("input_layernorm.weight",),
    "attn.q.weight": ("self_attn.q_proj.weight",),
    "attn.q_a.weight": ("self_attn.q_a_proj.weight",),
    "attn.q_a_bias": ("self_attn.q_a_proj.bias",),
    "attn.q_a_norm.scale": ("self_attn.q_a_layernorm.weight",),
    "attn.q_b.weight": ("self_attn.q_b_proj.weight",),
    "attn.kv_a.weight": ("self_attn.kv_a_proj_with_mqa.weight",),
    "attn.kv_a_bias": ("self_attn.kv_a_proj_with_mqa.bias",),
    "attn.kv_a_norm.scale": ("self_attn.kv_a_layernorm.weight",),
    "attn.kv_b.weight": ("self_attn.kv_b_proj.weight",),
    "attn.indexer.query.weight": ("self_attn.indexer.wq_b.weight",),
    "attn.indexer.key.weight": ("self_attn.indexer.wk.weight",),
    "attn.indexer.key_norm.scale": ("self_attn.indexer.k_norm.weight",),
    "attn.indexer.key_norm.bias": ("self_attn.indexer.k_norm.bias",),
    "attn.indexer.head_weights.weight": ("self_attn.indexer.weights_proj.weight",),
    "attn.o.weight": ("self_attn.o_proj.weight",),
    "attn.o_bias": ("self_attn.o_proj.bias",),
    "mlp_norm.scale": ("post_attention_layernorm.weight",),
    "mlp.gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.down.weight": ("mlp.down_proj.weight",),
    "moe.router.weight": ("mlp.gate.weight",),
    "moe.router.bias": ("mlp.gate.e_score_correction_bias",),
    "moe.experts.gate_up.weight": ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"),
    "moe.experts.down.weight": ("mlp.experts.{expert}.down_proj.weight",),
    "moe.shared.gate_up.weight": ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
    "moe.shared.down.weight": ("mlp.shared_experts.down_proj.weight",),
}
# dsjax path in the stack of MTP modules → Hugging Face name in that layer.
_MTP = {
    "embed_norm.scale": "enorm.weight",
    "hidden_norm.scale": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "final_norm.scale": "shared_head.norm.weight",
}
# Saved by old versions of the remote code; dsjax computes them from the configuration.
_COMPUTED = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class TensorPiece:
    """One Hugging Face tensor's place in a parameter: ``parameter[index]`` is the tensor or its transpose."""

    name: str
    index: tuple[int | slice, ...]
    transposed: bool

    def shape(self, parameter_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the tensor's shape, given the parameter's."""
        sizes = [size for size, i in zip(parameter_shape, self.index, strict=True) if isinstance(i, slice)]
        return tuple(reversed(sizes)) if self.transposed else tuple(sizes)


@dataclass(frozen=True)
class _Source:
    """Source of a parameter."""

    templates: tuple[str, ...]  # tensor names with the placeholders ``{layer}`` and ``{expert}``; two are gate and up
    layers: range | None  # checkpoint layer number of each layer of the parameter's stack; None if it is not in a stack
    transposed: bool  # whether dsjax stores a matrix as ``[in, out]`` and the checkpoint as ``[out, in]``

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.templates[0]

    def with_suffix(self, suffix: str) -> _Source:
        """Return the source of the tensors beside these whose names have this suffix."""
        return replace(self, templates=tuple(template + suffix for template in self.templates))


class TensorNames:
    """Mapping between tensor names and parameters, for one configuration and the parameters that its model declares.

    Args:
        config: the model's configuration.
        parameters: its table of parameters (``abstract_parameters``), for any ``weights``. Derived parameters are left out, since no
            checkpoint holds them.
        experts: the logical expert in each physical slot, ``[P]`` for all layers or ``[MoE layers, P]``, where rows of MTP modules
            follow the model's, and layers without a row use the last one. The value ``n_routed_experts`` means the shared expert.
            Default: one slot per expert, in order.

    Raises:
        KeyError: a parameter is missing from the tables above, which is a bug.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: Mapping[str, ParameterInfo],
        experts: Sequence[int] | np.ndarray | None = None,
    ):
        self.config = config
        self.parameters = {path: info for path, info in parameters.items() if info.init != "derived"}
        experts = np.arange(config.n_routed_experts) if experts is None else np.asarray(experts)
        self.experts = np.atleast_2d(experts)
        self._moe_layers = [*moe_layers(config.layer_runs), *mtp_layers(config)]
        self._sources = {path: _source(config, path, self.parameters) for path in self.parameters}

    def pieces(self, path: str, region: Sequence[slice] | None = None) -> Iterator[TensorPiece]:
        """Yield a parameter's pieces in order; with ``region``, only those that overlap it."""
        source = self._sources[path]
        info = self.parameters[path]
        shape = info.shape
        region = region if region is not None else [slice(0, size) for size in shape]
        axes = []
        if source.layers is not None:
            axes.append(range(*region[0].indices(shape[0])))
        if source.per_expert:
            axes.append(range(*region[1].indices(shape[1])))
        gate_up_axis = None
        parts = (0,)
        if len(source.templates) == 2:
            # A matrix is [in, (gate, up), out], and [(gate, up), out, in] if ``depth_last``, which is torch's order of in and out.
            gate_up_axis = len(shape) - (3 if info.depth_last else 2)
            parts = range(*region[gate_up_axis].indices(2))
        for indices in itertools.product(*axes):
            for part in parts:
                expert = self._expert(source, *indices) if source.per_expert else ""
                template = source.templates[part]
                if expert == self.config.n_routed_experts:
                    template = template.replace("experts.{expert}", "shared_experts")
                layer = source.layers[indices[0]] if source.layers is not None else ""
                name = template.format(layer=layer, expert=expert)
                index: list[int | slice] = [*indices, *[slice(None)] * (len(shape) - len(indices))]
                if gate_up_axis is not None:
                    index[gate_up_axis] = part
                yield TensorPiece(name, tuple(index), source.transposed and not info.depth_last)

    @property
    def dtypes(self) -> str:
        """Fingerprint of the parameters' dtypes, in which two loads of one checkpoint may differ."""
        dtypes = {path: info.dtype.name for path, info in self.parameters.items()}
        return " ".join(f"{path}:{name}" for path, name in sorted(dtypes.items()))

    def experts_of(self, path: str) -> np.ndarray | None:
        """Return the logical expert in each physical slot of a parameter, ``[layers of its stack, P]``; None if it has no expert slots."""
        source = self._sources[path]
        if not source.per_expert:
            return None
        return self.experts[[self._row(source, layer) for layer in range(self.parameters[path].shape[0])]]

    def _expert(self, source: _Source, layer: int, slot: int) -> int:
        """Return the logical expert in a physical slot of a layer in its stack."""
        return int(self.experts[self._row(source, layer), slot])

    def _row(self, source: _Source, layer: int) -> int:
        """Return the row of ``experts`` for a layer in its stack."""
        return min(self._moe_layers.index(source.layers[layer]), len(self.experts) - 1)

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Return the name and shape of every tensor of the parameters."""
        return {name: piece.shape(self.parameters[path].shape) for name, (path, piece) in self.places().items()}

    def places(self) -> dict[str, tuple[str, TensorPiece]]:
        """Return the parameter path and piece for each Hugging Face name; redundant physical experts use the first copy."""
        pieces: dict[str, tuple[str, TensorPiece]] = {}
        for path in self.parameters:
            for piece in self.pieces(path):
                pieces.setdefault(piece.name, (path, piece))
        return pieces

    def copies(self) -> dict[str, str]:
        """Return optional tensors beyond ``expected``, each with the tensor it must equal.

        DeepSeek's MTP layers include copies of the main model's embedding and head; tied models may include the head.
        """
        head = EMBEDDING if self.config.tie_word_embeddings else HEAD
        mtp_copies = {"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": head}
        originals = {
            f"model.layers.{layer}.{name}": original
            for layer in mtp_layers(self.config)
            for name, original in mtp_copies.items()
        }
        if self.config.tie_word_embeddings:
            originals[HEAD] = EMBEDDING
        return originals

    def belongs_to_mtp(self, name: str) -> bool:
        """Return whether the tensor is of a layer after the main model's last: an MTP module, loaded or not."""
        parts = name.split(".")
        return (
            name.startswith("model.layers.")
            and len(parts) > 3
            and parts[2].isdecimal()
            and int(parts[2]) >= self.config.num_hidden_layers
        )

    def is_computed(self, name: str) -> bool:
        """Return whether the tensor can be computed from the configuration; some checkpoints hold it."""
        return name.endswith(_COMPUTED)


def mtp_layers(config: ModelConfig) -> range:
    """Return the checkpoint's layer numbers of the MTP modules, which follow the main model's."""
    return range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers)


def scaled_weight(path: str, parameters: Mapping[str, ParameterInfo]) -> str | None:
    """Return the path of the FP8 weight whose block scales ``path`` holds; None if it holds none (a norm's scale)."""
    if not path.endswith(".scale"):
        return None
    weight = path.removesuffix("scale") + "weight"
    return weight if weight in parameters and parameters[weight].quantised else None


def _source(config: ModelConfig, path: str, parameters: Mapping[str, ParameterInfo]) -> _Source:
    """Return a parameter's source, looked up in the tables above."""
    weight = scaled_weight(path, parameters)
    if weight is not None:
        return _source(config, weight, parameters).with_suffix(SCALE_SUFFIX)
    for part, suffix in (("scale", PACKED_SCALE_SUFFIX), ("global_scale", PACKED_GLOBAL_SUFFIX)):
        weight = path.removesuffix(f".{part}") + ".weight"
        if path.endswith(f".{part}") and weight in parameters and parameters[weight].packed > 1:
            source = _source(config, weight, parameters).with_suffix(suffix)
            # A global scale is one number per matrix, so there is nothing to transpose.
            return source if part == "scale" else replace(source, transposed=False)
    is_matrix = path.endswith(".weight") and path != "embed.weight"
    own = ({}, {}, {}) if config.v4 is None else (v4_tensors.MODEL, v4_tensors.LAYER, v4_tensors.MTP)
    model_names, layer_names, mtp_names = map(operator.or_, (_MODEL, _LAYER, _MTP), own)
    if path in model_names:
        return _Source((model_names[path],), None, is_matrix)
    layers_of_mtp = mtp_layers(config)
    layers_by_stack = {f"{kind.stack}.": layers for kind, layers in stacks(config.layer_runs).items()}
    for stack, layers in (layers_by_stack | {"mtp.layers.": layers_of_mtp}).items():
        if path.startswith(stack):
            names = layer_names[path.removeprefix(stack)]
            return _Source(tuple(f"model.layers.{{layer}}.{name}" for name in names), layers, is_matrix)
    return _Source((f"model.layers.{{layer}}.{mtp_names[path.removeprefix('mtp.')]}",), layers_of_mtp, is_matrix)
