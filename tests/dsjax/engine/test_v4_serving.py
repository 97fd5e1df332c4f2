"""A DeepSeek-V4 that is served: the plain forward pass's tokens however prompts are cut, preempted, drafted, found in the cache or moved.

What the scheduler does with pages of both kinds is in `test_borders.py`.
"""

import dataclasses

import jax
import numpy as np
import pytest
from v4_models import write_v4_checkpoint

from dsjax import LLM, SamplingParams
from dsjax.checkpoint.load import load
from dsjax.checkpoint.source import open_checkpoint
from dsjax.engine.transfer.prefill_links import PrefillLinks
from dsjax.model.parameter_table import parameter_table
from sharding import MeshSpec
from sharding.rules import Rules

pytestmark = pytest.mark.slow

G, LONGEST = 8, 96
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True)
DRAFTS = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
SIZES = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "prefill_chunk": 12,
    "page_size": G,
    "max_model_len": LONGEST,
}
BALANCED = {
    "enable_eplb": True,
    "eplb_config": {"num_redundant_experts": 4, "window_size": 4, "step_interval": 4, "payback": 0},
}

OVERLAPPED = {"enable_dbo": True, "dbo_decode_token_threshold": 1, "dbo_prefill_token_threshold": 1}


def prompts():
    """Several of the same beginning, of other lengths."""
    rng = np.random.default_rng(5)
    shared = rng.integers(2, 250, size=40).tolist()
    lengths = (3, 8, 9, 33, 41, 60)
    return [shared[: length // 2] + rng.integers(2, 250, size=length - length // 2).tolist() for length in lengths]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_v4_checkpoint(tmp_path_factory.mktemp("v4"), "wchch", hashed=1, num_nextn_predict_layers=1)


def engine(checkpoint, **options):
    llm = LLM(str(checkpoint), dtype="float32", **SIZES | options)
    if "decode_mesh" not in options:
        llm.executor.buckets = dataclasses.replace(llm.executor.buckets, decode=(4,))
    return llm


def answers(llm, given, params=GREEDY):
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in given], params)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Greedy and drawn tokens of each prompt, of one device without drafts."""
    llm = engine(checkpoint, mesh="dp=1")
    found = answers(llm, prompts()), answers(llm, prompts(), DRAWN)
    again = llm.generate([{"prompt_token_ids": prompts()[-1]}], GREEDY)[0]
    assert again.num_cached_tokens == (len(prompts()[-1]) - 1) // G * G, "up to the last border before the last token"
    llm.shutdown()
    return found


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


@pytest.mark.parametrize(
    ("mesh", "options"),
    [("dp=1", {}), ("dp=2,tp=2", OVERLAPPED), ("pp=2,dp=2", BALANCED)],
    ids=["one device", "heads over two, in two batches", "balanced in two stages"],
)
def test_drafted_preempted_and_found_again_the_tokens_are_one_devices_without_drafts(
    checkpoint, expected, mesh, options, monkeypatch
):
    llm = engine(checkpoint, mesh=mesh, cache_tokens=LONGEST, **DRAFTS, **options)
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
        assert (answers(llm, prompts()), answers(llm, prompts(), DRAWN)) == expected
    assert sum(rank.hits["device"] for rank in ranks) > 0
    assert 0 < sum(accepted) < sum(verified)
    if mesh == "dp=1":
        assert ranks[0].num_preemptions > 0
    if options == BALANCED:
        assert llm.engine.core.statistics()["balance"].rebalances > 0
    llm.shutdown()


def test_pages_of_both_kinds_come_back_from_host_memory(checkpoint, expected):
    llm = engine(checkpoint, mesh="dp=2", host_cache_bytes=1 << 20, **DRAFTS)
    limits, ranks = llm.executor.limits, llm.engine.core.scheduler.ranks
    assert limits.host_windows_per_rank > 8
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
    assert sum(rank.hits["host"] for rank in ranks) >= 64, "the others share pages that were loaded before"
    llm.shutdown()


def test_pages_of_both_kinds_go_from_prefill_to_decode(checkpoint, expected):
    sides = {"prefill_mesh": "dp=2", "decode_mesh": "dp=1", "local_prefill_tokens": 1, "transfer_timeout": 600}
    llm = engine(checkpoint, **sides, **DRAFTS)
    assert answers(llm, prompts()) == expected[0]
    counts = llm.engine.core.part(PrefillLinks).source.transfer_counts
    assert (counts.completed, counts.given_up) == (counts.asked, 0)
    assert counts.asked >= 4
    llm.shutdown()
