"""What a request gets is the same to the bit, whatever is computed beside it, before it, and where."""

import contextlib
import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import TINY, write_checkpoint
from mixes import Sizes, given_to

from dsjax import LLM, SamplingParams
from dsjax.model.softmax import log_softmax

NEW_TOKENS = 12
# Half of them begin alike, so that they share pages; the longest is several chunks.
RNG = np.random.default_rng(11)
SHARED = RNG.integers(2, TINY["vocab_size"], size=21).tolist()
PROMPTS = [SHARED[:cut] + RNG.integers(2, TINY["vocab_size"], size=rest).tolist() for cut, rest in
           ((0, 1), (0, 9), (21, 1), (21, 14), (16, 3), (0, 40), (8, 30), (21, 0))]  # fmt: skip
HALVES = {"enable_dbo": True, "dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 2}
KINDS = (
    {"temperature": 0},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.0, "seed": 8, "top_p": 0.9},
    {"temperature": 0.8, "seed": 9, "top_k": 50, "min_p": 0.02, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 1.2, "seed": 10, "repetition_penalty": 1.1, "logit_bias": {10: -5.0}, "top_p": 0.95},
)
"""How requests draw their tokens."""
MOST_PAGES = -(-(max(map(len, PROMPTS)) + NEW_TOKENS) // 4)
MESH = "dp=2,tp=2,ep=2,etp=2"
# What may change nothing: the mesh, experts' widths over devices of several DP ranks, steps that do not wait, steps in two halves, drafts,
# experts that move, decodes beside prompts, and an embedding in host memory; and, drawn for each batch, chunks of prompts, tokens of a
# step, and a cache so small that requests are preempted. Other combinations: `tools/check_mixes.py`. `pipeline/test_experts_of_stages.py`
# has stages, `test_disaggregated.py` V3.2 beside others, `test_layouts.py` V3.2 on other meshes and preempted.
ENGINES = {
    "dp=1": {"async_scheduling": False},
    MESH: {
        "dispatch": "hierarchical", "devices_per_host": 2, "enable_eplb": True, "embedding_location": "host", **HALVES,
        "eplb_config": {"num_redundant_experts": 4, "window_size": 4, "step_interval": 4, "payback": 0},
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
}  # fmt: skip
# The simplest batch, which hypothesis draws first, is the longest prompt four times, in chunks of 8, with pages for one of them.
CHUNKS, PAGES = st.sampled_from([8, 1, 3, 5, 16, 21, 32]), st.integers(MOST_PAGES + 1, 2 * MOST_PAGES)
SIZES = st.builds(Sizes, chunk=CHUNKS, tokens=st.integers(8, 64), pages=PAGES)
REQUESTS = st.tuples(st.sampled_from([5, 3, 6, 1, 4, 2, 7, 0]), st.sampled_from([0, 1, 3, 2, 4]))


@pytest.fixture(scope="module")
def engines(tmp_path_factory, kernels):
    """``engines(mesh, **options)``: the engine of ``ENGINES`` on that mesh, made when it is first asked for."""
    checkpoint = str(write_checkpoint(tmp_path_factory.mktemp("exact"), mtp=True))
    sizes = {"max_num_seqs": 8, "page_size": 4, "prefill_chunk": 32, "max_num_batched_tokens": 64}
    with contextlib.ExitStack() as running:

        @functools.cache
        def engine(mesh, **options):
            llm = running.enter_context(
                LLM(checkpoint, mesh=mesh, dtype="float32", **sizes, **ENGINES[mesh], **options)
            )
            # On one device rows alone and rows beside others are in shapes of their own; elsewhere one shape is compiled for both.
            if mesh == MESH:
                executor = getattr(llm.executor, "inner", llm.executor)
                executor.buckets = dataclasses.replace(executor.buckets, decode=executor.buckets.decode[-1:])
            assert llm.executor.model.is_exact
            return llm

        yield engine


@pytest.fixture(scope="module")
def ask(engines):
    """``ask(mesh, [(prompt, kind), …], sizes)``: what each got of an engine of ``ENGINES``, all asked at once.

    told: whether they ask for the log-probabilities of their prompts, which are computed for it and read nothing of the prefix cache.
    """

    def asked(mesh, requests, sizes=Sizes(), told=True, **options):
        fixed = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "detokenize": False, "logprobs": 0}
        fixed["prompt_logprobs"] = 0 if told else None
        params = [SamplingParams(**fixed, **KINDS[kind]) for _, kind in requests]
        llm = engines(mesh, **options)
        with sizes.hold(llm.engine.core.scheduler):
            outputs = llm.generate([{"prompt_token_ids": PROMPTS[prompt]} for prompt, _ in requests], params)
        return [given_to(output) for output in outputs]

    return asked


@pytest.fixture(scope="module")
def alone(ask):
    return functools.cache(lambda *request: ask("dp=1", [request])[0])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ENGINES)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(requests=st.lists(REQUESTS, min_size=4, max_size=9), sizes=SIZES)
