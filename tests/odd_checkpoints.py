"""A tiny model with odd sizes (no dimension a multiple of the FP8 block), and checkpoints of it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from layouts import TINY

from dsjax.checkpoint.load import load
from dsjax.checkpoint.names import SCALE_SUFFIX, TensorNames
from dsjax.checkpoint.quantise import quantise
from dsjax.checkpoint.safetensors import TensorSpec
from dsjax.checkpoint.shards import write_folder
from dsjax.checkpoint.source import Checkpoint, open_checkpoint
from dsjax.config import ModelConfig
from dsjax.model.parameter_table import abstract_parameters
from sharding import MeshSpec, Rules

_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
_WIDTHS = {"vocab_size": 72, "hidden_size": 152, "intermediate_size": 272, "moe_intermediate_size": 136}
CONFIG = ModelConfig.from_dict(TINY | _WIDTHS | _EXPERTS | {"num_nextn_predict_layers": 1, "torch_dtype": "bfloat16"})
"""Two MoE layers behind a dense one, eight experts, query compression, one MTP module."""


def make_tensors(config: ModelConfig, weights: str = "bf16", seed: int = 0) -> dict[str, np.ndarray]:
    """A checkpoint's tensors with random values, MTP copies included; ``weights`` is bf16, f32 or fp8."""
    rng = np.random.default_rng(seed)

    def values(name: str, shape: tuple[int, ...], quantised: bool) -> np.ndarray:
        drawn = rng.standard_normal(shape).astype(np.float32)
        if quantised:
            drawn[0, 0] = 30  # one outlier a tensor, so that its blocks' scales differ
        return drawn

    return tensors_of(config, weights, values)


def tensors_of(
    config: ModelConfig, weights: str, values: Callable[[str, tuple[int, ...], bool], np.ndarray]
) -> dict[str, np.ndarray]:
    """A checkpoint's tensors. values: gives float32 values by a tensor's name, its shape and whether it is kept in FP8."""
    tensors = {}
    names = TensorNames(config, abstract_parameters(config, weights="fp8"))
    for name, (path, piece) in names.places().items():
        if name.endswith(SCALE_SUFFIX):
            continue
        info = names.parameters[path]
        quantised = weights == "fp8" and info.quantised
        made = values(name, piece.shape(info.shape), quantised)
        if quantised:
            tensors[name], tensors[name + SCALE_SUFFIX] = quantise(made)
        else:
            is_f32 = weights == "f32" or name.endswith("e_score_correction_bias")
            tensors[name] = made if is_f32 else made.astype(ml_dtypes.bfloat16)
    return tensors | {name: tensors[original] for name, original in names.copies().items()}


def make_checkpoint(folder: Path, config: ModelConfig, tensors: dict, max_shard_bytes: int = 1 << 40) -> Path:
    """A Hugging Face folder of these tensors, with a stand-in for a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    specs = {name: TensorSpec(value.dtype, value.shape) for name, value in tensors.items()}
    write_folder(folder, specs, tensors.__getitem__, max_shard_bytes)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    (folder / "tokenizer.json").write_text('{"stand-in": true}')
    return folder


def place(source: Path | Checkpoint, mesh: str, **options) -> dict[str, jax.Array]:
    """The parameters of a checkpoint, or of its folder, on a mesh. options: of ``load``."""
    spec, checkpoint = MeshSpec.parse(mesh), open_checkpoint(source) if isinstance(source, Path) else source
    return load(checkpoint.config, checkpoint, spec.build(), Rules.for_mesh(spec), **options)


def assert_same(found: Mapping, expected: Mapping) -> None:
    """Assert that two sets of arrays have the same names and values."""
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(expected[name]), err_msg=name)
