"""From options to a `Setting`, by the engine's own way of choosing number formats."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax

from dsjax.bench.modules.options import ModelOptions
from dsjax.bench.modules.setting import Setting
from dsjax.checkpoint.hub import resolve
from dsjax.checkpoint.source import open_checkpoint
from dsjax.config import ModelConfig, load_config
from dsjax.engine.device.process import enable_compile_cache, keep_freed_memory
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.assembly import make_step, weights_format
from dsjax.errors import UserError
from dsjax.model.transformer import parameter_table
from sharding import MeshSpec

PAGE_TABLE_POSITIONS = 4096


def make_setting(options: ModelOptions) -> Setting:
    """The setting that the options describe, on this process's first device."""
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
        weights="fp8" if options.weights == "fp8" else "auto",
        activation_scheme=options.activation_scheme,
        kv_cache_dtype=options.kv_cache_dtype,
        kernels=options.kernels,
        page_size=options.page_size,
    )
    step = make_step(args, config, spec, mesh)
    weights = options.weights
    if weights == "auto":
        weights = weights_format(args, config, step.dtype, _bf16_experts(options.model, config))
    table = parameter_table(config, weights=weights, platform=mesh.devices.flat[0].platform, mtp=False)
    return Setting(dataclasses.replace(step, table=table), weights, options.seed, length)


def _bf16_experts(model: str, config: ModelConfig) -> bool | None:
    """What a checkpoint beside the configuration has; None where there is only a configuration."""
    if model != "demo" and not Path(model).is_dir():
        return None
    try:
        return open_checkpoint(resolve(model)).bf16_experts
    except UserError:
        return None
