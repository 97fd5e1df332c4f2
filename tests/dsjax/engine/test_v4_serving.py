"""A DeepSeek-V4 that is served: the plain forward pass's tokens however prompts are cut, preempted, drafted, found in the cache or moved.

What the scheduler does with pages of both kinds is in `test_window_pages.py`; other meshes and modes are in `test_v4_apart.py`.
"""

from pathlib import Path

import jax
import numpy as np
import pytest
from v4_engine import DRAFTS, DRAWN, LONGEST, G, answers, engine, one_devices, prompts, write

from dsjax.checkpoint.load import load
from dsjax.checkpoint.source import open_checkpoint
from dsjax.model.parameter_table import parameter_table
from sharding import MeshSpec
from sharding.rules import Rules

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write(tmp_path_factory.mktemp("v4"))


@pytest.fixture(scope="module")
def expected(checkpoint):
    return one_devices(checkpoint)


def test_greedy_tokens_are_the_plain_forms(checkpoint, expected):
    source, spec = open_checkpoint(checkpoint), MeshSpec.parse("dp=1")
    params = load(source.config, source, spec.build(jax.devices()[:1]), Rules.for_mesh(spec), mtp=False)
    sequences = [prompt + made for prompt, made in zip(prompts(), expected[0], strict=True)]
    padded, table = np.zeros((len(sequences), LONGEST), int), parameter_table(source.config, weights="f32", mtp=False)
    for row, sequence in zip(padded, sequences, strict=True):
        row[: len(sequence)] = sequence
    best = np.asarray(jax.jit(lambda params: table.bind(params)(padded).logits)(params)).argmax(-1)
    for row, prompt, made in zip(best, prompts(), expected[0], strict=True):
        assert row[len(prompt) - 1 : len(prompt) + len(made) - 1].tolist() == made


def test_drafted_preempted_and_found_again_the_tokens_are_one_devices_without_drafts(checkpoint, expected, monkeypatch):
    llm = engine(checkpoint, mesh="dp=1", cache_tokens=LONGEST, **DRAFTS)
    ranks = llm.engine.core.scheduler.ranks
    for rank in ranks:  # so few are left that requests wait for them, and pages are soon another's
        rank.pool.allocate(rank.pool.num_free_windows - 9, windows=True)
    verified, accepted, step = [], [], llm.engine.core.step

    def watched(*arguments, **keywords):
        updates = step(*arguments, **keywords)
        rows = [result for _, result, _ in updates if result is not None]
        verified.extend(row.num_drafts for row in rows)
        accepted.extend(len(row.token_ids) - 1 for row in rows if row.num_drafts)
        return updates

    monkeypatch.setattr(llm.engine.core, "step", watched)
    for _ in range(2):  # found in the cache the second time
        assert answers(llm, prompts()) == expected[0]
    assert sum(rank.hits["device"] for rank in ranks) > 0
    assert 0 < sum(accepted) < sum(verified)
    assert answers(llm, prompts(), DRAWN) == expected[1]
    assert ranks[0].num_preemptions > 0
    llm.shutdown()


@pytest.mark.parametrize(
    ("tier", "options"),
    [("host", {"host_cache_bytes": 1 << 20}), ("kept", {"page_source": "kept_pages"})],
    ids=["host memory", "a connector of one's own"],
)
def test_pages_of_both_kinds_come_back(checkpoint, expected, tier, options, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    llm = engine(checkpoint, mesh="dp=1", **options, **DRAFTS)
    limits, ranks = llm.executor.limits, llm.engine.core.scheduler.ranks
    assert tier == "kept" or limits.host_windows_per_rank > 8
    assert answers(llm, prompts()) == expected[0]
    for rank in ranks:
        for windows in (False, True):
            count = rank.pool.num_free_windows if windows else rank.pool.num_free
            rank.pool.release(rank.pool.allocate(count, windows=windows))
        assert not rank.pool._page_of
    answers(llm, [[3, 4], [5, 6]])  # meanwhile the pages arrive in host memory
    before = sum(rank.hits.total() for rank in ranks)
    assert answers(llm, prompts()) == expected[0]
    found = sum(rank.hits.total() for rank in ranks) - before
    assert found == sum((len(prompt) - 1) // G * G for prompt in prompts())
    assert sum(rank.hits[tier] for rank in ranks) >= 64, "the others share pages that were loaded before"
    llm.shutdown()


def test_pages_of_both_kinds_come_back_from_the_disk_after_a_restart_on_another_mesh(checkpoint, expected, tmp_path):
    on_disk = {"disk_cache": str(tmp_path), "disk_cache_bytes": 1 << 24}
    first = engine(checkpoint, mesh="pp=2,dp=2", pp_layer_partition="1,3", **on_disk, **DRAFTS)
    assert answers(first, prompts()) == expected[0]
    first.shutdown()
    assert len({file.stat().st_size for file in tmp_path.glob("*/*/*.page")}) == 2, "both kinds are there"
    second = engine(checkpoint, mesh="dp=1", **on_disk, **DRAFTS)
    assert answers(second, prompts()) == expected[0]
    (rank,) = second.engine.core.scheduler.ranks
    assert rank.hits.total() == sum((len(prompt) - 1) // G * G for prompt in prompts())
    assert rank.hits["disk"] >= 64, "the others share pages that were loaded before"
    second.engine.flush_prefix_cache()
    second.shutdown()
    assert not list(tmp_path.glob("*/*/*.page"))
