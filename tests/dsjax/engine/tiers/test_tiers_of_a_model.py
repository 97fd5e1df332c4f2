"""A model with offload tiers gives one device's bits, and pages come back, from an earlier engine's folder too.
Also tests `tiers/offloaded_pages.py`, `setup/sizes.py` and `setup/spaces.py`."""

import contextlib
import dataclasses
import functools
import itertools

import numpy as np
import pytest
from drafting_checkpoint import write_drafting_checkpoint
from layouts import MODELS
from mixes import given_to

from dsjax import LLM, SamplingParams
from dsjax.config import load_config
from dsjax.engine.program_cache import library as program_library
from dsjax.engine.program_cache.library import ProgramLibrary
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.assembly import make_step
from dsjax.engine.setup.loading import load_model
from dsjax.engine.setup.spaces import page_space
from dsjax.engine.tiers import page_folder
from dsjax.engine.tiers.offload_tiers import OffloadAttachment
from dsjax.engine.tiers.page_folder import PageFolder
from dsjax.errors import UserError
from sharding import MeshSpec


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return functools.cache(lambda model: write_drafting_checkpoint(tmp_path_factory.mktemp("tiers"), **MODELS[model]))


GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
DRAFTS = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}


def load(checkpoint, **options):
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "prefill_chunk": 16, "page_size": 4, "max_model_len": 64}
    llm = LLM(str(checkpoint), dtype="float32", **sizes, **options)
    # One program for decodes instead of two.
    llm.executor.buckets = dataclasses.replace(llm.executor.buckets, decode=(2,))
    return llm


def prompts():
    rng = np.random.default_rng(8)
    beginnings = [rng.integers(2, 290, size=40).tolist() for _ in range(4)]
    return [{"prompt_token_ids": beginnings[i % 4] + [int(t)]} for i, t in enumerate(rng.integers(2, 290, size=16))]


def generated(llm):
    return [given_to(llm.generate([prompt], GREEDY)[0]) for prompt in prompts()]


def one_devices(checkpoint, options):
    """What one device without tiers answers, in the same MLA forms, with the same cache."""
    alike = {name: options[name] for name in ("mla_prefill", "mla_decode", "kv_cache_dtype") if name in options}
    llm = load(checkpoint, **alike)
    assert llm.executor.model.is_exact
    outputs = generated(llm)
    llm.shutdown()
    return outputs


@contextlib.contextmanager
def kept_in(library):
    """Inside, engines share the programs of this library; their options may differ only where no program depends on them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program_library, "ProgramLibrary", lambda: library)
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options", "changed", "host_bytes"),
    [
        ("v3.2", {"mesh": "pp=2,dp=2", "kv_cache_dtype": "fp8", **DRAFTS}, {"mesh": "dp=2"}, (1 << 20, 1 << 14)),
        ("v3", {"attention_mesh": "tp=2", "expert_mesh": "ep=4", "mla_prefill": "CC", "mla_decode": "CC"}, {}, (0, 0)),
    ],
    ids=[
        "index keys, FP8 cache, drafts, host memory and disk, with stages and then without",
        "experts apart, disk alone",
    ],
)
def test_a_model_gives_the_same_to_the_bit_and_its_pages_come_back_after_a_restart_too(
    checkpoints, kernels, model, options, changed, host_bytes, tmp_path, patient_disk
):
    """Host memory has room for all pages in the first engine, and for a page or two of each rank in the second, 5 % of what is needed."""
    checkpoint, expected = checkpoints(model), one_devices(checkpoints(model), options)
    on_disk = {"disk_cache": str(tmp_path), "disk_cache_bytes": 1 << 22, "cache_tokens": 92}
    library = ProgramLibrary()
    with kept_in(library):
        first = load(checkpoint, host_cache_bytes=host_bytes[0], **on_disk, **options)
    try:
        assert generated(first) == expected
        source = first.engine.core.part(OffloadAttachment).source
        hosts, disk = sum(host.counts().fetched for host in source.host), source.disk.counts()
        assert (hosts or disk.fetched) > 20
        assert disk.stored > 20
        assert first.executor.limits.disk_page_bytes == page_folder.bytes_on_disk(first.facts.page_bytes)
        with pytest.raises(UserError, match="in use by another engine"):
            load(checkpoint, **on_disk, **options)
    finally:
        first.shutdown()
    files = list(tmp_path.glob("*/*/*.page"))
    assert {-(-file.stat().st_size // 4096) * 4096 for file in files} == {first.executor.limits.disk_page_bytes}
    files[0].write_bytes(files[0].read_bytes()[:-3])
    with kept_in(ProgramLibrary() if changed else library):
        second = load(checkpoint, host_cache_bytes=host_bytes[1], **on_disk, **options | changed)
    try:
        assert generated(second) == expected
        ranks = second.engine.core.scheduler.ranks
        assert sum(rank.hits["disk"] for rank in ranks) > 300
        # Several at a time, which have to give way to each other; one of them is given up.
        second.engine.add_request("gone", prompts()[0], GREEDY)
        second.engine.step()
        second.engine.abort("gone")
        assert [given_to(output) for output in second.generate(prompts(), GREEDY)] == expected
        assert all(rank.pool.num_used == 0 for rank in ranks)
        assert len(ranks) > 1 or ranks[0].num_preemptions
        assert len({page.parents[1] for page in tmp_path.glob("*/*/*.page")}) == 1
        second.engine.flush_prefix_cache()
        assert second.engine.core.part(OffloadAttachment).source.disk.counts().used_pages == 0
    finally:
        second.shutdown()
    assert not list(tmp_path.glob("*/*/*.page"))


@pytest.mark.parametrize(
    ("options", "says"),
    [({"host_cache_bytes": 10}, "give at least"), ({"disk_cache_bytes": 100}, "give at least 4,096")],
    ids=["host memory", "disk"],
)
def test_room_for_less_than_a_page_is_refused(checkpoints, tmp_path, options, says):
    with pytest.raises(UserError, match=says):
        load(checkpoints("v3"), **options, **({"disk_cache": str(tmp_path)} if "disk_cache_bytes" in options else {}))


def test_a_start_that_failed_keeps_no_folder_from_the_next_one(checkpoints, tmp_path):
    model = str(checkpoints("v3"))
    args = EngineArgs(model=model, max_model_len=10**6, disk_cache=str(tmp_path), disk_cache_bytes=1 << 20)
    with pytest.raises(UserError, match="--max-model-len is 1000000") as kept:
        load_model(args)
    PageFolder(args.disk_cache).lock().close()
    assert kept.value.__traceback__ is not None  # with all that it holds, as a notebook keeps it


def spaces(folder, *several):
    """What the pages of engines of these options are kept apart by."""
    every = [EngineArgs(model=str(folder), dtype="float32", **options) for options in several]
    config, mesh = load_config(folder), MeshSpec().build()
    return [page_space(args, make_step(args, config, MeshSpec(), mesh, bf16_experts=False), folder) for args in every]


def test_an_engine_finds_no_page_of_one_with_other_arithmetic(checkpoints, kernels):
    rotated = spaces(checkpoints("v3.2"), *({"index_scores": one} for one in ("float", "fp8")))
    assert all(one != other for one, other in itertools.combinations(rotated, 2))
    exact, form = {"batch_invariant": True}, {"mla_decode": "CC"}
    found = spaces(checkpoints("v3"), {}, form, exact, exact | form, exact | {"kernels": "native"})
    assert found[0] == found[1], "without --batch-invariant any form may read another's pages"
    assert found[2] == found[4]
    assert all(one != other for one, other in itertools.combinations(found[1:4], 2))
