"""A tiny model whose experts follow the load, for tests of the exchange and of the engine around it."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array
from layouts import TINY, decide_at_once, prompts

from dsjax import LLM, SamplingParams
from dsjax.engine.contract.commands import PlaceExperts, ReadLoads, StageExperts, int32s
from dsjax.engine.device.buckets import Buckets, Rectangle
from dsjax.engine.experts.eplb import ExpertMover, ExpertSlots, LoadWindow
from dsjax.engine.experts.expert_balancer import ExpertBalancer
from sharding.layer_placement import exchange_rounds

SIZES = {"dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 32, "prefill_chunk": 16, "page_size": 4}
"""What `layouts.answer` takes."""
OFTEN = {"window_size": 4, "step_interval": 4, "payback": 0}


def few_buckets(llm: LLM) -> None:
    """Let an engine of these sizes have one shape for decodes and one for prompts."""
    executor = getattr(llm.executor, "inner", llm.executor)
    speculation = executor.buckets.speculation
    executor.buckets = Buckets(decode=(8,), prefill=(Rectangle(2, 16),), mixed=False, speculation=speculation)


def load(directory: Path, mesh: str, *, eplb: dict | None = None, **options) -> LLM:
    """eplb: over 8 redundant experts and a window that never ends.

    Prompts are computed in the form of decodes, so that it does not matter whether one is cached.
    """
    config = {"num_redundant_experts": 8, "window_size": 10**6, "step_interval": 10**6} | (eplb or {})
    options = SIZES | {"mla_prefill": "A_CC_ME", "enable_eplb": True, "eplb_config": config} | options
    llm = LLM(str(directory), mesh=mesh, **options)
    decide_at_once(llm)
    few_buckets(llm)
    return llm


@contextlib.contextmanager
def experts_stay(llm: LLM) -> Iterator[None]:
    balancer = llm.engine.core.part(ExpertBalancer)
    mover, balancer._mover = balancer._mover, None
    yield
    balancer._mover = mover


class Generated(NamedTuple):
    tokens: list[int]
    logprobs: list[float]


def generate(llm: LLM, tokens: int = 12) -> list[Generated]:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0)
    exact, found = llm.executor.model.is_exact, []
    for output in llm.generate(prompts(), params):
        (made,) = output.outputs
        logprobs = [entry[token].logprob for token, entry in zip(made.token_ids, made.logprobs, strict=True)]
        found.append(Generated(list(made.token_ids), logprobs if exact else []))
    return found


def loads_of(llm: LLM) -> LoadWindow:
    return llm.executor.collect(llm.executor.launch(ReadLoads()))


def slots_of(llm: LLM) -> ExpertSlots:
    return llm.executor.extension(ExpertMover).slots


def by_expert(parameter: Array, rows: np.ndarray) -> np.ndarray:
    """A parameter's values by logical expert, from whichever slots have it; all copies must be the same.

    rows: the placement of its layers.
    """
    slots = np.asarray(parameter)
    values = np.zeros((len(slots), TINY["n_routed_experts"], *slots.shape[2:]), slots.dtype)
    for layer, row in enumerate(rows):
        values[layer, row] = slots[layer]
        np.testing.assert_array_equal(values[layer, row], slots[layer])
    return values


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for path, values in expected.items():
        np.testing.assert_array_equal(found[path], values)


def failing_to(kind: str, programs, lost: int = 0) -> Callable:
    get = programs.get
    return lambda wanted, *arguments: failing(lost) if wanted == kind else get(wanted, *arguments)


def failing(lost: int = 0) -> Callable:
    """A program that fails, and takes its first ``lost`` arguments with it."""

    def fail(*arguments):
        for array in jax.tree.leaves(arguments[:lost]):
            array.delete()
        raise RuntimeError("the device said no")

    return fail


def random_row(rng, slots: int) -> np.ndarray:
    experts = TINY["n_routed_experts"]
    return rng.permutation(np.concatenate([np.arange(experts), rng.integers(0, experts, slots - experts)]))


def stage(llm: LLM, layer: int, row: np.ndarray) -> Iterator[str | None]:
    """Stage a layer's experts round by round; give the error of each."""
    executor, slots = llm.executor, slots_of(llm)
    old = slots.physical_to_logical[layer]
    for moves in exchange_rounds(old, row, ranks=slots.ranks, experts=slots.per_exchange):
        pairs = int32s(int(slot) for pair in moves for slot in pair)
        yield executor.collect(executor.launch(StageExperts(layer, pairs))).error


def move(llm: LLM, layer: int, row: np.ndarray) -> list[str | None]:
    errors, executor = list(stage(llm, layer, row)), llm.executor
    changed = np.flatnonzero(slots_of(llm).physical_to_logical[layer] != row)
    command = PlaceExperts(layer, int32s(changed.tolist()), int32s(row.tolist()))
    return [*errors, executor.collect(executor.launch(command)).error]


def move_all(llm: LLM, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for layer, old in enumerate(slots_of(llm).physical_to_logical):
        assert not any(move(llm, layer, random_row(rng, len(old))))
