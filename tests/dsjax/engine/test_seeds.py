"""Same seed, same text: with the demo model, whatever runs beside a request, wherever it runs, whatever was computed before.

The sampler is a pure function of a request's seed, tokens and logits (``test_sampler.py``). What is left are the logits, which
other shapes and meshes round differently, by some 1e-6 in float32. Here all of it together gives the same text.
"""

import random

import pytest

from dsjax import LLM, SamplingParams
from dsjax.engine.device.buckets import Buckets, Rectangle

PROMPTS = (
    "def main(",
    "import os\nimport sys\n\n",
    "class Stack:\n    def push(self, item):\n",
    '"""Parse a configuration file.',
    "for i in range(10):\n    print(",
    "The following functions raise an error if the argument is not a string. They are tested in the suite below, "
    "one after the other, with short inputs and long ones; see also the notes at the end of this file.\n",
)
TOKENS = 16
KINDS = (
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.9, "logprobs": 2},
    {"temperature": 0.8, "top_k": 50, "min_p": 0.02, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 1.2, "repetition_penalty": 1.1, "logit_bias": {10: -5.0}, "top_p": 0.95},
)


def load(mesh: str, rows: tuple[int, ...], **options) -> LLM:
    llm = LLM(
        "demo",
        mesh=mesh,
        dtype="float32",
        max_num_seqs=rows[-1],
        max_num_batched_tokens=256,
        prefill_chunk=32,
        cache_tokens=2048,
        max_model_len=256,
        **options,
    )
    llm.executor.buckets = Buckets(decode=rows, prefill=(Rectangle(2, 32),), mixed=False)
    return llm


def params(index: int) -> SamplingParams:
    return SamplingParams(seed=100 + index, max_tokens=TOKENS, ignore_eos=True, **KINDS[index % len(KINDS)])


@pytest.fixture(scope="module")
def one_device():
    """Programs for one row and for eight: who is alone is computed in another shape than who is not."""
    llm = load("dp=1", (1, 8))
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def alone(one_device):
    """Each prompt by itself, nothing cached."""
    texts = []
    for index, prompt in enumerate(PROMPTS):
        one_device.engine.core.flush_prefix_cache()
        (output,) = one_device.generate(prompt, params(index))
        assert output.num_cached_tokens == 0
        texts.append(output.outputs[0].token_ids)
    assert len({tuple(text) for text in texts}) == len(PROMPTS)
    return texts


def crowd(count: int) -> tuple[list[str], list[SamplingParams], list[int]]:
    """The prompts hidden among others, and their places."""
    rng = random.Random(count)
    others = [f"# {i}\nvalue_{i} = " for i in range(count - len(PROMPTS))]
    prompts = [(prompt, params(index), index) for index, prompt in enumerate(PROMPTS)]
    prompts += [
        (text, SamplingParams(temperature=1.5, top_k=i % 7, seed=i, max_tokens=4 + i % 12), -1)
        for i, text in enumerate(others)
    ]
    rng.shuffle(prompts)
    places = [next(at for at, entry in enumerate(prompts) if entry[2] == index) for index in range(len(PROMPTS))]
    return [entry[0] for entry in prompts], [entry[1] for entry in prompts], places


def in_a_crowd(llm: LLM, count: int) -> list:
    prompts, parameters, places = crowd(count)
    outputs = llm.generate(prompts, parameters)
    return [outputs[place] for place in places]


def tokens(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_another_seed_gives_another_text(one_device, alone):
    (output,) = one_device.generate(PROMPTS[0], SamplingParams(seed=7, max_tokens=TOKENS, ignore_eos=True))
    assert output.outputs[0].token_ids != alone[0]


def test_with_the_prefix_cached(one_device, alone):
    outputs = one_device.generate(list(PROMPTS), [params(index) for index in range(len(PROMPTS))])
    outputs = one_device.generate(list(PROMPTS), [params(index) for index in range(len(PROMPTS))])
    assert outputs[-1].num_cached_tokens >= 32
    assert tokens(outputs) == alone


def test_preempted_and_computed_again(one_device, alone):
    one_device.engine.core.flush_prefix_cache()
    pool = one_device.engine.core.scheduler.ranks[0].pool
    held = pool.allocate(pool.num_usable - 14)
    try:
        outputs = one_device.generate(list(PROMPTS), [params(index) for index in range(len(PROMPTS))])
    finally:
        pool.release(held)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert tokens(outputs) == alone


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "count"), [("dp=8", 64), ("dp=2,tp=2", 16)])
def test_in_a_crowd_on_another_mesh(mesh, count, alone):
    llm = load(mesh, (8,))
    try:
        ranks = []
        add = llm.engine.core.add
        llm.engine.core.add = lambda request: (add(request), ranks.append(request.rank))
        outputs = in_a_crowd(llm, count)
        assert len(set(ranks)) == llm.executor.limits.num_ranks
        assert tokens(outputs) == alone
    finally:
        llm.shutdown()
