"""Checkpoints: Hugging Face safetensors in, Orbax in and out, onto any mesh."""

from dsjax.checkpoint.errors import CheckpointError, CheckpointWarning
from dsjax.checkpoint.load import from_hf_tensors, load
from dsjax.checkpoint.source import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "CheckpointError", "CheckpointWarning", "from_hf_tensors", "load", "open_checkpoint"]
