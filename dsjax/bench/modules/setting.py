"""`Setting`: model, number formats and device, shared by all modules of a run; `Ceilings`: peak rates of a device."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsjax.bench.modules.options import ModelOptions
from dsjax.bench.modules.timing import TOO_NOISY, Budget, PreparedCase, device_loop
from dsjax.checkpoint.hub import resolve
from dsjax.checkpoint.source import open_checkpoint
from dsjax.config import ModelConfig, load_config
from dsjax.config.weights import SERVED
from dsjax.engine.device.process import available_bytes, enable_compile_cache, keep_freed_memory
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.assembly import make_step, weights_format
from dsjax.errors import UserError
from dsjax.hardware import bundled_hardware, load_hardware
from dsjax.hardware.this_machine import cpu_name, host_memory
from dsjax.model.parameter_table import parameter_table
from dsjax.model.parameters import Declaration, Multiply, ParameterInfo, ParameterTable, Weights
from dsjax.model.step import ModelStep
from sharding import MeshSpec

WORKING_SET = 512 << 20
"""Maximum bytes of weights read between two uses of the same one: more than any device's caches, as in a large model."""
MOST_LAYERS = 64
_BLOCK = 1 << 20

PAGE_TABLE_POSITIONS = 4096


@dataclass(frozen=True, eq=False)
class Setting:
    """The benchmarked step of a model on one device, made as the engine makes it but without weights."""

    step: ModelStep
    weights: Weights  # weight format
    args: EngineArgs
    seed: int = 0  # of weights, tokens and routing
    max_model_len: int = 4096  # positions that page tables cover

    @property
    def config(self) -> ModelConfig:
        """The model's configuration."""
        return self.step.config

    @property
    def dtype(self) -> np.dtype:
        """The compute dtype."""
        return jnp.dtype(self.step.dtype)

    @property
    def platform(self) -> str:
        """`cpu`, `gpu` or `tpu`."""
        return self.step.mesh.devices.flat[0].platform

    @property
    def spec(self) -> MeshSpec:
        """The mesh of one device."""
        return self.step.spec

    @property
    def multiply(self) -> Multiply:
        """A layer's product with one of its matrices, as the step computes it on slices of a scanned stack."""
        return self.step.products.multiply(jnp.int32(0))

    def declare(self, depth: int) -> Declaration:
        """Return the parameter declaration of `depth` layers."""
        return Declaration(self.weights, self.platform, depth)

    def working_set(self) -> int:
        """Return the bytes of weights read between two uses of one: the whole model's, as in a step, at most `WORKING_SET`."""
        return min(WORKING_SET, sum(info.nbytes for info in self.step.table.infos.values()))

    def depth(self, layer_bytes: int, in_model: int) -> int:
        """Return how many layers of a module to cycle through, so that caches hold no more of their weights than in a step.

        A step returns to a layer's weights after reading all others; a module alone would return to them at once. Use enough
        layers to read as many bytes in between (at least two if the model scans over several: XLA compiles a scan of one
        layer away, along with its slices of the stack).
        """
        wanted = min(MOST_LAYERS, -(-self.working_set() // max(layer_bytes, 1)))
        return max(wanted, min(2, in_model))

    def random(self, shape: tuple[int, ...], scale: float = 1.0) -> jax.Array:
        """Normal values in the compute dtype."""
        return jnp.asarray(np.random.default_rng(self.seed).standard_normal(shape, np.float32) * scale, self.dtype)


@dataclass(frozen=True, eq=False)
class LayerStack:
    """Weights of `depth` layers of a module: their parameter table, and random `values`."""

    table: ParameterTable
    depth: int

    @classmethod
    def of(
        cls, setting: Setting, make: Callable[[Declaration], nnx.Module], in_model: int, depth: int | None = None
    ) -> LayerStack:
        """Build `make(declare)` with `depth` layers; None: as many as the setting's working set needs."""
        if depth is None:
            one = ParameterTable.of(make(setting.declare(1)))
            depth = setting.depth(_nbytes(one.infos), in_model)
        return cls(ParameterTable.of(make(setting.declare(depth))), depth)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return _nbytes(self.table.infos)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer."""
        return self.nbytes // self.depth

    def values(self, seed: int) -> dict[str, jax.Array]:
        """Random parameters on the device."""
        return {path: random_parameter(info, seed) for path, info in self.table.infos.items()}

    def layer(self, params: Mapping[str, jax.Array], index: jax.Array, skip: str | None = None) -> Any:
        """Return the module of one layer, with weights sliced out of the stack as in a scan over layers.

        skip: parameters whose path contains this stay whole stacks, as experts do in the step.
        """
        chosen = {
            path: array if skip and skip in path else jax.lax.dynamic_index_in_dim(array, index, keepdims=False)
            for path, array in params.items()
        }
        return self.table.bind(chosen)


def random_parameter(info: ParameterInfo, seed: int) -> jax.Array:
    """Return values of about the magnitude of trained ones, in the storage dtype: a repeated block of random numbers.

    Times do not depend on values, and drawing billions of them would take longer than timing.
    """
    fan_in = info.shape[-2] if len(info.shape) > 1 else 1
    rng, count = np.random.default_rng(seed), min(_BLOCK, math.prod(info.shape))
    if info.init == "packed":
        block = rng.integers(0, 256, count, np.uint8)
    elif info.init == "scale" and info.dtype.itemsize == 1:  # of a packed format: 1 in e4m3, 2^-7 in e8m0
        block = np.full(1, 1.0 if info.dtype != np.uint8 else 120)
    elif info.init in ("ones", "scale", "zeros"):
        block = np.full(1, {"ones": 1.0, "zeros": 0.0, "scale": 1 / math.sqrt(128 * fan_in)}[info.init], np.float32)
    else:
        # FP8: the scale parameter carries the magnitude.
        scale = 1.0 if info.dtype.itemsize == 1 and info.init == "normal" else 1 / math.sqrt(fan_in)
        block = rng.standard_normal(count, np.float32) * np.float32(scale)
    stored = np.resize(block.astype(info.dtype), info.shape)
    return jax.device_put(stored.view(info.storage_dtype))


def free_memory(device: jax.Device) -> int:
    """Return the free bytes of a device; on the CPU platform, of the host."""
    stats = None if device.platform == "cpu" else device.memory_stats()
    if stats is not None:
        return int(stats["bytes_limit"]) - int(stats["bytes_in_use"])
    return available_bytes() or host_memory() // 2


def with_mesh(setting: Setting, spec: MeshSpec) -> Setting:
    """Put the model on another mesh."""
    return dataclasses.replace(setting, step=dataclasses.replace(setting.step, spec=spec, mesh=spec.build()))


def _nbytes(infos: Mapping[str, ParameterInfo]) -> int:
    return sum(info.nbytes for info in infos.values())


def make_setting(options: ModelOptions) -> Setting:
    """Return the setting that the options describe, on this process's first device."""
    config = load_config(options.model)
    length = options.max_model_len or min(config.max_position_embeddings, PAGE_TABLE_POSITIONS)
    if length > config.max_position_embeddings:
        raise UserError(
            f"--max-model-len is {length}, but the model has {config.max_position_embeddings} positions; lower it"
        )
    spec = MeshSpec.parse("dp=1")
    mesh = spec.build(jax.local_devices() if jax.distributed.is_initialized() else None)
    enable_compile_cache()
    if mesh.devices.flat[0].platform == "cpu":
        keep_freed_memory()
    args = EngineArgs(
        model=options.model,
        dtype=options.dtype,
        weights=options.weights if options.weights in SERVED else "auto",
        activation_scheme=options.activation_scheme,
        kv_cache_dtype=options.kv_cache_dtype,
        kernels=options.kernels,
        page_size=options.page_size,
    )
    step = make_step(args, config, spec, mesh)
    weights = options.weights
    if weights == "auto":
        weights = weights_format(args, config, step.dtype, _bf16_experts(options.model))
    table = parameter_table(config, weights=weights, platform=mesh.devices.flat[0].platform, mtp=False)
    return Setting(dataclasses.replace(step, table=table), weights, args, options.seed, length)


def _bf16_experts(model: str) -> bool | None:
    """Return `bf16_experts` of the model's checkpoint; None if there is only a configuration."""
    if model != "demo" and not Path(model).is_dir():
        return None
    try:
        return open_checkpoint(resolve(model)).bf16_experts
    except UserError:
        return None


_COPY_BYTES = 256 << 20
_SIDE = 2048


@dataclass(frozen=True)
class Ceilings:
    """Peak bytes and FLOPs per second, which no module can exceed, and their source. The JSON has the same fields."""

    bytes_per_s: float
    flops_per_s: float
    source: str


@dataclass(frozen=True)
class Device:
    """The measured device: its name, as the planner compares it; JAX's platform; memory; its file in `configs/hardware`, if any.

    The JSON has the same fields.
    """

    name: str
    platform: str
    memory_bytes: int
    hardware: str | None
    count: int

    @classmethod
    def of(cls, device: jax.Device) -> Device:
        """The device that JAX runs on."""
        name = cpu_name() if device.platform == "cpu" else device.device_kind
        stats = None if device.platform == "cpu" else device.memory_stats()
        memory = int(stats["bytes_limit"]) if stats else host_memory()
        count = 1 if device.platform == "cpu" else len(jax.devices())
        return cls(name, device.platform, memory, hardware_of(name), count)


def hardware_of(name: str) -> str | None:
    """Return the bundled hardware whose key is a word of a device's name (`NVIDIA H200` → `h200`); None if there is none."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    return next((key for key in bundled_hardware() if key in words), None)


def find_ceilings(setting: Setting, device: Device, hardware: str | None, budget: Budget) -> Ceilings:
    """Read the ceilings from a file of `configs/hardware`, given or recognised by name; else measure them."""
    key = hardware or device.hardware
    if key is not None:
        chip = load_hardware(key)
        return Ceilings(chip.memory_bandwidth, chip.bf16_flops, f"configs/hardware: {chip.name}, vendor's figures")
    size = min(_COPY_BYTES, free_memory(setting.step.mesh.devices.flat[0]) // 8) // 4
    matrix = setting.random((_SIDE, _SIDE), _SIDE**-0.5)
    copy = _seconds(device_loop(lambda _, i, x: x + 1, None, jnp.zeros(size, jnp.float32)), budget)
    product = _seconds(device_loop(lambda a, i, x: a @ x, matrix, matrix + 0), budget)
    said = f"a copy of {_COPY_BYTES >> 20} MiB, a product of {_SIDE}² {setting.dtype.name} matrices"
    return Ceilings(2 * 4 * size / copy, 2 * _SIDE**3 / product, f"measured in this run: {said}")


def _seconds(prepared: PreparedCase, budget: Budget) -> float:
    prepared.warm_up()
    times = prepared.take(budget)
    if times is None:
        raise UserError(f"the device's ceilings cannot be measured: {TOO_NOISY}, or name its file with --hardware")
    return times.median
