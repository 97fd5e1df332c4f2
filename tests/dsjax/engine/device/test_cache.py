"""The cache on the devices: its bytes, and pages that are cleared and copied without touching others."""

import dataclasses
import os
from functools import partial

import jax
import numpy as np
import pytest
from layouts import TINY, write_checkpoint

from dsjax import LLM
from dsjax.config import ModelConfig, load_config
from dsjax.engine.contract.executor import ExecutorLimits
from dsjax.engine.device import cache as device_cache
from dsjax.engine.device import device_state
from dsjax.engine.device.buckets import Buckets, Rectangle
from dsjax.engine.device.cache import Pool
from dsjax.engine.device.process import (
    OutOfDeviceMemoryError,
    available_bytes,
    explained_out_of_memory,
    size_memory_pool,
)
from dsjax.engine.device.programs import Programs
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.assembly import make_step
from dsjax.engine.setup.sizes import beside_the_cache, check_device_memory
from dsjax.errors import UserError
from sharding import MeshSpec

RANKS, PAGES, G = 2, 3, 2


def tiny(mesh, **options):
    """The step of a tiny model."""
    spec = MeshSpec.parse(mesh)
    args = EngineArgs(mesh=mesh, dtype="float32", page_size=G, **options)
    return make_step(args, ModelConfig.from_dict(TINY), spec, spec.build())


def limits_of(ranks):
    return ExecutorLimits(4, 4, 8, G, PAGES, ranks, 8, TINY["vocab_size"])


def step_of(mesh="dp=1", mtp=False, **options):
    spec = MeshSpec.parse(mesh)
    args = EngineArgs(model="deepseek-v3", mesh=mesh, dtype="bfloat16", page_size=16, **options)
    return make_step(args, load_config("deepseek-v3"), spec, spec.build(), mtp=mtp)


@pytest.mark.parametrize(
    ("options", "bytes_of_a_token_and_layer"),
    [
        ({}, 1_152),
        ({"mla_prefill": "A_CC", "mla_decode": "A_CC"}, 1_152),
        ({"kv_cache_dtype": "float32"}, 2_304),
        ({"kv_cache_dtype": "fp8"}, 656),  # 512 values, four scales, 64 rotary values in bf16: as in FlashMLA's cache
        ({"mla_prefill": "CD", "mla_decode": "CD"}, 81_920),
        ({"mla_prefill": "CD", "mla_decode": "CD", "mesh": "tp=8"}, 10_240),  # heads over eight devices
        ({"mesh": "tp=8"}, 1_152),  # every head needs the whole latent
    ],
)
def test_a_page_of_v3_has_the_documented_bytes_on_a_device(options, bytes_of_a_token_and_layer):
    assert device_cache.bytes_per_page(step_of(**options)) == 61 * 16 * bytes_of_a_token_and_layer


@pytest.mark.parametrize(("mtp", "bytes_of_a_token"), [(False, 70_272), (True, 71_424)])
def test_a_token_of_v3_has_a_layer_more_with_the_mtp_module(mtp, bytes_of_a_token):
    step = step_of("dp=2", mtp=mtp)
    assert device_cache.bytes_per_page(step) == 16 * bytes_of_a_token
    described = sum(np.prod(array.shape) * array.dtype.itemsize for array in device_cache.describe(step, 3).values())
    assert described == 2 * 3 * device_cache.bytes_per_page(step)


def test_the_host_s_share_bounds_the_pages_and_too_few_are_an_error():
    step = step_of()
    assert device_cache.pages_that_fit(step, 7) == 7
    most = device_cache.pages_that_fit(step, 10**9)
    assert most * device_cache.bytes_per_page(step) <= device_cache.HOST_CACHE_BYTES
    assert (most + 1) * device_cache.bytes_per_page(step) > device_cache.HOST_CACHE_BYTES
    with pytest.raises(UserError, match=r"room for 1 pages .* expected at least 2"):
        device_cache.pages_that_fit(step, 1)


def test_what_is_allocated_is_what_was_counted():
    step, limits = tiny("dp=2,tp=2", mla_prefill="CD", mla_decode="CD"), limits_of(RANKS)
    cache = Programs(step, {}, device_state.describe(step, limits), limits).allocate().cache
    for device in step.mesh.devices.flat:
        held = [
            shard.data.nbytes
            for array in cache.values()
            for shard in array.addressable_shards
            if shard.device == device
        ]
        assert sum(held) == PAGES * device_cache.bytes_per_page(step)
    assert not any(np.asarray(array).any() for array in cache.values())
    assert device_cache.token_slots(step, PAGES) == RANKS * (PAGES - 1) * G  # page 0 of each rank is never used


def filled_state(step, dtype=np.float32):
    """A state whose cache counts up from 1, and whose MTP entries are all there."""
    described = device_state.describe(step, limits_of(step.spec.dp_size), 1)
    host = {
        name: np.arange(1, 1 + np.prod(array.shape)).reshape(array.shape).astype(dtype)
        for name, array in described.cache.items()
    }
    cache = {name: jax.device_put(array, described.cache[name].sharding) for name, array in host.items()}
    filled = jax.device_put(np.ones(described.filled.shape, bool), described.filled.sharding)
    rest = jax.tree.map(
        lambda one: jax.device_put(np.zeros(one.shape, one.dtype), one.sharding),
        dataclasses.replace(described, cache={}, filled=None),
    )
    return host, dataclasses.replace(rest, cache=cache, filled=filled)


