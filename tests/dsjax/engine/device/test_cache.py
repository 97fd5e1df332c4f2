"""The cache on the devices: its bytes, how many pages fit, steps that update it in place. Also tests `device/programs.py`."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tiny_steps import PAGES, RANKS, limits_of, step_of, tiny

from dsjax.engine.device import cache as device_cache
from dsjax.engine.device import device_state
from dsjax.engine.device.buckets import Rectangle
from dsjax.engine.device.cache import Pool
from dsjax.engine.device.programs import Programs, RepeatedPut
from dsjax.errors import UserError
from sharding import MeshSpec
from sharding.arrays import put


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
    with pytest.raises(UserError, match=r"room for 1 pages .* expected at least 2.*--kv-cache-dtype fp8"):
        device_cache.pages_that_fit(step, 1)


def test_what_is_allocated_is_what_was_counted():
    step, limits = tiny("dp=2,tp=2", mla_prefill="CD", mla_decode="CD"), limits_of(RANKS)
    cache = Programs(step, {}, device_state.describe(step, limits), limits).allocate().cache
    shards = [shard for array in cache.values() for shard in array.addressable_shards]
    for device in step.mesh.devices.flat:
        held = sum(shard.data.nbytes for shard in shards if shard.device == device)
        assert held == PAGES * device_cache.bytes_per_page(step)
    assert not any(np.asarray(array).any() for array in cache.values())


@pytest.mark.parametrize("rows", [1, 8])
def test_a_decode_step_updates_the_cache_in_place(rows):
    """A copy of the cache would show as temporaries of its size; one row was such a case."""
    step, limits = tiny("dp=1"), dataclasses.replace(limits_of(1), max_rows_decode=8, pages_per_rank=32768)
    state = device_state.describe(step, limits)
    programs = Programs(step, step.abstract_parameters(), state, limits)
    memory = programs.get("step", programs.shape(Rectangle(rows, 1), None), False).memory_analysis()
    size = lambda arrays: sum(np.prod(array.shape) * array.dtype.itemsize for array in jax.tree.leaves(arrays))  # noqa: E731
    assert memory.alias_size_in_bytes >= size(state)
    assert memory.temp_size_in_bytes < size(state.cache) / 4


def test_the_cache_of_an_accelerator_gets_what_weights_and_steps_leave_of_the_pool():
    step = tiny("dp=1")
    page = device_cache.bytes_per_page(step)
    pool = Pool(size=1000 * page, used=600 * page, temporaries=100 * page + 1)
    assert device_cache.pages_that_fit(step, 10**6, pool) == 299
    assert device_cache.pages_that_fit(step, 7, pool) == 7
    full = dataclasses.replace(pool, used=899 * page)
    with pytest.raises(UserError, match=r"room for 0 pages .* step's temporaries .* a higher --gpu-memory-utilization"):
        device_cache.pages_that_fit(step, 7, full)


@pytest.mark.parametrize("mesh", ["dp=1", "dp=4", "dp=2,tp=2"])
def test_what_is_put_again_and_again_lies_where_put_has_it(mesh):
    spec = MeshSpec.parse(mesh)
    rows = NamedSharding(spec.arrange(jax.devices()[: spec.num_devices]), P(spec.batch_axes))
    put_rows, rng = RepeatedPut(rows), np.random.default_rng(0)
    for shape in [(4, 3), (8, 2), (4, 3), (4, 0), (4, 3), (4, 0)]:
        values = rng.integers(-9, 9, shape, np.int32)
        found, expected = both = put_rows(values), put(values, rows)
        np.testing.assert_array_equal(found, values)
        assert (found.aval, found.sharding, found.committed) == (expected.aval, rows, True)
        held = [[(one.device, one.index, one.data.tolist()) for one in array.addressable_shards] for array in both]
        assert held[0] == held[1]


def test_values_of_a_type_that_jax_narrows_are_narrowed_each_time():
    put_rows = RepeatedPut(NamedSharding(MeshSpec.parse("dp=2").arrange(jax.devices()[:2]), P("dp")))
    for _ in range(3):
        assert put_rows(np.arange(4)).dtype == np.int32