def test_a_request_gets_to_the_bit_what_it_gets_alone_on_one_device(ask, alone, mesh, requests, sizes):
    for request, found in zip(requests, ask(mesh, requests, sizes), strict=True):
        assert found == alone(*request)


@pytest.mark.slow
def test_a_prompts_last_token_alone_is_computed_as_the_prompt_is(ask, alone):
    """The rest of the prompt was cut off as a chunk, or found in the prefix cache."""
    assert len(PROMPTS[1]) == 9
    (cut,) = ask("dp=1", [(1, 0)], Sizes(chunk=8))
    assert cut == alone(1, 0)
    ask("dp=1", [(5, 0)], told=False)
    (cached,) = ask("dp=1", [(5, 0)], told=False)
    assert cached.of_cache == len(PROMPTS[5]) - 1
    assert dataclasses.replace(cached, prompt_logprobs=alone(5, 0).prompt_logprobs) == alone(5, 0)


@pytest.mark.slow
def test_what_a_turn_made_is_the_same_as_prompt_of_the_next_with_one_form_for_both(ask):
    """With `batch_invariant`, whether an answer's pages are cached or computed again, the next turn is the same."""
    (first,) = ask("dp=1", [(5, 0)], batch_invariant=True)
    PROMPTS.append(PROMPTS[5] + list(first.tokens))  # number 8
    (cached,) = ask("dp=1", [(8, 0)], told=False, batch_invariant=True)
    (anew,) = ask(MESH, [(8, 0)], batch_invariant=True)
    assert cached.of_cache > len(PROMPTS[5])
    assert dataclasses.replace(cached, prompt_logprobs=anew.prompt_logprobs) == anew
    assert anew.prompt_logprobs[len(PROMPTS[5]) - 1 :] == first.logprobs


@pytest.mark.slow
def test_log_probabilities_are_those_of_the_logits(engines):
    llm = engines("dp=1", batch_invariant=True)  # logits are those of a prompt
    bias = {7: 3.0}  # it decides, and log-probabilities are those without it
    params = SamplingParams(seed=1, max_tokens=6, ignore_eos=True, logprobs=3, detokenize=False, logit_bias=bias)
    (output,) = llm.generate({"prompt_token_ids": PROMPTS[1]}, params)
    (completion,) = output.outputs
    (logits,) = llm.logits([output.prompt_token_ids + completion.token_ids])
    exact = np.asarray(log_softmax(logits[len(PROMPTS[1]) - 1 : -1]))
    total = 0.0
    for row, token, entries in zip(exact, completion.token_ids, completion.logprobs, strict=True):
        assert {candidate: entry.logprob for candidate, entry in entries.items()} == {c: row[c] for c in entries}
        assert set(np.argsort(-row)[:3]) <= set(entries)
        assert entries[token].rank == 1 + np.sum(row > row[token])
        total += entries[token].logprob
    assert completion.cumulative_logprob == total
