"""What a request gets alone, and beside others in another engine: tokens and log-probabilities, to be compared to the bit."""

import dataclasses
from pathlib import Path

import numpy as np
from layouts import TINY
from mixes import Given, given_to

from dsjax import LLM, SamplingParams


def bits_alone_and_together(checkpoint: Path, alone: dict, together: dict, **options) -> tuple[Given, list[Given]]:
    """One engine's answer to a prompt of 19 tokens alone, and another's to prompts of 3, 19 and 6 tokens at once.

    alone, together: options of the two engines; options: of both.
    """
    rng = np.random.default_rng(11)
    prompts = [rng.integers(2, TINY["vocab_size"], size=size).tolist() for size in (3, 19, 6)]
    return _answers(checkpoint, prompts[1:2], options | alone)[0], _answers(checkpoint, prompts, options | together)


def _answers(checkpoint: Path, prompts: list[list[int]], options: dict) -> list[Given]:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 32, "page_size": 4}
    llm = LLM(str(checkpoint), batch_invariant=True, **sizes | options)
    if len(prompts) > 1:  # the last one left has as many rows as all: a program less, and not that of one alone
        llm.executor.buckets = dataclasses.replace(llm.executor.buckets, decode=llm.executor.buckets.decode[-1:])
    params = SamplingParams(
        max_tokens=4, temperature=0, ignore_eos=True, detokenize=False, logprobs=0, prompt_logprobs=0
    )
    try:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], [params] * len(prompts))
        return [given_to(output) for output in outputs]
    finally:
        llm.shutdown()
