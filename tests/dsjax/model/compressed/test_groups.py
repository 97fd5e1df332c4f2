"""What a DeepSeek-V4 caches: bytes, and which layer is which of a group."""

from dataclasses import replace

import numpy as np
import pytest

from dsjax.config import load_config
from dsjax.errors import UserError
from dsjax.model.cache_groups import BF16
from dsjax.model.compressed.groups import compressed_groups
from dsjax.model.parameter_table import abstract_parameters
from dsjax.plan.layout import parse_layout
from dsjax.plan.memory import cache_bytes_per_token, weight_bytes, window_page_bytes
from dsjax.plan.precision import FP8_CACHE, PRECISIONS

FLASH, PRO = (load_config(f"deepseek-v4-{size}") for size in ("flash", "pro"))


@pytest.mark.parametrize(
    ("config", "token", "in_fp8", "window"), [(FLASH, 6_880, 3_514, 6.08e6), (PRO, 9_848, 5_031, 8.65e6)]
)
def test_bytes_of_a_token_and_of_a_window_page(config, token, in_fp8, window):
    bf16 = PRECISIONS["bf16"]
    assert cache_bytes_per_token(config, bf16) == token
    assert cache_bytes_per_token(config, replace(bf16, cache=FP8_CACHE)) == in_fp8
    assert window_page_bytes(config, bf16) == pytest.approx(window, rel=1e-3)


def test_layers_of_flash_have_their_places_in_the_groups():
    groups = {group.name: group for group in compressed_groups(FLASH, range(44), BF16, 128)}
    assert groups["c128"].layers.index(3) == 0
    assert groups["c4"].layers.index(42) == 20
    assert groups["window"].layers.index(43) == 43, "the MTP module's"
    assert {name: (group.entries, group.table) for name, group in groups.items()} == {
        "c4": (32, "context"), "c4_index": (32, "context"), "c128": (1, "context"),
        "window": (128, "window"), "state4": (1, "window"), "state128": (1, "window"),
    }  # fmt: skip
    assert [group.entries for group in compressed_groups(FLASH, range(44), BF16, 128, drafts=3)][-2:] == [4, 4]


def test_pages_hold_whole_windows():
    assert FLASH.page_tokens == 128
    with pytest.raises(UserError, match="--page-size is 64"):
        compressed_groups(FLASH, range(43), BF16, 64)
    wide = replace(FLASH, v4=replace(FLASH.v4, sliding_window=300))
    with pytest.raises(UserError, match="is 256; pages of a deepseek_v4 model hold a multiple of 384 tokens"):
        compressed_groups(wide, range(43), BF16, 256)


@pytest.mark.parametrize("config", [FLASH, PRO])
def test_the_planners_bytes_of_weights_are_the_parameters(config):
    found = weight_bytes(config, parse_layout("dp=1", 0, config), PRECISIONS["bf16"])
    declared = abstract_parameters(config, weights="bf16", mtp=False)
    assert sum(found.values()) == sum(info.nbytes for info in declared.values())
    assert np.dtype(np.int32) in {info.dtype for info in declared.values()}, "hash tables are among them"
