"""With --batch-invariant, what a request gets is the same to the bit, whatever is computed beside it, before it, and where."""

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import MODELS, TINY, write_checkpoint
from mixes import Sizes, given_to

from dsjax import LLM, SamplingParams
from dsjax.errors import UserError

NEW_TOKENS = 12
# Half of them begin alike, so that they share pages; the longest is several chunks.
RNG = np.random.default_rng(11)
SHARED = RNG.integers(2, TINY["vocab_size"], size=21).tolist()
PROMPTS = [SHARED[:cut] + RNG.integers(2, TINY["vocab_size"], size=rest).tolist() for cut, rest in
           ((0, 1), (0, 9), (21, 1), (21, 14), (16, 3), (0, 40), (8, 30), (21, 0))]  # fmt: skip
HALVES = {"enable_dbo": True, "dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 2}
MOST_PAGES = -(-(max(map(len, PROMPTS)) + NEW_TOKENS) // 4)
# What may change nothing: the mesh, stages, experts' widths over devices of several DP ranks, steps in two halves, drafts, steps that
# wait, experts that move, decodes beside prompts, and an embedding in host memory; and, drawn for each batch, chunks of prompts, tokens
# of a step, and a cache so small that requests are preempted.
ENGINES = {
    "dp=1": {},
    "pp=2": {"mesh": "pp=2"},
    "dp=2,tp=2, drafts, halves": {"mesh": "dp=2,tp=2", "async_scheduling": False, "embedding_location": "host", **HALVES,
                                  "speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
    "dp=2,tp=2,ep=1,etp=4": {"mesh": "dp=2,tp=2,ep=1,etp=4", "enable_prefix_caching": False},
    "dp=4": {"mesh": "dp=4", "dispatch": "hierarchical", "devices_per_host": 2, "enable_eplb": True, **HALVES,
             "eplb_config": {"num_redundant_experts": 4, "window_size": 4, "step_interval": 4, "payback": 0}},
}  # fmt: skip

OF_SPARSE = ("dp=1", "pp=2")
"""Those of V3.2's engines: its selection of tokens depends on neither experts nor their dispatch."""


# The simplest batch, which hypothesis draws first, is the longest prompt four times, in chunks of 8, with pages for one of them.
SIZES = st.builds(
    Sizes,
    chunk=st.sampled_from([8, 1, 3, 5, 16, 21, 32]),
    tokens=st.integers(8, 64),
    pages=st.integers(MOST_PAGES + 1, 2 * MOST_PAGES) | st.none(),
)


@pytest.fixture(scope="module", params=MODELS)
def ask(request, tmp_path_factory, kernels):
    """``ask(engine, [(prompt, seed or None), …], sizes)``: what each got of an engine of ``ENGINES``, all asked at once.

    told: whether they ask for the log-probabilities of their prompts, which are computed for it and read nothing of the prefix cache.
    """
    changed = MODELS[request.param]
    if changed:  # a kind of layer less to compile: V3's dense layers are in its own checkpoint
        changed = changed | {"first_k_dense_replace": 0}
    directory = write_checkpoint(tmp_path_factory.mktemp("exact"), mtp=True, **changed)
    running = {}

    def engine(name):
        if name not in running:
            options = {"prefill_chunk": 32, "max_num_batched_tokens": 64} | ENGINES[name]
            running[name] = LLM(
                str(directory), dtype="float32", batch_invariant=True, max_num_seqs=8, page_size=4, **options
            )
            # On one device rows alone and rows beside others are in shapes of their own; elsewhere one shape is compiled for both.
            if "mesh" in options:
                executor = getattr(running[name].executor, "inner", running[name].executor)
                executor.buckets = dataclasses.replace(executor.buckets, decode=executor.buckets.decode[-1:])
            assert running[name].executor.model.is_exact
        return running[name]

    def ask(name, requests, sizes=Sizes(), told=True):
        params = [
            SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, logprobs=0, prompt_logprobs=0 if told else None,
                           **({"temperature": 0} if seed is None else {"temperature": 0.8, "seed": seed}))
            for _, seed in requests
        ]  # fmt: skip
        with sizes.hold(engine(name).engine.core.scheduler):
            outputs = engine(name).generate([{"prompt_token_ids": PROMPTS[prompt]} for prompt, _ in requests], params)
        return [given_to(output) for output in outputs]

    yield ask
    for llm in running.values():
        llm.shutdown()


@pytest.fixture(scope="module")
def alone(ask):
    """What a request gets alone, of one device."""
    return functools.cache(lambda *request: ask("dp=1", [request])[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ask", "name"), [("v3", name) for name in ENGINES] + [("v3.2", name) for name in OF_SPARSE], indirect=["ask"]
)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    requests=st.lists(
        st.tuples(st.sampled_from([5, 3, 6, 1, 4, 2, 7, 0]), st.sampled_from([None, None, 7])), min_size=4, max_size=9
    ),
    sizes=SIZES,
)
def test_a_request_gets_to_the_bit_what_it_gets_alone_on_one_device(ask, alone, name, requests, sizes):
    for request, found in zip(requests, ask(name, requests, sizes), strict=True):
        assert found == alone(*request)


@pytest.mark.slow
def test_what_a_turn_made_is_the_same_as_prompt_of_the_next(ask):
    """A decode's cache entries are those of a prompt: whether they are cached or computed again, the next turn is the same."""
    (first,) = ask("dp=1", [(5, None)])
    PROMPTS.append(PROMPTS[5] + list(first.tokens))
    try:
        (cached,), (anew,) = ask("dp=1", [(8, None)], told=False), ask("dp=2,tp=2,ep=1,etp=4", [(8, None)])
        assert cached.of_cache > len(PROMPTS[5])
        assert dataclasses.replace(cached, prompt_logprobs=anew.prompt_logprobs) == anew
        assert anew.prompt_logprobs[len(PROMPTS[5]) - 1 :] == first.logprobs
    finally:
        PROMPTS.pop()


def test_forms_that_compute_prompts_and_decodes_differently_are_refused(tmp_path, kernels):
    directory = write_checkpoint(tmp_path)
    with pytest.raises(UserError, match="--mla-prefill is CC, --mla-decode A_CC_ME; leave --mla-prefill out"):
        LLM(str(directory), dtype="float32", batch_invariant=True, mla_prefill="CC")


@pytest.mark.parametrize(
    ("options", "why"),
    [({"kernels": "plain"}, "--kernels leaves plain ones"), ({"dtype": "bfloat16"}, "--dtype is bfloat16")],
)
def test_what_leaves_products_to_xla_is_refused_with_the_reason(tmp_path, options, why):
    directory = write_checkpoint(tmp_path)
    with pytest.raises(UserError, match=why):
        LLM(str(directory), **{"dtype": "float32", "batch_invariant": True} | options)
