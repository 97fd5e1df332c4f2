"""`Engine`: the capabilities of a serving engine, so that a plan is credited only with what its engine can do."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from dsjax.config import ModelConfig
from dsjax.errors import UserError
from dsjax.plan.precision import BF16, FP8_CACHE, Precision
from dsjax.toml_files import read_toml


@dataclass(frozen=True)
class Engine:
    """Capabilities of an engine, and how it computes."""

    name: str
    balances: bool  # places experts by their load
    overlaps: bool  # two-batch overlap
    transfers: bool  # sends caches from prefill to decode
    drafts: bool  # drafts with the MTP module, at most `most_drafts` a step
    fp4: bool  # loads FP4 experts
    fp8_cache: float | None  # bytes a value of its FP8 latent cache, None without one
    int8: bool  # loads block-wise INT8 weights
    shared_beside: bool  # decode computes the shared expert beside the routed ones
    holds_prompts: bool  # with attention DP, prompts wait until every replica has some
    mixes: bool  # a step of a DP rank has prompts and decodes; otherwise its decodes wait
    apart: bool  # attention–FFN disaggregation (AFD)
    of_models: str = ""  # for messages: the models for which it lacks something
    dispatch: str = "deepep"  # the default method
    # starts the kernels of a prefill step, and each pass of the MTP module, one by one; otherwise one compiled program contains them all
    eager: bool = True
    most_drafts: int | None = None
    widens_fp4: bool = False  # computes FP4 weights in bf16
    fp8_mla: bool = False  # decode multiplies an FP8 cache in FP8 on an H20
    # maximum operations a second (value, low, high) of dense FP8 products on Blackwell, of SGLang with `--fp8-gemm-backend
    # flashinfer_trtllm`
    fp8_rate: tuple[float, float, float] | None = None

    def serving(self, config: ModelConfig) -> Engine:
        """Return this engine without the capabilities that it lacks for this model."""
        lacks = _WITHOUT.get(config.model_type, {}).get(self.name)
        if lacks is None:
            return self
        able = {capability: None if capability == "fp8_cache" else False for capability in lacks}
        return dataclasses.replace(self, **able, of_models=f" of a {config.model_type} model")

    def precision(self, chosen: Precision) -> Precision:
        """Return the chosen precision with this engine's FP8 cache format, and FP4 only where the engine has it."""
        if self.widens_fp4:
            chosen = chosen.only_experts_packed()
        if chosen.cache >= BF16 or self.fp8_cache is None:
            return chosen
        return dataclasses.replace(chosen, cache=self.fp8_cache)


CREDITS: dict[str, dict[str, str]] = read_toml("credits", "engines", "credits")
_WITHOUT: dict[str, dict[str, list[str]]] = CREDITS.pop("without")
"""Family of models → engine → capabilities that it lacks for them."""
_HOW: dict[str, dict[str, Any]] = CREDITS.pop("how")
"""Engine → capability → the option or file of the engine that provides it; `words`: capability → its name in the docs."""
CAPABILITIES = tuple(CREDITS["words"])
"""Fields of `Engine` that improve a plan; an option or file must be named for each."""


def _engine(name: str, able: Collection[str], fp8_cache: float = 1.0) -> Engine:
    how = {capability: capability in able for capability in CAPABILITIES} | _HOW.get(name, {})
    return Engine(name, **{**how, "fp8_cache": fp8_cache if how["fp8_cache"] else None})


PUBLISHED = _engine("published", set(CAPABILITIES) - {"holds_prompts", "apart"})
"""SGLang and TensorRT-LLM with their published kernels and overlaps. fp8_mla: FlashMLA's pull request 82, which is in the image
`ghcr.io/antgroup/sglang:h20-blog-release` but not in SGLang's releases."""
_ENGINES = {"dsjax": _engine("dsjax", CREDITS["dsjax"], FP8_CACHE), "published": PUBLISHED}
_ENGINES |= {name: _engine(name, CREDITS[name]) for name in ("vllm", "sglang", "tensorrt-llm")}
ENGINES = tuple(_ENGINES)


def find_engine(name: str) -> Engine:
    """Return an engine by name. Raises `UserError` if there is none of that name."""
    if name not in _ENGINES:
        raise UserError(f"--engine is {name!r}, expected one of {', '.join(ENGINES)}")
    return _ENGINES[name]
