"""A model with window pages gives the same tokens however its prompts are cut, preempted, found in the cache, drafted or moved.

The attention is that of `sliding_attention.py`. What the scheduler does with pages of both kinds is
in `test_borders.py`.
"""

import dataclasses

import numpy as np
import pytest
from drafting_checkpoint import write_drafting_checkpoint
from sliding_attention import slides

from dsjax import LLM, SamplingParams
from dsjax.engine.transfer.prefill_links import PrefillLinks

pytestmark = pytest.mark.slow

G, LONGEST = 8, 96
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "prefill_chunk": 12, "page_size": G, "max_model_len": 96}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)
DRAFTS = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_drafting_checkpoint(tmp_path_factory.mktemp("windows"))


@pytest.fixture(autouse=True)
def _sliding(no_programs_on_disk):
    with slides():
        yield


def load(checkpoint, mesh="dp=1", **options):
    llm = LLM(str(checkpoint), mesh=mesh, dtype="float32", **SIZES | options)
    llm.executor.buckets = dataclasses.replace(llm.executor.buckets, decode=(4,))
    return llm


def prompts():
    rng = np.random.default_rng(5)
    shared = rng.integers(2, 290, size=40).tolist()
    lengths = (3, 7, 8, 9, 23, 33, 41, 60)
    return [shared[: length // 2] + rng.integers(2, 290, size=length - length // 2).tolist() for length in lengths]


def generated(llm, given):
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in given], GREEDY)
    return [answer(output.outputs[0]) for output in outputs]


def answer(made):
    scores = [one[token].logprob for token, one in zip(made.token_ids, made.logprobs, strict=True)]
    return list(made.token_ids), np.array(scores)


def assert_same(given, expected):
    for (tokens, scores), (expected_tokens, expected_scores) in zip(given, expected, strict=True):
        assert tokens == expected_tokens
        # Sums in float32 of other orders; a token that is missing from the window changes 1e-2 and more.
        np.testing.assert_allclose(scores, expected_scores, atol=1e-4)


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Of each prompt by itself, in one chunk, by one device, without a prefix cache."""
    with slides():
        llm = load(checkpoint, prefill_chunk=LONGEST, max_num_batched_tokens=LONGEST, enable_prefix_caching=False)
        answers = [generated(llm, [prompt])[0] for prompt in prompts()]
        for prompt, (made, _) in zip(prompts(), answers, strict=True):
            logits = llm.logits([prompt + made])[0]
            assert logits.argmax(axis=-1)[len(prompt) - 1 : -1].tolist() == made, "a ring of window pages scores, too"
        llm.shutdown()
    return answers


@pytest.mark.parametrize("mesh", ["dp=1", "dp=8"])
@pytest.mark.parametrize("drafts", [{}, DRAFTS], ids=["", "drafts"])
def test_cut_preempted_found_again_or_drafted_the_tokens_are_the_same(checkpoint, expected, mesh, drafts):
    llm = load(checkpoint, mesh, cache_tokens=LONGEST, **drafts)
    ranks = llm.engine.core.scheduler.ranks
    for rank in ranks:  # so few are left that requests wait for them, and pages are soon another's
        rank.pool.allocate(rank.pool.num_free_windows - 9, windows=True)
    for _ in range(3):  # found in the cache from the second time on
        assert_same(generated(llm, prompts()), expected)
    assert sum(rank.hits["device"] for rank in ranks) > 0
    if mesh == "dp=1":
        assert ranks[0].num_preemptions > 0
    llm.shutdown()


def test_pages_of_both_kinds_come_back_from_host_memory(checkpoint, expected):
    llm = load(checkpoint, "dp=2", host_cache_bytes=1 << 20, **DRAFTS)
    limits, ranks = llm.executor.limits, llm.engine.core.scheduler.ranks
    assert limits.host_windows_per_rank > 8
    assert_same(generated(llm, prompts()), expected)
    for rank in ranks:
        for windows in (False, True):
            count = rank.pool.num_free_windows if windows else rank.pool.num_free
            rank.pool.release(rank.pool.allocate(count, windows=windows))
        assert not rank.pool._page_of
    generated(llm, [[3, 4], [5, 6]])  # meanwhile the pages arrive in host memory
    before = sum(rank.hits.total() for rank in ranks)
    assert_same(generated(llm, prompts()), expected)
    found = sum(rank.hits.total() for rank in ranks) - before
    assert found == sum((len(prompt) - 1) // G * G for prompt in prompts())
    assert sum(rank.hits["host"] for rank in ranks) >= 64, "the others share pages that were loaded before"
    llm.shutdown()


def test_pages_of_both_kinds_go_from_prefill_to_decode(checkpoint, expected):
    sides = {"prefill_mesh": "dp=2", "decode_mesh": "dp=1", "local_prefill_tokens": 1, "transfer_timeout": 600}
    llm = LLM(str(checkpoint), dtype="float32", **sides, **SIZES, **DRAFTS)
    assert_same(generated(llm, prompts()), expected)
    counts = llm.engine.core.part(PrefillLinks).source.transfer_counts
    assert (counts.completed, counts.given_up) == (counts.asked, 0)
    assert counts.asked >= 4
    llm.shutdown()
