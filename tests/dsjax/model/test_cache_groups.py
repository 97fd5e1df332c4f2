"""What a cache keeps of a token, in each layout, and the bytes of its pages."""

import ml_dtypes
import numpy as np
import pytest

from dsjax.config import load_config
from dsjax.errors import UserError
from dsjax.model.cache_groups import BF16, CacheGroup, cache_groups
from sharding import fp8

V3, V32 = load_config("deepseek-v3"), load_config("deepseek-v3.2")


def test_a_page_takes_its_entries_in_all_layers_of_the_group():
    arrays = {"key": ((4, 6), np.dtype(np.float32)), "scale": ((4,), np.dtype(np.int8))}
    group = CacheGroup("two", (0, 5, 6), 16, arrays, by_head=True)
    assert (group.entry_bytes, group.page_bytes) == (100, 100 * 16 * 3)
    assert group.device_page_bytes(tp=4) * 4 == group.page_bytes


@pytest.mark.parametrize("layout", ["split", "joined", "decompressed"])
def test_a_token_of_v3_takes_the_published_bytes(layout):
    (group,) = cache_groups(V3, range(61), BF16, layout=layout)
    assert group.page_bytes == 61 * {"decompressed": 81_920}.get(layout, 1_152)
    assert group.device_page_bytes(tp=8) == (61 * 10_240 if layout == "decompressed" else group.page_bytes)


def test_v32_keeps_an_index_key_beside_the_latent_and_refuses_keys_and_values_of_each_head():
    latents, keys = cache_groups(V32, range(61), BF16, entries=16)
    assert (latents.entry_bytes, keys.entry_bytes) == (1_152, 256)
    assert (keys.layers, keys.entries, keys.table) == (latents.layers, latents.entries, latents.table)
    assert keys.arrays == {"index": ((128,), BF16)}
    for groups in (cache_groups(V32, (0,), fp8.E4M3), cache_groups(V32, (0,), BF16, fp8_index=True)):
        assert groups[1].entry_bytes == 132
    with pytest.raises(UserError, match=r"CD.*choose --mla-prefill"):
        cache_groups(V32, (0,), ml_dtypes.bfloat16, layout="decompressed")


def test_an_fp8_cache_keeps_scales_and_rotary_keys_in_bf16_and_a_tpu_pads_latents_to_its_registers():
    (group,) = cache_groups(V3, (0,), fp8.E4M3)
    assert group.arrays == {"latent": ((512,), fp8.E4M3), "scale": ((4,), np.float32), "rope": ((64,), BF16)}
    assert group.entry_bytes == 656
    (group,) = cache_groups(V3, (0,), np.float32, lanes=128)
    assert [width for (width,), _ in group.arrays.values()] == [512, 128]


@pytest.mark.parametrize("layout", ["joined", "decompressed"])
def test_fp8_is_refused_where_the_latent_is_not_kept_apart(layout):
    with pytest.raises(UserError, match=f"--kv-cache-dtype fp8 .* reads the cache {layout}; choose them from CC"):
        cache_groups(V3, (0,), fp8.E4M3, layout=layout)