@pytest.mark.parametrize(("layout", "form"), [("dp=2", "A_CC"), ("dp=2,tp=2", "CD")])
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_marked_pages_become_zero_in_all_layers_and_no_other_page_changes(layout, form, dtype):
    step = tiny(layout, mla_prefill=form, mla_decode=form)
    before, state = filled_state(step, dtype)
    if dtype is np.float32:
        name = next(iter(before))
        before[name][:, PAGES + 2] = np.nan
        state.cache[name] = jax.device_put(before[name], state.cache[name].sharding)
    marked = np.array([[False, True, False], [False, False, True]])
    after = jax.jit(partial(device_state.clear_pages, step))(state, marked)
    for name, array in before.items():
        expected = array.copy()
        expected[:, [1, PAGES + 2]] = 0
        np.testing.assert_array_equal(after.cache[name], expected)
        assert after.cache[name].dtype == dtype
    np.testing.assert_array_equal(after.filled, ~np.repeat(marked.reshape(-1, 1), G, axis=1))


def test_pages_are_copied_within_their_rank_in_all_layers_with_what_the_mtp_module_has_of_them():
    step = tiny("dp=2,tp=2", mla_prefill="CD", mla_decode="CD")
    before, state = filled_state(step)
    filled = np.ones((RANKS * PAGES, G), bool)
    filled[[1, PAGES + 2]] = False
    state = dataclasses.replace(state, filled=jax.device_put(filled, state.filled.sharding))
    pairs = np.array([[[1, 2], [0, 0]], [[2, 1], [0, 0]]], np.int32)
    after = jax.jit(partial(device_state.copy_pages, step))(state, pairs)
    for name, array in before.items():
        expected = array.copy()
        expected[:, 2], expected[:, PAGES + 1] = array[:, 1], array[:, PAGES + 2]
        np.testing.assert_array_equal(after.cache[name], expected)
    filled[[2, PAGES + 1]] = False
    np.testing.assert_array_equal(after.filled, filled)


@pytest.mark.parametrize("rows", [1, 8])
def test_a_decode_step_updates_the_cache_in_place(tmp_path, rows):
    """A copy of the cache would show as temporaries of its size; one row was such a case."""
    llm = LLM(str(write_checkpoint(tmp_path)), cache_tokens=65536, max_num_seqs=8, dtype="float32")
    try:
        programs, cache_bytes = llm.executor.programs, sum(array.nbytes for array in llm.executor.state.cache.values())
        memory = programs.step(programs.shape(Rectangle(rows, 1), None)).memory_analysis()
        assert memory.alias_size_in_bytes >= sum(array.nbytes for array in jax.tree.leaves(llm.executor.state))
        assert memory.temp_size_in_bytes < cache_bytes / 4
    finally:
        llm.shutdown()


def test_a_container_s_limit_counts_where_it_is_less_than_the_machine_s_memory(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 4000 kB\n")
    assert available_bytes(tmp_path, tmp_path) == 4_096_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path, tmp_path) == 4_096_000
    (tmp_path / "memory.max").write_text("1000000\n")
    assert available_bytes(tmp_path, tmp_path) == 1_000_000
    assert available_bytes(tmp_path / "none", tmp_path / "none") is None


def test_the_cache_of_an_accelerator_gets_what_weights_and_steps_leave_of_the_pool():
    step = tiny("dp=1")
    page = device_cache.bytes_per_page(step)
    pool = Pool(size=1000 * page, used=600 * page, temporaries=100 * page + 1)
    assert device_cache.pages_that_fit(step, 10**6, pool) == 299
    assert device_cache.pages_that_fit(step, 7, pool) == 7
    full = dataclasses.replace(pool, used=899 * page)
    with pytest.raises(UserError, match=r"room for 0 pages .* step's temporaries .* a higher --gpu-memory-utilization"):
        device_cache.pages_that_fit(step, 7, full)


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


def test_the_pool_is_sized_before_jax_starts_and_not_after(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    size_memory_pool(0.8)  # the backend of the tests runs
    assert os.environ.get("XLA_CLIENT_MEM_FRACTION") is None
    monkeypatch.setattr("dsjax.engine.device.process.backend_is_running", lambda: False)
    size_memory_pool(0.8)
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.8"
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ  # JAX refuses both


def test_running_out_of_memory_says_while_doing_what_and_what_to_do():
    with (
        pytest.raises(
            OutOfDeviceMemoryError, match=r"no memory left for 1234 bytes while a step was launched.*; give less"
        ),
        explained_out_of_memory("a step was launched", "give less"),
    ):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1234 bytes.")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), explained_out_of_memory("a step", "give less"):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")


def test_what_fails_while_a_program_is_started_is_the_same_error_as_what_fails_later():
    # JAX's fast way to call a program raises a ValueError with XLA's text: a lost collective would end the group as a wrong command does.
    with pytest.raises(jax.errors.JaxRuntimeError, match="Gloo"), explained_out_of_memory("a step", "give less"):
        raise ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer")
    with pytest.raises(OutOfDeviceMemoryError), explained_out_of_memory("a step", "give less"):
        raise ValueError("RESOURCE_EXHAUSTED: Out of memory allocating 12 bytes")
    for error in (ValueError("a wrong shape"), OutOfDeviceMemoryError("RESOURCE_EXHAUSTED: told before")):
        with pytest.raises(ValueError, match=r"shape|told") as found, explained_out_of_memory("a step", "give less"):
            raise error
        assert found.value is error
