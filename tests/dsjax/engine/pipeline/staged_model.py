"""The engine of the tests of experts that move at pipeline stages, and how its answers are compared."""

from pathlib import Path

import numpy as np
from balanced_model import OFTEN, load

from dsjax import LLM
from dsjax.engine.experts.expert_balancer import ExpertBalancer


def load_stages(checkpoint: Path) -> LLM:
    """Three stages: the dense layer, a layer with experts, and another one with the MTP module behind it.

    Drafts, and a cache that is too small for all requests of `generate` at a time. Experts stay until `follow_load`.
    """
    options = {"mla_prefill": "CC", "mla_decode": "CC", "dispatch": "padded", "cache_tokens": 76}
    drafts = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
    llm = load(checkpoint, "pp=3,dp=2", eplb=OFTEN, **drafts, **options)
    llm.engine.core.part(ExpertBalancer)._mover = None
    return llm


def follow_load(llm: LLM) -> None:
    """Let experts move from now on, by the executor that the engine has now."""
    core = llm.engine.core
    balancer = core.part(ExpertBalancer)
    pool, balancer._pool = balancer._pool, None
    balancer.start(core.executor, llm.args.scheduler_config(core.executor.limits))
    balancer._pool = pool


def assert_same_answer(found, reference) -> None:
    assert [one.tokens for one in found] == [list(tokens) for tokens in reference.tokens]
    assert [one.logprobs for one in found] == reference.logprobs
    assert all(np.isfinite(one.logprobs).all() and one.logprobs for one in found)
