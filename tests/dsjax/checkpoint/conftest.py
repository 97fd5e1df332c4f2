"""Checkpoints of the tiny model with odd sizes, which several files read."""

import dataclasses
import functools

import pytest
from odd_checkpoints import CONFIG, make_checkpoint, make_tensors

from dsjax.config import QuantizationConfig


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """``checkpoints("bf16" | "f32" | "fp8")`` → (directory, tensors), made once."""

    @functools.cache
    def of(weights: str):
        config = dataclasses.replace(CONFIG, quantization=QuantizationConfig() if weights == "fp8" else None)
        tensors = make_tensors(CONFIG, weights)
        return make_checkpoint(tmp_path_factory.mktemp(weights) / "model", config, tensors), tensors

    return of
