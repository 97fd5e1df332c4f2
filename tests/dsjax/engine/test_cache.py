"""The cache on the devices: its bytes, and pages that are cleared without touching others."""

import dataclasses

import jax
import numpy as np
import pytest
from layouts import write_checkpoint

from dsjax import LLM
from dsjax.config import load_config
from dsjax.engine import cache as device_cache
from dsjax.engine.args import EngineArgs
from dsjax.engine.assembly import make_step
from dsjax.engine.buckets import Rectangle
from dsjax.errors import UserError
from sharding import MeshSpec

RANKS, PAGES, G = 2, 3, 2


def step_of(mesh="dp=1", mtp=False, **options):
    spec = MeshSpec.parse(mesh)
    args = EngineArgs(model="deepseek-v3", mesh=mesh, dtype="bfloat16", page_size=16, **options)
    return make_step(args, load_config("deepseek-v3"), spec, spec.build(), mtp=mtp)


@pytest.mark.parametrize(
    ("options", "bytes_of_a_token_and_layer"),
    [
        ({}, 1_152),
        ({"mla_prefill": "A_CC", "mla_decode": "A_CC"}, 1_152),
        ({"kv_dtype": "float32"}, 2_304),
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
    step = step_of("dp=2,tp=2", mla_prefill="CD", mla_decode="CD")
    step = dataclasses.replace(step, config=dataclasses.replace(step.config, num_hidden_layers=2))
    cache = device_cache.allocate(step, 3)
    for device in step.mesh.devices.flat:
        held = [
            shard.data.nbytes
            for array in cache.values()
            for shard in array.addressable_shards
            if shard.device == device
        ]
        assert sum(held) == 3 * device_cache.bytes_per_page(step)
    assert not any(np.asarray(array).any() for array in cache.values())
    assert device_cache.token_slots(step, 3) == 2 * 2 * 16  # page 0 of each rank is never used


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_marked_pages_become_zero_in_all_layers_and_no_other_page_changes(dtype):
    shapes = {"latent": (2, RANKS * PAGES, G, 4), "key": (2, RANKS * PAGES, G, 3, 2)}
    before = {name: np.arange(1, 1 + np.prod(shape)).reshape(shape).astype(dtype) for name, shape in shapes.items()}
    if dtype is np.float32:
        before["latent"][:, PAGES + 2] = np.nan
    marked = np.array([[False, True, False], [False, False, True]])
    after = jax.jit(device_cache.clear_pages)(before, marked)
    for name, array in before.items():
        expected = array.copy()
        expected[:, [1, PAGES + 2]] = 0
        np.testing.assert_array_equal(after[name], expected)
        assert after[name].dtype == dtype


@pytest.mark.parametrize("rows", [1, 8])
def test_a_decode_step_updates_the_cache_in_place(tmp_path, rows):
    """A copy of the cache would show as temporaries of its size; one row was such a case."""
    llm = LLM(str(write_checkpoint(tmp_path)), cache_tokens=65536, max_num_seqs=8, dtype="float32")
    try:
        programs, cache_bytes = llm.runner.programs, sum(array.nbytes for array in llm.runner.cache.values())
        memory = programs.step(programs.shapes(Rectangle(rows, 1), None)).memory_analysis()
        assert memory.alias_size_in_bytes >= cache_bytes
        assert memory.temp_size_in_bytes < cache_bytes / 4
    finally:
        llm.shutdown()
