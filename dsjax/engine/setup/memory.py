"""Whether a model fits the memory that is there, and what a step takes of it beside weights and cache."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import jax
from jaxtyping import Array

from dsjax.engine.contract.executor import ExecutorLimits
from dsjax.engine.device import device_state
from dsjax.engine.device.buckets import Buckets
from dsjax.engine.device.cache import Pool
from dsjax.engine.device.process import available_bytes
from dsjax.engine.device.programs import Programs
from dsjax.engine.setup.args import EngineArgs
from dsjax.errors import UserError
from dsjax.model.parameters import device_bytes
from dsjax.model.step import ModelStep


def check_host_memory(args: EngineArgs, step: ModelStep) -> None:
    """Refuse weights that the host's memory cannot hold: the kernel would end the process while they are read."""
    available = available_bytes()
    needed = weight_bytes(step) * len(step.mesh.local_devices)
    if available is not None and needed > available:
        raise UserError(
            f"the weights of {args.model} take {needed / 1e9:,.1f} GB on {len(step.mesh.local_devices)} emulated devices, and this "
            f"host has {available / 1e9:,.1f} GB of memory available; use a mesh of fewer devices or a smaller model, or look at "
            f"this one with dsjax dryrun --model {args.model} --mesh {step.spec}"
        )


def check_device_memory(args: EngineArgs, step: ModelStep, pool: Pool | None) -> None:
    """Refuse weights that the pool of a device cannot hold, before they are read. A pool that is not known holds anything.

    Raises:
        UserError: with what the weights take, and what would fit.
    """
    needed = weight_bytes(step)
    if pool is None or needed <= pool.room:
        return
    ways = ["use a mesh of more devices"] + (["--weights fp8"] if args.weights != "fp8" else [])
    whole = pool.size / args.gpu_memory_utilization
    if needed < 0.95 * whole:
        ways.append(f"a --gpu-memory-utilization above {needed / whole:.2f} (it is {args.gpu_memory_utilization:g})")
    raise UserError(
        f"the weights of {args.model} take {needed / 1e9:,.1f} GB on each device of {step.spec}, and the pool of a device has "
        f"{pool.room / 1e9:,.1f} GB of {pool.size / 1e9:,.1f} GB free; {', or '.join(ways)}. "
        "dsjax dryrun --fit says what a mesh has room for"
    )


def weight_bytes(step: ModelStep) -> int:
    """Bytes of all weights on one device."""
    found = 0
    for info in step.table.infos.values():
        sharding = step.rules.sharding(step.mesh, info.logical_axes, info.shape)
        found += math.prod(sharding.shard_shape(info.shape)) * info.dtype.itemsize
    return found


def beside_the_cache(
    step: ModelStep, params: Mapping[str, Array], limits: ExecutorLimits, buckets: Buckets, num_drafts: int
) -> int:
    """Bytes of a device that the launch with most tokens needs beside weights and cache, as its compiler counts them.

    They are the program's temporaries, its results, of which two steps in flight have two each, and what the state has beside the
    cache. ``limits`` may have any number of pages: none of this depends on it.
    """
    state = device_state.describe(step, limits, num_drafts)
    programs = Programs(step, params, state, limits)
    shapes = [programs.shape(decode, prefill) for decode, prefill, _ in buckets.shapes()]
    largest = max(shapes, key=lambda shape: shape.tokens)
    stats = programs.lower_step(largest).compile().memory_analysis()
    arrays = {str(index): array for index, array in enumerate(jax.tree.leaves(replace(state, cache={})))}
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.temp_size_in_bytes + 2 * results + sum(device_bytes(arrays).values())
