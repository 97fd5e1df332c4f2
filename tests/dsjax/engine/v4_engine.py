"""Engines of the tests of a served DeepSeek-V4: its checkpoint, the prompts, and what one device without drafts makes of them."""

import dataclasses
from pathlib import Path

import numpy as np
from v4_models import write_v4_checkpoint

from dsjax import LLM, SamplingParams
from dsjax.engine.transfer.prefill_links import PrefillLinks

G, LONGEST = 8, 96
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True)
DRAFTS = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
QUANTISED = {"kv_cache_dtype": "fp8", "index_scores": "fp4"}
BLOCKS = {"head_dim": 80, "index_head_dim": 64}
"""Widths for a quantised cache: 4 values rotate; the others of an entry, and an index key, are two blocks each."""
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "prefill_chunk": 12, "page_size": G, "max_model_len": LONGEST}


def _prompts():
    """Several of the same beginning, of other lengths."""
    rng = np.random.default_rng(5)
    shared = rng.integers(2, 250, size=40).tolist()
    lengths = (3, 8, 9, 33, 41, 60)
    return [shared[: length // 2] + rng.integers(2, 250, size=length - length // 2).tolist() for length in lengths]


PROMPTS = _prompts()


def write(directory: Path, layers: str = "chch", **changes) -> Path:
    # Two kinds of layers that take turns, and the MTP module's; a hash-routed one is served by `hosts/test_v4_processes.py`.
    return write_v4_checkpoint(directory, layers, num_nextn_predict_layers=1, **changes)


def engine(checkpoint, **options):
    llm = LLM(str(checkpoint), dtype="float32", **SIZES | options)
    if "decode_mesh" not in options:
        llm.executor.buckets = dataclasses.replace(llm.executor.buckets, decode=(4,))
    return llm


def answers(llm, params=GREEDY, given=PROMPTS):
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in given], params)
    return [list(output.outputs[0].token_ids) for output in outputs]


def forget_on_devices(rank):
    """Push all pages of both kinds out of a rank's cache."""
    for windows in (False, True):
        count = rank.pool.num_free_windows if windows else rank.pool.num_free
        rank.pool.release(rank.pool.allocate(count, windows=windows))
    assert not rank.pool._page_of


def handed_over(checkpoint, **options):
    """Greedy tokens with prefill apart from decode, and how many transfers were asked for and completed."""
    with engine(checkpoint, local_prefill_tokens=1, transfer_timeout=600, **options) as llm:
        found, counts = answers(llm), llm.engine.core.part(PrefillLinks).source.transfer_counts
        assert counts.given_up == 0
        return found, counts.asked, counts.completed


def one_devices(checkpoint, **options):
    """Greedy and drawn tokens of each prompt."""
    with engine(checkpoint, mesh="dp=1", **options) as llm:
        found = answers(llm), answers(llm, DRAWN)
        again = llm.generate([{"prompt_token_ids": PROMPTS[-1]}], GREEDY)[0]
    assert again.num_cached_tokens == (len(PROMPTS[-1]) - 1) // G * G, "up to the last border before the last token"
    return found


def drafted_and_preempted(checkpoint, **options):
    """An engine with drafts on so few pages that requests wait for window pages, and pages are soon another's."""
    llm = engine(checkpoint, mesh="dp=1", **options, **DRAFTS)
    (rank,) = llm.engine.core.scheduler.ranks
    # Taken from the pool, not left out of the cache, so that all engines with drafts share programs.
    rank.pool.allocate(rank.pool.num_free - LONGEST // G)
    rank.pool.allocate(rank.pool.num_free_windows - 9, windows=True)
    return llm, rank
