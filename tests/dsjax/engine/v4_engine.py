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
SIZES = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "prefill_chunk": 12,
    "page_size": G,
    "max_model_len": LONGEST,
}


def prompts():
    """Several of the same beginning, of other lengths."""
    rng = np.random.default_rng(5)
    shared = rng.integers(2, 250, size=40).tolist()
    lengths = (3, 8, 9, 33, 41, 60)
    return [shared[: length // 2] + rng.integers(2, 250, size=length - length // 2).tolist() for length in lengths]


def write(directory: Path, **changes) -> Path:
    # Two kinds of layers that take turns, and the MTP module's; a hash-routed one is served by `hosts/test_v4_processes.py`.
    return write_v4_checkpoint(directory, "chch", num_nextn_predict_layers=1, **changes)


def engine(checkpoint, **options):
    llm = LLM(str(checkpoint), dtype="float32", **SIZES | options)
    if "decode_mesh" not in options:
        llm.executor.buckets = dataclasses.replace(llm.executor.buckets, decode=(4,))
    return llm


def answers(llm, given, params=GREEDY):
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in given], params)
    return [list(output.outputs[0].token_ids) for output in outputs]


def handed_over(checkpoint, **options):
    """Greedy tokens with prefill apart from decode, and the counts of what was transferred."""
    llm = engine(checkpoint, local_prefill_tokens=1, transfer_timeout=600, **options)
    found = answers(llm, prompts()), llm.engine.core.part(PrefillLinks).source.transfer_counts
    llm.shutdown()
    return found


def one_devices(checkpoint, **options):
    """Greedy and drawn tokens of each prompt."""
    llm = engine(checkpoint, mesh="dp=1", **options)
    found = answers(llm, prompts()), answers(llm, prompts(), DRAWN)
    again = llm.generate([{"prompt_token_ids": prompts()[-1]}], GREEDY)[0]
    assert again.num_cached_tokens == (len(prompts()[-1]) - 1) // G * G, "up to the last border before the last token"
    llm.shutdown()
    return found
