"""Open a checkpoint directory of either kind: its configuration, and its tensors under Hugging Face's names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from dsjax.checkpoint.check import settle_head, settle_mtp
from dsjax.checkpoint.errors import CheckpointError, CheckpointWarning, check_pulled
from dsjax.checkpoint.fp4_tensors import Found, Make, as_wanted, as_written, stored_format
from dsjax.checkpoint.orbax_form import MANIFEST_NAME, PARAMS_NAME, OrbaxTensors, read_manifest
from dsjax.checkpoint.quantise import FP8
from dsjax.checkpoint.safetensors import Tensor, TensorSpec
from dsjax.checkpoint.shards import INDEX_NAME, SINGLE_NAME, SafetensorsFolder
from dsjax.checkpoint.v4_tensors import V4Tensors, lost_names
from dsjax.config import ModelConfig, load_config
from dsjax.model.parameters import Weights

if TYPE_CHECKING:
    from dsjax.checkpoint.names import TensorNames


_OUTPUT_PROJECTIONS = ("self_attn.o_proj.weight", "self_attn.o_b_proj.weight")


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. Only headers have been read, and for a tied model the values of head and embedding."""

    directory: Path
    kind: Literal["hf", "orbax", "memory"]
    config: ModelConfig
    """The configuration adapted to the files: without MTP modules if they hold none, untied if the head differs."""
    tensors: Mapping[str, Tensor]
    """Hugging Face name → tensor."""
    specs: Mapping[str, TensorSpec]
    problems: tuple[str, ...] = ()
    """Damage found while opening; ``check_structure`` lists it with the rest."""
    unreadable: frozenset[str] = frozenset()
    """Tensors lost with damaged files."""
    copies: tuple[str, ...] = ()
    """Duplicate tensors in the Hugging Face source of an Orbax directory, each equal to one of ``tensors``."""
    narrow: Mapping[str, str] = field(default_factory=dict)
    """Path → narrower dtype in the Hugging Face source of an Orbax directory, for widened parameters."""
    release: Callable[[], None] = field(default=lambda: None, repr=False)
    """Drops the pages read so far from this process's resident memory."""

    @property
    def natural_weights(self) -> Weights:
        """Default weight format: ``f32`` if the checkpoint's matrices are float32, else ``bf16``."""
        dtypes = {spec.dtype.name for name, spec in self.specs.items() if name.endswith(_OUTPUT_PROJECTIONS)}
        return "f32" if dtypes == {"float32"} else "bf16"

    @property
    def stored_weights(self) -> Weights:
        """Lossless weight format: the checkpoint's own; ``f32`` for float16."""
        fp4 = stored_format(self.specs)
        if fp4 is not None:
            return fp4
        if any(spec.dtype == FP8 for spec in self.specs.values()):
            return "fp8"
        if any(spec.dtype == np.float16 for spec in self.specs.values()):
            return "f32"
        return self.natural_weights

    def in_format_of(self, names: TensorNames) -> Checkpoint:
        """Return the checkpoint with its tensors in the format of ``names``'s model, packed or not; itself if they already are."""
        found = Found(self.tensors, self.specs, self.problems, self.unreadable)
        wanted = as_wanted(names, found)
        return self if wanted is found else replace(self, **wanted._asdict())

    @property
    def bf16_experts(self) -> bool:
        """Whether every routed expert is in bf16, so that keeping bf16 is lossless."""
        dtypes = {spec.dtype.name for name, spec in self.specs.items() if ".mlp.experts." in name}
        return dtypes == {"bfloat16"}


def tensors_to_write(names: TensorNames, path: str, name: str, spec: TensorSpec) -> dict[str, tuple[TensorSpec, Make]]:
    """Return the tensors to write for one piece of a parameter (in most formats ``name`` alone), and how to make each from the piece."""
    if names.parameters[path].packed == 1:
        return {name: (spec, lambda read: read())}
    return as_written(name, names.parameters[f"{path.removesuffix('weight')}scale"].dtype, spec)


def open_checkpoint(directory: str | Path) -> Checkpoint:
    """Open a directory with ``config.json`` and safetensors, or one that ``dsjax convert`` made.

    Raises:
        CheckpointError: no such directory, or neither kind of checkpoint; the message says what was expected.
        ConfigError: the configuration is invalid or not supported.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(directory, ["is not a directory" if directory.exists() else "does not exist"])
    check_pulled(directory)
    if not (directory / "config.json").is_file():
        raise CheckpointError(directory, [f"has no config.json; {_EXPECTED_FILES}"])
    if (directory / MANIFEST_NAME).exists():
        return _open_orbax(directory)
    if not any(directory.glob("*.safetensors")) and not (directory / INDEX_NAME).exists():
        raise CheckpointError(directory, [f"has a config.json but no weights; {_EXPECTED_FILES}"])
    return _open_hf(directory)


def _open_orbax(directory: Path) -> Checkpoint:
    config = load_config(directory)
    manifest = read_manifest(directory, config)
    tensors = OrbaxTensors(directory, config, manifest)
    return Checkpoint(
        directory, "orbax", config, tensors, tensors.specs, copies=manifest.copies, narrow=manifest.narrow or {}
    )


def _open_hf(directory: Path) -> Checkpoint:
    folder = SafetensorsFolder(directory)
    config = load_config(directory)
    tensors = _TextPart(folder)
    unreadable = _text_names(folder.unreadable)
    if config.v4 is not None:
        tensors = V4Tensors.of(folder, folder.specs, config.num_hidden_layers)
        unreadable = lost_names(folder.unreadable, config.num_hidden_layers, config.n_routed_experts)
    vision = [name for name in folder if name.startswith(_VISION)]
    if vision:
        parts = sorted({name.split(".")[0] for name in vision})
        message = (
            f"checkpoint {directory}: {len(vision)} tensors of the vision part ({', '.join(parts)}) are ignored; dsjax serves only the "
            "text part and rejects images"
        )
        warnings.warn(message, CheckpointWarning, stacklevel=3)
    config = settle_mtp(directory, config, [*tensors, *unreadable])
    return Checkpoint(
        directory,
        "hf",
        settle_head(directory, config, tensors),
        tensors,
        tensors.specs,
        problems=tuple(folder.problems),
        unreadable=frozenset(unreadable),
        release=folder.release,
    )


_TEXT, _VISION = "language_model.", ("vision_tower.", "mm_projector.")
"""Prefixes of tensor names in a model with a vision part, such as Kimi-K2.5: of the text part, and of the vision part."""


def _text_names(names: Iterable[str]) -> dict[str, str]:
    """Return the text model's tensors: name → stored name."""
    return {name.removeprefix(_TEXT): name for name in names if not name.startswith(_VISION)}


class _TextPart(Mapping[str, np.ndarray]):
    """The text model's tensors in a folder, without the prefix of the text part."""

    def __init__(self, folder: SafetensorsFolder):
        self._folder = folder
        self._names = _text_names(folder)

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Shape and dtype of every tensor."""
        specs = self._folder.specs
        return {name: specs[stored] for name, stored in self._names.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        return self._folder[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


_EXPECTED_FILES = (
    f"expected config.json with {SINGLE_NAME}, with shards and {INDEX_NAME}, or with {MANIFEST_NAME} and {PARAMS_NAME}/ "
    "(the Orbax form of `dsjax convert`)"
)
