"""Random parameters for benchmarks and tests: the same values for a seed on every mesh and platform."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from dsjax.checkpoint.names import scaled_weight
from dsjax.checkpoint.place import Region, place
from dsjax.checkpoint.quantise import FP8, FP8_MAX
from dsjax.config import ModelConfig
from dsjax.model.parameters import ParameterInfo, Weights
from dsjax.model.transformer import abstract_parameters
from sharding.rules import Rules

_STACKED = ("layers", "experts")


def random_parameters(
    config: ModelConfig,
    mesh: Mesh,
    rules: Rules,
    *,
    weights: Weights = "bf16",
    seed: int = 0,
    num_physical: int | None = None,
    mtp: bool = True,
) -> dict[str, jax.Array]:
    """Parameters as ``load`` would place them, drawn at random: matrices normal with variance 1 / fan-in, norms 1, biases 0.

    Each layer's and expert's matrix is drawn by a generator of its own (from seed, path, layer and expert), so that a
    device draws what it holds and nothing depends on the mesh. FP8 values are normal, their scales 1 / √fan-in.
    """
    parameters = abstract_parameters(
        config, weights=weights, platform=mesh.devices.flat[0].platform, num_physical=num_physical, mtp=mtp
    )
    parameters = {path: info for path, info in parameters.items() if info.init != "derived"}

    def fill(out: np.ndarray, path: str, region: Region) -> None:
        info = parameters[path]
        fan_in = _fan_in(parameters, path)
        stacked = sum(name in _STACKED for name in info.logical_axes)
        values = out.view(info.dtype)
        for place_in_out in np.ndindex(*out.shape[:stacked]):
            at = [part.start + offset for part, offset in zip(region, place_in_out, strict=False)]
            values[place_in_out] = _matrix(info, path, at, fan_in, seed)[tuple(region[stacked:])]

    return place(parameters, mesh, rules, fill)


def _matrix(info: ParameterInfo, path: str, at: Sequence[int], fan_in: int, seed: int) -> np.ndarray:
    """One layer's or expert's values of a parameter, float32."""
    shape = info.shape[len(at) :]
    if info.init in ("ones", "zeros"):
        return np.full(shape, 1 if info.init == "ones" else 0, np.float32)
    if info.init == "scale":
        return np.full(shape, 1 / math.sqrt(fan_in), np.float32)
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, zlib.crc32(path.encode()), *at])))
    values = generator.standard_normal(shape, np.float32)
    return np.clip(values, -FP8_MAX, FP8_MAX) if info.dtype == FP8 else values / np.float32(math.sqrt(fan_in))


def _fan_in(parameters: Mapping[str, ParameterInfo], path: str) -> int:
    """Width of what a matrix (or the one that a parameter scales) is multiplied with; of an embedding, its own width."""
    info = parameters[scaled_weight(path, parameters) or path]
    shape = [size for size, name in zip(info.shape, info.logical_axes, strict=True) if name not in _STACKED]
    return shape[-1] if path == "embed.weight" else shape[0]
