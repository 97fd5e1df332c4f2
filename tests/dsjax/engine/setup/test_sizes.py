"""Sizes of an engine before there is a weight: what its devices must hold, how many requests, which lengths, and how many pages."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from layouts import TINY
from sliding_attention import slides
from tiny_steps import limits_of, step_of, tiny
from v4_models import v4_config

from dsjax.checkpoint.hub import resolve_config
from dsjax.config import ModelConfig, load_config
from dsjax.engine.device import cache as device_cache
from dsjax.engine.device.buckets import Buckets
from dsjax.engine.device.cache import Pool
from dsjax.engine.program_cache.library import ProgramLibrary
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.sizes import EngineLayout, beside_the_cache, check_device_memory, weight_bytes
from dsjax.engine.tiers.page_folder import bytes_on_disk
from dsjax.errors import UserError
from dsjax.model.stage import stages_of
from sharding import MeshSpec


def test_weights_that_a_pool_cannot_hold_are_refused_with_what_would_fit():
    args, step = EngineArgs(model="deepseek-v3", mesh="dp=2", dtype="bfloat16"), step_of("dp=2")
    check = lambda size: check_device_memory(args, step, Pool(size=int(0.9 * size), used=0, temporaries=0))  # noqa: E731
    check(1.5e12)
    with pytest.raises(UserError, match=r"GB on each device of dp=2, .* 540.0 GB free; .* --weights fp8"):
        check(6e11)
    with pytest.raises(UserError, match=r"a --gpu-memory-utilization above 0.92 \(it is 0.9\)"):
        check(7.44e11)


def checkpoint(**changed):
    return SimpleNamespace(config=ModelConfig.from_dict(TINY | changed), bf16_experts=False)


def laid_out(mesh="dp=2", model=None, **options) -> tuple[EngineArgs, EngineLayout]:
    args = EngineArgs(mesh=mesh, dtype="float32", page_size=4, **options)
    return args, EngineLayout.of(args, checkpoint(**model or {}), MeshSpec.parse(mesh).build())


def test_an_embedding_in_host_memory_takes_no_room_on_a_device():
    device, host = (weight_bytes(laid_out(embedding_location=where)[1].step) for where in ("device", "host"))
    assert device - host == TINY["vocab_size"] * TINY["hidden_size"] * 4


def test_a_model_whose_head_is_its_embedding_keeps_it_on_the_devices():
    with pytest.raises(UserError, match=r"--embedding-location host .* head, .* is its embedding"):
        laid_out(model={"tie_word_embeddings": True}, embedding_location="host")


def test_a_step_needs_beside_the_cache_what_its_largest_program_does_whatever_the_cache_holds():
    step, buckets = tiny("dp=1"), Buckets.covering(4, 8, mixed=True)
    params, limits = step.abstract_parameters(), [replace(limits_of(1), pages_per_rank=pages) for pages in (2, 9)]
    few, many = (beside_the_cache(step, params, own, buckets, 0) for own in limits)
    assert few == many > TINY["vocab_size"] * 4 * 2  # the counts of four slots are among it


def limits(**options):
    args, layout = laid_out(**options)
    return layout.limits(args, ProgramLibrary(), {}, None)


@pytest.mark.parametrize(
    ("mesh", "tokens", "rows"), [("dp=2", 2048, 128), ("dp=8", 2048, 32), ("dp=32,ep=8", 2048, 8), ("dp=2", 20, 20)]
)
def test_running_requests_are_shared_by_the_ranks_and_no_more_than_a_step_has_tokens(mesh, tokens, rows):
    _, layout = laid_out(mesh, max_num_batched_tokens=tokens)
    assert layout.sizes.max_rows_decode == layout.sizes.max_rows_prefill == rows
    assert layout.sizes.num_ranks == MeshSpec.parse(mesh).dp_size


def test_a_chunk_is_no_longer_than_a_step_or_a_request():
    for options in ({"prefill_chunk": 24}, {"max_num_batched_tokens": 24}, {"max_model_len": 24}):
        _, layout = laid_out(**options)
        assert layout.sizes.max_chunk == 24, options


def test_the_cache_has_the_pages_that_were_asked_for_and_one_that_is_never_used():
    asked = limits(cache_tokens=44)
    assert asked.pages_per_rank == 1 + 11
    assert not asked.moves_pages
    assert limits(max_num_seqs=3, max_model_len=40).pages_per_rank == 1 + 3 * 10


def test_tokens_of_the_cache_are_whole_pages_of_the_model():
    with pytest.raises(UserError, match=r"pages of 4 tokens .*; give 44"):
        laid_out(cache_tokens=42)
    assert EngineArgs().page_size_of(load_config(resolve_config("demo"))) == 16
    assert EngineArgs().page_size_of(load_config(resolve_config("deepseek-v4-flash"))) == 128


def test_window_pages_are_what_requests_may_hold_and_a_fifth_of_the_bytes(tmp_path):
    with slides():
        args, layout = laid_out(max_num_seqs=3, max_num_batched_tokens=32, prefill_chunk=16, host_cache_bytes=1 << 16)
        own, step = layout.limits(args, ProgramLibrary(), {}, None), layout.step
        held = 1 + 3 * 3 + 2 * 32 // args.page_size  # a row's pages, prompts of two steps, and one that nobody gets
        assert layout.sizes.windows_per_rank == held
        kept = own.windows_per_rank - held
        page, window = device_cache.bytes_per_page(step), device_cache.bytes_per_page(step, "window")
        assert 0 <= own.pages_per_rank * page / 5 - kept * window * 4 / 5 < window
        assert own.window_columns == (16 + 2 * args.page_size - 3) // args.page_size + 1
        used = own.host_pages_per_rank * page + own.host_windows_per_rank * window
        assert (1 << 15) - page - window < used <= 1 << 15
        own = limits(disk_cache=str(tmp_path), disk_cache_bytes=1 << 20)
        assert own.disk_pages == (1 << 20) // own.disk_page_bytes
        room = own.disk_pages_per_window * own.disk_page_bytes
        assert room - own.disk_page_bytes < bytes_on_disk(window) <= room


def test_what_the_model_or_the_cache_cannot_hold_is_refused_with_what_would_fit(monkeypatch):
    with pytest.raises(UserError, match="--max-model-len is 129, but the model has 128 positions"):
        laid_out(max_model_len=129)
    with pytest.raises(UserError, match=r"the cache of a DP rank holds 20 tokens.*raise --cache-tokens from 20"):
        limits(cache_tokens=20, max_model_len=40)
    monkeypatch.setattr(device_cache, "HOST_CACHE_BYTES", 8 * device_cache.bytes_per_page(laid_out()[1].step))
    with pytest.raises(UserError, match=r"--cache-tokens is 4,000, but .* room for (\d+) tokens; lower it to \1,"):
        limits(cache_tokens=4000)


@pytest.mark.parametrize("kinds", [{}, v4_config("whcc")], ids=["alike", "of three kinds"])
def test_a_page_beside_the_devices_has_all_layers_whichever_stage_it_is_asked_of(kinds):
    drafts = {"method": "mtp", "num_speculative_tokens": 1}
    model = checkpoint(**kinds | {"num_nextn_predict_layers": 1})
    for speculation in (None, drafts):
        sizes = []
        for mesh in ("dp=2", "pp=2,dp=2"):
            args = EngineArgs(mesh=mesh, dtype="float32", page_size=8, speculative_config=speculation)
            stages = stages_of(model.config, 2, mtp=speculation is not None) if "pp" in mesh else [None]
            for stage, own in zip(stages, MeshSpec.parse(mesh).build_stages(), strict=True):
                layout = EngineLayout.of(args, model, own, stage=stage)
                sizes.append((layout.page_bytes(), layout.page_bytes("window")))
        assert sizes == sizes[:1] * 3
