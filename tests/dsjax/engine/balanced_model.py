"""A tiny model whose experts follow the load, for tests of the exchange and of the engine around it."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from layouts import TINY, InlinePool, prompts

from dsjax import LLM, SamplingParams
from dsjax.engine.contract.commands import PlaceExperts, StageExperts, int32s
from dsjax.engine.device.buckets import Buckets, Rectangle
from dsjax.engine.experts.eplb import ExpertMover
from dsjax.engine.experts.expert_balancer import ExpertBalancer
from sharding.layer_placement import exchange_rounds


def load(directory: Path, mesh: str, *, eplb: dict | None = None, dtype: str = "float32", **options) -> LLM:
    """eplb: over 8 redundant experts and a window that never ends.

    Prompts are computed in the form of decodes, so that it does not matter whether one is cached.
    """
    config = {"num_redundant_experts": 8, "window_size": 10**6, "step_interval": 10**6} | (eplb or {})
    llm = LLM(
        str(directory),
        mesh=mesh,
        dtype=dtype,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        prefill_chunk=16,
        page_size=4,
        enable_eplb=True,
        eplb_config=config,
        **{"mla_prefill": "A_CC_ME"} | options,
    )
    llm.engine.core.part(ExpertBalancer)._pool = InlinePool()
    executor = getattr(llm.executor, "inner", llm.executor)
    speculation = executor.buckets.speculation
    executor.buckets = Buckets(decode=(8,), prefill=(Rectangle(2, 16),), mixed=False, speculation=speculation)
    return llm


class Generated(NamedTuple):
    """A continuation, and its log-probabilities where these are exact."""

    tokens: list[int]
    logprobs: list[float]


def generate(llm: LLM, tokens: int = 12) -> list[Generated]:
    """Greedy continuations of the eight prompts."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0)
    exact, found = llm.executor.model.is_exact, []
    for output in llm.generate(prompts(), params):
        (made,) = output.outputs
        logprobs = [entry[token].logprob for token, entry in zip(made.token_ids, made.logprobs, strict=True)]
        found.append(Generated(list(made.token_ids), logprobs if exact else []))
    return found


def random_row(rng, slots: int) -> np.ndarray:
    experts = TINY["n_routed_experts"]
    return rng.permutation(np.concatenate([np.arange(experts), rng.integers(0, experts, slots - experts)]))


def move(llm: LLM, layer: int, row: np.ndarray) -> list[str | None]:
    """Place one layer anew; what went wrong with each command."""
    executor, slots = llm.executor, llm.executor.extension(ExpertMover).slots
    old, errors = slots.physical_to_logical[layer], []
    for moves in exchange_rounds(old, row, ranks=slots.ranks, experts=slots.per_exchange):
        pairs = int32s(int(slot) for pair in moves for slot in pair)
        errors.append(executor.collect(executor.launch(StageExperts(layer, pairs))).error)
    command = PlaceExperts(layer, int32s(np.flatnonzero(old != row).tolist()), int32s(row.tolist()))
    errors.append(executor.collect(executor.launch(command)).error)
    return errors


def move_all(llm: LLM, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for layer, old in enumerate(llm.executor.extension(ExpertMover).slots.physical_to_logical):
        assert not any(move(llm, layer, random_row(rng, len(old))))
