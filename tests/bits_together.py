"""What a request gets alone, and beside others in another engine: tokens and log-probabilities, to be compared to the bit."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from layouts import TINY

from dsjax import LLM, SamplingParams


class Bits(NamedTuple):
    """What one request got: tokens, their log-probabilities, and those of its prompt."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    of_prompt: tuple[float, ...]


def bits_alone_and_together(checkpoint: Path, alone: dict, together: dict, **options) -> tuple[Bits, list[Bits]]:
    """One engine's answer to a prompt of 19 tokens alone, and another's to prompts of 3, 19 and 6 tokens at once.

    alone, together: options of the two engines; options: of both.
    """
    rng = np.random.default_rng(11)
    prompts = [rng.integers(2, TINY["vocab_size"], size=size).tolist() for size in (3, 19, 6)]
    return _answers(checkpoint, prompts[1:2], options | alone)[0], _answers(checkpoint, prompts, options | together)


def _answers(checkpoint: Path, prompts: list[list[int]], options: dict) -> list[Bits]:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 32, "page_size": 4}
    llm = LLM(str(checkpoint), batch_invariant=True, **sizes | options)
    params = SamplingParams(
        max_tokens=4, temperature=0, ignore_eos=True, detokenize=False, logprobs=0, prompt_logprobs=0
    )
    try:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], [params] * len(prompts))
        return [_bits(output) for output in outputs]
    finally:
        llm.shutdown()


def _bits(output) -> Bits:
    (made,) = output.outputs
    of_prompt = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return Bits(
        tuple(made.token_ids),
        tuple(entry[token].logprob for token, entry in zip(made.token_ids, made.logprobs, strict=True)),
        tuple(entry[token].logprob for token, entry in of_prompt),
    )
