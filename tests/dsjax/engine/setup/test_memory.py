"""What weights and steps need of a device's memory, before there is any."""

import dataclasses

import jax
import pytest
from layouts import TINY
from tiny_steps import limits_of, step_of, tiny

from dsjax.engine.device.buckets import Buckets
from dsjax.engine.device.cache import Pool
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.memory import beside_the_cache, check_device_memory
from dsjax.errors import UserError


def test_weights_that_a_pool_cannot_hold_are_refused_with_what_would_fit():
    args = EngineArgs(model="deepseek-v3", mesh="dp=2", dtype="bfloat16")
    step = step_of("dp=2")
    h20 = Pool(size=int(0.9 * 1.5e12), used=0, temporaries=0)
    check_device_memory(args, step, h20)
    with pytest.raises(
        UserError, match=r"take [\d.]+ GB on each device of dp=2, .* 540.0 GB free; .* --weights fp8. dsjax"
    ):
        check_device_memory(args, step, Pool(size=int(0.9 * 6e11), used=0, temporaries=0))
    with pytest.raises(UserError, match=r"a --gpu-memory-utilization above 0.92 \(it is 0.9\)"):
        check_device_memory(args, step, Pool(size=int(0.9 * 7.44e11), used=0, temporaries=0))


def test_a_step_needs_beside_the_cache_what_its_largest_program_does_whatever_the_cache_holds():
    step = tiny("dp=1")
    params = {path: jax.ShapeDtypeStruct(info.shape, info.storage_dtype) for path, info in step.table.infos.items()}
    params = {
        path: jax.ShapeDtypeStruct(
            a.shape, a.dtype, sharding=step.rules.sharding(step.mesh, info.logical_axes, a.shape)
        )
        for (path, info), a in zip(step.table.infos.items(), params.values(), strict=True)
    }
    buckets = Buckets.covering(4, 8, mixed=True)
    few, many = (
        beside_the_cache(step, params, dataclasses.replace(limits_of(1), pages_per_rank=pages), buckets, 0)
        for pages in (2, 9)
    )
    assert few == many > TINY["vocab_size"] * 4 * 2  # the counts of four slots are among it
