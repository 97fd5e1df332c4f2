"""A DeepSeek-V4 that is served: the plain forward pass's tokens however prompts are cut, preempted, drafted, found in the cache or moved.

What the scheduler does with pages of both kinds is in `test_window_pages.py`; other meshes and modes are in `test_v4_apart.py`.
"""

from pathlib import Path

import jax
import numpy as np
import pytest
from v4_engine import (
    BLOCKS,
    DRAFTS,
    DRAWN,
    LONGEST,
    PROMPTS,
    QUANTISED,
    G,
    answers,
    drafted_and_preempted,
    engine,
    forget_on_devices,
    handed_over,
    write,
)
from watched_drafts import Watch

from dsjax.checkpoint.load import load
from dsjax.checkpoint.source import open_checkpoint
from dsjax.model.parameter_table import parameter_table
from sharding import MeshSpec
from sharding.rules import Rules

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
IN_WHOLE_PAGES = sum((len(prompt) - 1) // G * G for prompt in PROMPTS)


def test_greedy_tokens_are_the_plain_forms(v4_checkpoint, v4_tokens):
    source, spec = open_checkpoint(v4_checkpoint), MeshSpec.parse("dp=1")
    params = load(source.config, source, spec.build(jax.devices()[:1]), Rules.for_mesh(spec), mtp=False)
    sequences = [prompt + made for prompt, made in zip(PROMPTS, v4_tokens[0], strict=True)]
    padded, table = np.zeros((len(sequences), LONGEST), int), parameter_table(source.config, weights="f32", mtp=False)
    for row, sequence in zip(padded, sequences, strict=True):
        row[: len(sequence)] = sequence
    best = np.asarray(jax.jit(lambda params: table.bind(params)(padded).logits)(params)).argmax(-1)
    for row, prompt, made in zip(best, PROMPTS, v4_tokens[0], strict=True):
        assert row[len(prompt) - 1 : len(prompt) + len(made) - 1].tolist() == made


def test_drafted_preempted_and_found_again_the_tokens_are_one_devices_without_drafts(
    v4_checkpoint, v4_tokens, monkeypatch
):
    llm, rank = drafted_and_preempted(v4_checkpoint)
    watch = Watch(llm, monkeypatch)
    for _ in range(2):  # found in the cache the second time
        assert answers(llm) == v4_tokens[0]
    assert rank.hits["device"] > 0
    watch.assert_both()
    assert answers(llm, DRAWN) == v4_tokens[1]
    assert rank.num_preemptions > 0
    llm.shutdown()


@pytest.mark.parametrize(
    ("tier", "options"),
    [("host", {"host_cache_bytes": 1 << 20}), ("kept", {"page_source": "kept_pages"})],
    ids=["host memory", "a connector of one's own"],
)
def test_pages_of_both_kinds_come_back(v4_checkpoint, v4_tokens, tier, options, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    llm = engine(v4_checkpoint, mesh="dp=1", **options, **DRAFTS)
    (rank,) = llm.engine.core.scheduler.ranks
    assert tier == "kept" or llm.executor.limits.host_windows_per_rank > 8
    assert answers(llm) == v4_tokens[0]
    forget_on_devices(rank)
    answers(llm, given=[[3, 4], [5, 6]])  # meanwhile the pages arrive in host memory
    before = rank.hits.total()
    assert answers(llm) == v4_tokens[0]
    assert rank.hits.total() - before == IN_WHOLE_PAGES
    assert rank.hits[tier] >= 64, "the others share pages that were loaded before"
    llm.shutdown()


def test_pages_of_both_kinds_come_back_from_the_disk_after_a_restart_on_another_mesh(
    v4_checkpoint, v4_tokens, tmp_path, patient_disk
):
    on_disk = {"disk_cache": str(tmp_path), "disk_cache_bytes": 1 << 24}
    with engine(v4_checkpoint, mesh="pp=2,dp=2", pp_layer_partition="1,3", **on_disk, **DRAFTS) as first:
        assert answers(first) == v4_tokens[0]
    assert len({file.stat().st_size for file in tmp_path.glob("*/*/*.page")}) == 2, "both kinds are there"
    with engine(v4_checkpoint, mesh="dp=1", **on_disk, **DRAFTS) as second:
        assert answers(second) == v4_tokens[0]
        (rank,) = second.engine.core.scheduler.ranks
        assert rank.hits.total() == IN_WHOLE_PAGES
        assert rank.hits["disk"] >= 64, "the others share pages that were loaded before"
        second.engine.flush_prefix_cache()
    assert not list(tmp_path.glob("*/*/*.page"))


def test_pages_of_a_stage_without_compressed_entries_come_back_from_host_memory_and_the_disk(tmp_path, patient_disk):
    model, disk = write(tmp_path, "wc", **BLOCKS), {"disk_cache": str(tmp_path / "disk"), "disk_cache_bytes": 1 << 24}
    with engine(model, mesh="dp=1", **QUANTISED) as llm:
        expected = answers(llm)
    with engine(model, mesh="pp=2", host_cache_bytes=1 << 20, **disk, **QUANTISED, **DRAFTS) as first:
        (rank,) = first.engine.core.scheduler.ranks
        assert answers(first) == expected
        forget_on_devices(rank)
        answers(first, given=[[3, 4], [5, 6]])  # meanwhile the pages arrive in host memory
        assert answers(first) == expected
        assert rank.hits["host"] >= 64
    with engine(model, mesh="dp=1", **disk, **QUANTISED, **DRAFTS) as second:
        assert answers(second) == expected
        assert second.engine.core.scheduler.ranks[0].hits["disk"] >= 64


def test_pages_without_compressed_entries_go_from_prefill_to_decode(tmp_path):
    model = write(tmp_path, "w")
    found, asked, completed = handed_over(model, prefill_mesh="dp=1", decode_mesh="dp=1")
    with engine(model, mesh="dp=1") as llm:
        assert (found, completed) == (answers(llm), asked)
