"""A model with offload tiers gives to the bit what one device gives without, and its pages come back, from an earlier engine's folder too.

These are the tests of `tiers/offloaded_pages.py` and `setup/sizes.py` too.
"""

import dataclasses
import functools
import itertools
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from drafting_checkpoint import write_drafting_checkpoint
from kept_programs import kept_in
from layouts import ARITHMETIC, MODELS

from dsjax import LLM, SamplingParams
from dsjax.config import load_config
from dsjax.engine.contract.commands import DropPages, FetchPages, PlacePages, ReadPages, StorePages
from dsjax.engine.device.access import DevicePart
from dsjax.engine.program_cache.library import ProgramLibrary
from dsjax.engine.setup import loading, stages
from dsjax.engine.setup.args import INDEX_SCORES, EngineArgs
from dsjax.engine.setup.assembly import make_step
from dsjax.engine.setup.loading import load_model, lock_disk, page_space
from dsjax.engine.tiers import page_files
from dsjax.engine.tiers.offload_tiers import OffloadAttachment
from dsjax.engine.tiers.page_folder import lock_folder
from dsjax.errors import UserError
from sharding import MeshSpec


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The checkpoint of each model, written when it is first asked for."""
    return functools.cache(lambda model: write_drafting_checkpoint(tmp_path_factory.mktemp("tiers"), **MODELS[model]))


@pytest.fixture(scope="module")
def checkpoint(checkpoints):
    return checkpoints("v3")


GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)


def load(checkpoint, **options):
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "prefill_chunk": 16, "page_size": 4, "max_model_len": 64}
    # A preempted request's answer is computed again, as a prompt.
    llm = LLM(str(checkpoint), dtype="float32", batch_invariant=True, **sizes, **options)
    llm.executor.buckets = dataclasses.replace(
        llm.executor.buckets, decode=(2,)
    )  # one program for decodes instead of two
    return llm


def prompts():
    rng = np.random.default_rng(8)
    beginnings = [rng.integers(2, 290, size=40).tolist() for _ in range(4)]
    return [{"prompt_token_ids": beginnings[i % 4] + [int(t)]} for i, t in enumerate(rng.integers(2, 290, size=16))]


def answer(output):
    """Tokens, and the log-probability of each."""
    (made,) = output.outputs
    return list(made.token_ids), [one[token].logprob for token, one in zip(made.token_ids, made.logprobs, strict=True)]


@pytest.fixture(scope="module")
def expected_of(checkpoints, kernels):
    """What one device gives for each prompt alone, without tiers, when it is first asked for: of a model in an MLA form, with a cache."""

    def made(model, form, kv_cache_dtype="auto"):
        llm = load(checkpoints(model), mla_prefill=form, mla_decode=form, kv_cache_dtype=kv_cache_dtype)
        assert llm.executor.model.is_exact
        outputs = generated(llm)
        llm.shutdown()
        return outputs

    return functools.cache(made)


def test_room_for_less_than_a_page_is_refused(checkpoint):
    with pytest.raises(UserError, match="give at least"):
        load(checkpoint, host_cache_bytes=10)


def generated(llm):
    return [answer(llm.generate([prompt], GREEDY)[0]) for prompt in prompts()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("v3", {"mesh": "dp=2,tp=2", "speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}),
        ("v3", {"mesh": "tp=2", "mla_prefill": "CD", "mla_decode": "CD", "host_cache_bytes": 0}),
        ("v3.2", {"mesh": "dp=2,tp=2", "speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}),
        ("v3", {"attention_mesh": "dp=2", "expert_mesh": "ep=4"}),
        ("v3", {"mesh": "pp=2,dp=2", "speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}),
        ("v3", {"mesh": "pp=3", "kv_cache_dtype": "fp8", "host_cache_bytes": 0}),
    ],
    ids=[
        "dp=2,tp=2, drafts",
        "keys and values, disk alone",
        "index keys, drafts",
        "experts apart",
        "stages, drafts",
        "stages, FP8 cache, disk alone",
    ],
)
def test_a_model_gives_the_same_to_the_bit_and_its_pages_come_back_after_a_restart_too(
    checkpoints, expected_of, model, options, tmp_path
):
    """The first engine has room for all in host memory, the second one for a page or two of each rank, 5 % of what is needed."""
    form = ARITHMETIC[options.get("mla_decode", "A_CC_ME")]
    checkpoint, expected = checkpoints(model), expected_of(model, form, options.get("kv_cache_dtype", "auto"))
    on_disk = {"disk_cache": str(tmp_path), "disk_cache_bytes": 1 << 22, "cache_tokens": 92}
    library = ProgramLibrary()
    with kept_in(library):
        first = load(checkpoint, **on_disk, **{"host_cache_bytes": 1 << 20} | options)
    try:
        assert generated(first) == expected
        source = first.engine.core.part(OffloadAttachment).source
        hosts = sum(host.counts().fetched for host in source.host)
        disk = first.engine.core.part(OffloadAttachment).source.disk.counts()
        assert (hosts or disk.fetched) > 20
        assert disk.stored > 20
        assert first.executor.limits.disk_page_bytes == page_files.bytes_on_disk(first.facts.page_bytes)
        with pytest.raises(UserError, match="in use by another engine"):
            load(checkpoint, **on_disk, **options)
    finally:
        first.shutdown()
    files = list(Path(tmp_path).glob("*/*/*.page"))
    assert {-(-file.stat().st_size // 4096) * 4096 for file in files} == {first.executor.limits.disk_page_bytes}
    files[0].write_bytes(files[0].read_bytes()[:-3])
    with kept_in(library):
        second = load(checkpoint, **on_disk, **{"host_cache_bytes": 1 << 14} | options)
    try:
        assert generated(second) == expected
        ranks = second.engine.core.scheduler.ranks
        assert sum(rank.hits["disk"] for rank in ranks) > 300
        for _ in range(2):  # several at a time, which have to give way to each other; one of them is given up
            second.engine.add_request("gone", prompts()[0], GREEDY)
            second.engine.step()
            second.engine.abort("gone")
            outputs = second.generate(prompts(), GREEDY)
            assert [answer(output) for output in outputs] == expected
        assert all(rank.pool.num_used == 0 for rank in ranks)
        assert len(ranks) > 1 or ranks[0].num_preemptions
        second.engine.flush_prefix_cache()
        assert second.engine.core.part(OffloadAttachment).source.disk.counts().used_pages == 0
    finally:
        second.shutdown()
    assert not list(Path(tmp_path).glob("*/*/*.page"))


@pytest.mark.slow
def test_pages_on_the_disk_are_found_on_a_mesh_with_other_stages_and_without(checkpoint, expected_of, tmp_path):
    expected, drafts = expected_of("v3", "A_CC_ME"), {"method": "mtp", "num_speculative_tokens": 2}
    on_disk = {"disk_cache": str(tmp_path), "disk_cache_bytes": 1 << 22, "speculative_config": drafts}
    for place, mesh in enumerate(("pp=2", "dp=2", "pp=3,dp=2")):
        llm = load(checkpoint, mesh=mesh, **on_disk)
        try:
            firsts = prompts()[:4]  # one of each beginning
            assert [answer(llm.generate([prompt], GREEDY)[0]) for prompt in firsts] == expected[:4]
            hits = sum(rank.hits.get("disk", 0) for rank in llm.engine.core.scheduler.ranks)
        finally:
            llm.shutdown()
        assert (hits > 100) == (place > 0)
    assert len(list(tmp_path.glob("*/space.json"))) == 1


PAGE_COMMANDS = (StorePages, FetchPages, PlacePages, ReadPages, DropPages)
SOME_TIME = 150
"""Seconds in which each of them is sent three times. On a busy machine the disk may be left alone for a part of it."""


@pytest.fixture(scope="module")
def staged_of(checkpoint, tmp_path_factory):
    """An engine of two stages for a kind of command: its disk has room for few pages where they are to be deleted, else for all, so that
    what a prompt needs again is always read.
    """

    engines = {}

    def of(kind):
        disk_bytes = 1 << 16 if kind is DropPages else 1 << 22
        if disk_bytes not in engines:
            room = {"cache_tokens": 92, "host_cache_bytes": 1 << 14, "disk_cache_bytes": disk_bytes}
            folder = str(tmp_path_factory.mktemp("pages"))
            engines[disk_bytes] = load(checkpoint, mesh="pp=2", disk_cache=folder, **room)
        return engines[disk_bytes]

    yield of
    for engine in engines.values():
        engine.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("kind", PAGE_COMMANDS, ids=lambda kind: kind.__name__)
def test_an_interrupt_while_pages_move_at_one_stage_leaves_no_page_in_part(
    staged_of, expected_of, monkeypatch, kind, stage
):
    staged = staged_of(kind)
    expected, stage = expected_of("v3", "A_CC_ME"), staged.executor.stages[stage]
    launch, seen = stage.launch, []

    def interrupted(command):
        if isinstance(command, kind):
            seen.append(command)
            if len(seen) == 3:
                raise KeyboardInterrupt
        return launch(command)

    def generate_on():
        end = time.monotonic() + SOME_TIME
        while time.monotonic() < end:  # how many pages go with one command hangs on how far the disk is
            generated(staged)

    with monkeypatch.context() as patch:
        patch.setattr(stage, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate_on()
    assert [answer(output) for output in staged.generate(prompts(), GREEDY)] == expected


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"disk_cache": "x"}, "without --disk-cache-bytes"),
        ({"disk_cache_bytes": 5}, "without --disk-cache"),
        ({"disk_cache": "x", "disk_cache_bytes": 5, "enable_prefix_caching": False}, "turns off"),
        ({"disk_cache": "x", "disk_cache_bytes": 5, "record_steps": "y"}, "--record-steps does not go with"),
        ({"disk_cache": "/proc/nothing", "disk_cache_bytes": 1 << 20}, "cannot be used as a folder"),
    ],
)
def test_options_of_the_disk_that_cannot_be_are_refused(checkpoint, options, says):
    with pytest.raises(UserError, match=says):
        load(checkpoint, **options)


def test_a_mesh_of_several_processes_is_refused_a_disk(tmp_path):
    args = EngineArgs.from_options(disk_cache=str(tmp_path), disk_cache_bytes=1 << 20)
    with pytest.raises(UserError, match="does not work on a mesh of several processes"):
        lock_disk(args, object())


def test_a_start_that_failed_keeps_no_folder_from_the_next_one(checkpoint, tmp_path):
    args = EngineArgs(model=str(checkpoint), max_model_len=10**6, disk_cache=str(tmp_path), disk_cache_bytes=1 << 20)
    with pytest.raises(UserError, match="--max-model-len is 1000000") as kept:
        load_model(args)
    lock_disk(args, None).close()
    assert kept.value.__traceback__ is not None  # with all that it holds, as a notebook keeps it


def test_where_a_stage_cannot_be_made_those_before_it_end_their_threads_and_give_back_their_memory(
    checkpoint, tmp_path, monkeypatch
):
    devices, before = [], set(threading.enumerate())

    def parts(*arguments):
        def fail_at_the_last_stage(device, staging):
            devices.append(device)
            if len(devices) == 2:
                raise ValueError("there is no room for its exchange")
            return DevicePart()

        return [*loading.executor_parts(*arguments), fail_at_the_last_stage]

    monkeypatch.setattr(stages, "executor_parts", parts)
    with pytest.raises(ValueError, match="no room for its exchange") as kept:
        load(checkpoint, mesh="pp=2", disk_cache=str(tmp_path), disk_cache_bytes=1 << 20)
    of_disk = [one for one in threading.enumerate() if one not in before and one.name.startswith("dsjax-page")]
    for thread in of_disk:
        thread.join(20)
    assert not [thread for thread in of_disk if thread.is_alive()]
    assert devices[0].state.start.is_deleted()
    with lock_folder(tmp_path):
        assert kept.value.__traceback__ is not None  # with all that it holds, as a notebook keeps it


def spaces(folder, *several):
    """What the pages of engines of these options are kept apart by."""
    every = [EngineArgs(model=str(folder), dtype="float32", **options) for options in several]
    config, mesh = load_config(folder), MeshSpec().build()
    return [page_space(args, make_step(args, config, MeshSpec(), mesh, bf16_experts=False), folder) for args in every]


def test_index_keys_that_were_rotated_are_not_found_by_who_does_not_rotate_them(checkpoints):
    found = spaces(checkpoints("v3.2"), *({"index_scores": one} for one in INDEX_SCORES))
    assert all(one != other for one, other in itertools.combinations(found, 2))


def test_an_engine_that_promises_bits_finds_no_page_of_one_that_does_not_nor_of_another_form(checkpoint, kernels):
    exact = {"batch_invariant": True}
    found = spaces(
        checkpoint, {}, {"mla_decode": "CC"}, exact, exact | {"mla_decode": "CC"}, exact | {"kernels": "native"}
    )
    assert found[0] == found[1]
    assert found[2] == found[4]
    assert all(one != other for one, other in itertools.combinations(found[1:4], 2))


def test_a_disk_with_less_room_than_a_page_is_refused(checkpoint, tmp_path):
    with pytest.raises(UserError, match="give at least 4,096"):
        load(checkpoint, disk_cache=str(tmp_path), disk_cache_bytes=100)
