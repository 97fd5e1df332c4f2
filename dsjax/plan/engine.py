"""`Engine`: what a serving program can do, so that nothing is credited to a plan which the program that runs it lacks."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from dsjax.errors import UserError
from dsjax.plan.precision import BF16, FP8_CACHE, Precision
from dsjax.toml_files import read_toml


@dataclass(frozen=True)
class Engine:
    """Capabilities, and how the engine computes and admits.

    balances: places experts by their load. overlaps: two half batches. transfers: sends caches from prefill to decode. drafts: makes them
    with the MTP module, at most `most_drafts` a step. fp4: loads FP4 experts; widens_fp4: multiplies by them in bf16. int8: loads
    block-wise INT8 weights. fp8_cache: bytes a value of its FP8 latent cache, None without one. shared_beside: decode computes the shared
    expert beside the routed ones. holds_prompts: with attention DP, prompts wait until every replica has some. mixes: a step of a DP rank
    has prompts and decodes; otherwise its decodes wait. apart: attention and experts on devices of their own.

    dispatch: the default method. eager: starts the kernels of a prefill step, and each pass of the MTP module, one by one; otherwise one
    compiled program has all of them. captured: the most tokens of a prefill step in CUDA graphs, between which attention runs. fp8_mla:
    decode multiplies an FP8 cache in FP8 on an H20. fp8_rate: the most operations a second (value, low, high) of dense FP8 products on
    Blackwell, of SGLang with `--fp8-gemm-backend flashinfer_trtllm`. absorbs_below: cached positions of a step's prompts below which, if
    there are any, all of the step uses absorbed attention; not on Blackwell. gathers: with attention DP, experts get all ranks' tokens by
    collectives instead of an all-to-all, as in SGLang with `--moe-a2a-backend none`, its default: a step with prompts sums tokens and
    results over all ranks (`DpPaddingMode` in its srt/layers/dp_attention.py), a step of decodes gathers and scatters.

    For simulations (`simulation.admission`): poll_steps: decode steps between two looks for new prompts; hold_steps: the most steps that
    prompts are held back; fill: (steps, share of a step's tokens) until which one replica holds them back; keeps: share of the running
    requests' remaining outputs that the cache keeps room for; knows_ends: it keeps room for exactly the given length of a request.
    """

    name: str
    balances: bool
    overlaps: bool
    transfers: bool
    drafts: bool
    fp4: bool
    fp8_cache: float | None
    int8: bool
    shared_beside: bool
    holds_prompts: bool
    mixes: bool
    apart: bool
    dispatch: str = "deepep"
    eager: bool = True
    most_drafts: int | None = None
    widens_fp4: bool = False
    captured: int = 0
    fp8_mla: bool = False
    fp8_rate: tuple[float, float, float] | None = None
    absorbs_below: int = 0
    gathers: bool = False
    poll_steps: int = 1
    hold_steps: int = 50
    fill: tuple[int, float] = (0, 0.0)
    keeps: tuple[float, float, int] = (0.0, 0.0, 1)
    knows_ends: bool = False

    def precision(self, chosen: Precision) -> Precision:
        """What was chosen, with an FP8 cache as this engine keeps it, and FP4 where it has it."""
        if chosen.expert < 1 and self.widens_fp4:
            chosen = chosen.only_experts_in_fp4()
        if chosen.cache >= BF16 or self.fp8_cache is None:
            return chosen
        return dataclasses.replace(chosen, cache=self.fp8_cache)


CREDITS: dict[str, dict[str, str]] = read_toml("credits", "engines", "credits")
_HOW: dict[str, dict[str, Any]] = CREDITS.pop("how")
"""Engine → capability → the option or file of the engine that has it; `words`: capability → what a page calls it."""
CAPABILITIES = tuple(CREDITS["words"])
"""Fields of `Engine` that make a plan better, and that something must be named for."""


def _engine(name: str, able: Collection[str], fp8_cache: float = 1.0) -> Engine:
    how = {what: what in able for what in CAPABILITIES} | _HOW.get(name, {})
    how = {what: tuple(value) if isinstance(value, list) else value for what, value in how.items()}
    return Engine(name, **{**how, "fp8_cache": fp8_cache if how["fp8_cache"] else None})


PUBLISHED = _engine("published", set(CAPABILITIES) - {"holds_prompts"})
"""SGLang and TensorRT-LLM with the kernels and overlaps that they publish, and attention and experts apart as papers of MegaScale-Infer,
StepFun and Baidu Baige have it; fp8_mla: FlashMLA's pull request 82, which the image `ghcr.io/antgroup/sglang:h20-blog-release` has and
SGLang's releases have not."""
_ENGINES = {"dsjax": _engine("dsjax", CREDITS["dsjax"], FP8_CACHE), "published": PUBLISHED}
_ENGINES |= {name: _engine(name, CREDITS[name]) for name in ("vllm", "sglang", "tensorrt-llm")}
ENGINES = tuple(_ENGINES)


def find_engine(name: str) -> Engine:
    """By name.

    Raises:
        UserError: no such engine.
    """
    if name not in _ENGINES:
        raise UserError(f"--engine is {name!r}, expected one of {', '.join(ENGINES)}")
    return _ENGINES[name]
