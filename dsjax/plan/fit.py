"""`dsjax plan fit`: whether an engine can start and serve a layout in its devices' memory, by the engine's own memory rule."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from dsjax.plan.figure import Draw, Figure, Kind, assumed, assumption, drawing, spread
from dsjax.plan.layout import parse_layout
from dsjax.plan.memory import stage_shares, weight_bytes
from dsjax.plan.precision import BF16
from dsjax.plan.rules import refuse
from dsjax.texts import filled

if TYPE_CHECKING:
    from dsjax.config import ModelConfig
    from dsjax.plan.layout import InstanceLayout
    from dsjax.plan.precision import Precision
    from dsjax.plan.workload import Asked, PlanOptions

PROFILED, STATIC, FREE = "profiled", "static", "free"
RULES = {
    "dsjax": (PROFILED, 0.90),
    "published": (PROFILED, 0.90),
    "vllm": (PROFILED, 0.90),
    "sglang": (STATIC, 0.85),
    "tensorrt-llm": (FREE, 0.90),
}
"""Engine → (what its memory fraction is a fraction of, its default).

`profiled`: of the whole device, for everything except captured graphs, including a step's peak (vLLM's `--gpu-memory-utilization`); the
cache must hold the longest request. `static`: of the memory that is free at startup, for weights and cache only; steps and graphs use the
rest (SGLang's `--mem-fraction-static`). `free`: of the memory that weights and a step's peak leave free, for the cache
(TensorRT-LLM's `free_gpu_memory_fraction`)."""
_MOST_EXPERT_TOKENS = 32768
"""Most tokens whose routed experts vLLM and SGLang compute at once (vLLM: `VLLM_FUSED_MOE_CHUNK_SIZE`). TensorRT-LLM computes those of all
replicas unless `moe_config.max_num_tokens` is set (default: a step's tokens × the replicas)."""
_WHOLE_EXPERTS = ("vllm", "tensorrt-llm", "published", "dsjax")
"""Engines whose DP ranks share whole experts, so that the arrays between the two matmuls are as wide as an expert (vLLM's
`fused_experts`: `[tokens, top-k, 2 × width]`). SGLang splits every expert over all devices unless DeepEP is on."""
_LOW_LATENCY_TOKENS = 128
"""Tokens per rank for which DeepEP's decode kernels keep buffers, as in its README."""
_DRAWS = 64  # for the figures' intervals
DOES_NOT_FIT = 3
"""Exit status of `dsjax plan fit` if a launch does not fit."""


@dataclass(frozen=True)
class Launch:
    """How an engine is started."""

    engine: str  # of `RULES`
    device_bytes: int  # memory of a device, as its driver reports it
    fraction: float | None = None  # None for the engine's default of `RULES`
    prefill_tokens: int = 8192  # most prompt tokens of a DP rank in a step
    longest: int = 4096  # tokens of the longest request
    sampled: int = 256  # rows of a step that sample
    graphs: bool = True  # whether decode steps are captured as CUDA graphs
    deepep: bool = False  # whether experts are dispatched with DeepEP
    mtp: bool = False  # whether the MTP module is loaded

    def __post_init__(self):
        refuse("fraction", fraction=self.fraction)

    @property
    def memory_fraction(self) -> float:
        """The given memory fraction or the engine's default."""
        return RULES[self.engine][1] if self.fraction is None else self.fraction


@dataclass(frozen=True)
class Condition:
    """A need that must fit in a part of a device's memory, in bytes."""

    name: str  # what is needed, and where
    needed: Figure
    room: Figure
    left: Figure  # room − needed, negative if it does not fit


@dataclass(frozen=True)
class Verdict:
    """Whether a launch fits."""

    launch: Launch
    layout: InstanceLayout
    parts: tuple[Figure, ...]  # of `_parts`
    conditions: tuple[Condition, ...]
    cache_tokens: Figure  # per DP rank
    fractions: tuple[float, float] | None  # the lowest and the highest memory fraction that would fit, or None

    @property
    def fits(self) -> bool:
        """Whether the estimates fit."""
        return all(condition.left >= 0 for condition in self.conditions)

    @property
    def sure(self) -> bool:
        """Whether the whole interval leads to the same result as the estimate."""
        if self.fits:
            return all(condition.left.low >= 0 for condition in self.conditions)
        return any(condition.left.high < 0 for condition in self.conditions)

    @property
    def words(self) -> str:
        """`fits`, `does not fit`, or either with `probably`."""
        return ("" if self.sure else "probably ") + ("fits" if self.fits else "does not fit")

    def to_json(self) -> dict[str, Any]:
        """Stable fields; figures as `Figure.to_json`."""
        conditions = [{"what": c.name, "needed": c.needed.to_json(), "room": c.room.to_json()} for c in self.conditions]
        return {
            "fits": self.fits,
            "sure": self.sure,
            "mesh": str(self.layout.mesh),
            "redundant_experts": self.layout.redundant,
            "memory_fraction": self.launch.memory_fraction,
            "device_bytes": self.launch.device_bytes,
            "parts": {part.name: part.to_json() | {"source": part.source} for part in self.parts},
            "conditions": conditions,
            "cache_tokens_per_dp_rank": self.cache_tokens.to_json(),
            "fractions_that_fit": list(self.fractions) if self.fractions else None,
        }


def fit(config: ModelConfig, layout: InstanceLayout, precision: Precision, launch: Launch) -> Verdict:
    """Return whether a launch fits, with the figures."""
    with drawing(Draw()):
        parts = _parts(config, layout, precision, launch)
    per_token = max(share.cache_per_token for share in stage_shares(config, layout, precision, launch.mtp))
    needs_at = lambda fraction: _apply_rule(launch, fraction, parts, per_token)[0]  # noqa: E731
    fractions = [n / 100 for n in range(30, 100)]
    fitting = [f for f in fractions if all(need.room >= need.needed for need in needs_at(f))]

    def compute() -> list[float]:
        drawn = _parts(config, layout, precision, launch)
        needs, cache = _apply_rule(launch, launch.memory_fraction, drawn, per_token)
        of_needs = [value for _, needed, room in needs for value in (needed, room, room - needed)]
        return [*drawn.values(), *of_needs, max(0.0, cache / per_token)]

    *figures, cache_tokens = spread(compute, _DRAWS)
    part_figures, rest = tuple(figures[: len(parts)]), iter(figures[len(parts) :])
    for (name, part), figure in zip(parts.items(), part_figures, strict=True):
        figure.name, figure.unit = name, "B"
        figure.kinds, figure.source = getattr(part, "kinds", Kind.EXACT), getattr(part, "source", "")
    needs = needs_at(launch.memory_fraction)
    conditions = tuple(Condition(need.name, next(rest), next(rest), next(rest)) for need in needs)
    ends = (fitting[0], fitting[-1]) if fitting else None
    return Verdict(launch, layout, part_figures, conditions, cache_tokens, ends)


def fit_mesh(question: Asked, mesh: str, fraction: float | None = None, longest: int | None = None) -> Verdict:
    """Judge the layout that a user gives to `dsjax plan fit`. longest: tokens of the longest request; None: the workload's mean.

    Raises:
        UserError: more devices than the cluster has, a fraction out of range, or an option that the engine or the model lacks.
        MeshError: the mesh does not parse, or does not fit the model.
    """
    config, cluster, options = question.config, question.cluster, question.options
    options.check_launch(config, question.workload)
    layout = dataclasses.replace(parse_layout(mesh, options.redundant, config), fused=options.fused)
    refuse("fit", layout=layout, cluster=cluster)
    longest = longest or math.ceil(question.workload.held)
    launch = planned_launch(options, cluster.hardware.visible_bytes, layout, longest, fraction)
    return fit(config, layout, options.precision, launch)


def planned_launch(
    options: PlanOptions, device_bytes: int, layout: InstanceLayout, longest: int, fraction: float | None = None
) -> Launch:
    """Return the launch that a plan assumes for a layout. longest: tokens of the longest request."""
    return Launch(
        engine=options.engine.name,
        device_bytes=device_bytes,
        fraction=fraction,
        prefill_tokens=options.prefill_tokens,
        longest=longest,
        graphs=options.engine.name != "dsjax",
        deepep=options.dispatch == "deepep" and layout.mesh.dp_size > 1,
        mtp=options.drafts > 0,
    )


def set_aside(config: ModelConfig, layout: InstanceLayout, precision: Precision, launch: Launch) -> float:
    """Return a device's bytes for all but loaded weights and cache. At the highest fraction that fits, they are the same by all `RULES`."""
    parts = _parts(config, layout, precision, launch)
    loaded = sum(weight_bytes(config, layout, precision, launch.mtp).values())
    return parts["weights"] - loaded + parts["step"] + parts["graphs"] + parts["outside"]


class _Need(NamedTuple):
    name: str
    needed: float
    room: float


def _apply_rule(launch: Launch, fraction: float, parts: dict[str, float], per_token: int) -> tuple[list[_Need], float]:
    """Apply the engine's rule of `RULES`: return what must fit where, and the bytes left for the cache. per_token: bytes in the cache."""
    device, rule = launch.device_bytes, RULES[launch.engine][0]
    weights, step, graphs, outside = (parts[name] for name in ("weights", "step", "graphs", "outside"))
    captured = "captured graphs, in what the fraction leaves"
    if rule == STATIC:
        available = device - outside
        if "draft" in parts:  # its weights and its own graphs
            weights, step = weights - parts["draft"], step + parts["draft"] + graphs
        needed = weights + launch.prefill_tokens * per_token
        return [
            _Need("weights and the cache of one step of prompts", needed, available * fraction),
            _Need("a step and captured graphs, in what the fraction leaves", step + graphs, available * (1 - fraction)),
        ], available * fraction - weights
    needed = weights + step + outside
    if rule == FREE:
        return [
            _Need("weights, a step and what lies outside the framework", needed, device),
            _Need(captured, graphs, (device - needed) * (1 - fraction)),
        ], (device - needed) * fraction
    name = f"weights, a step and the cache of one request of {launch.longest:,} tokens"
    return [
        _Need(name, needed + launch.longest * per_token, device * fraction),
        _Need(captured, graphs, device * (1 - fraction)),
    ], device * fraction - needed


def _parts(config: ModelConfig, layout: InstanceLayout, precision: Precision, launch: Launch) -> dict[str, float]:
    """Return the bytes of a device by part: `weights`; `step`: a step's peak; `graphs`; `outside` the framework: driver, contexts,
    communication buffers; and, with SGLang and MTP, `draft`: the part of the weights that belongs to the draft model.

    DeepEP's decode kernels keep two copies of a sent and a received bf16 row for each expert and token (its
    `get_low_latency_rdma_size_hint`). SGLang loads the draft model after allocating the main model's static share, so the draft's weights
    and graphs use the memory that the fraction leaves (sgl-project/sglang issue 6875; builds of 2026 count them,
    SemiAnalysisAI/InferenceX issue 2128).
    """
    several = "driver, contexts, communication of several devices"
    driver = several if layout.devices > 1 else "driver, contexts, communication of one device"
    sizes = {
        "weights": _weights(config, layout, precision, launch.engine, launch.mtp),
        "step": _step(config, layout, launch),
        "graphs": assumption("captured graphs") if launch.graphs else 0,
        "outside": assumption(driver),
    }
    if launch.deepep:
        experts = config.n_routed_experts + layout.redundant
        buffers = 2 * 2 * _LOW_LATENCY_TOKENS * experts * config.hidden_size * 2
        known = getattr(sizes["outside"], "source", "")  # a plain float where another draw is active
        source = f"{known}; and DeepEP's buffers, by its get_low_latency_rdma_size_hint"
        sizes["outside"] = Figure(sizes["outside"] + buffers, kinds=Kind.ASSUMPTION, source=source)
    if launch.mtp and RULES[launch.engine][0] == STATIC:
        sizes["draft"] = sizes["weights"] - _weights(config, layout, precision, launch.engine, False)
    return sizes


def _weights(config: ModelConfig, layout: InstanceLayout, precision: Precision, engine: str, mtp: bool) -> int:
    """Return all weight bytes of a device. Engines other than dsjax also keep the absorbed matrices in bf16, besides `kv_b_proj`."""
    total = sum(weight_bytes(config, layout, precision, mtp).values())
    mla = config.mla
    if engine == "dsjax" or mla is None:
        return total
    layers = config.num_hidden_layers + (config.num_nextn_predict_layers if mtp else 0)
    heads = config.num_attention_heads // layout.mesh.tp_size
    absorbed = heads * mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim)
    return total + round(math.ceil(layers / layout.mesh.pp_size) * absorbed * BF16)


def _step(config: ModelConfig, layout: InstanceLayout, launch: Launch) -> float:
    """Return the peak bytes of a prefill step: one layer's attention or routed experts, whichever is larger; the residual stream and its
    copies, all in bf16; and three copies of the sampled rows' float32 logits.

    Attention: queries, keys, values, outputs and `kv_b_proj`'s outputs. With V3.2's indexer, it is absorbed, and the indexer scores each
    token of the step against every position of the longest request (sgl-project/sglang issue 35201). Experts: the rows of each choice,
    before, between and after the matmuls. Without DeepEP, each device has the rows of all DP ranks; with DeepEP, about as many as its own.
    """
    mesh = layout.mesh.stage
    tokens, width, dims = launch.prefill_tokens, config.hidden_size, config.attention
    heads = config.num_attention_heads // mesh.tp_size
    values_per_token = 2 * dims.qk_head_dim + 2 * dims.v_head_dim + dims.qk_nope_head_dim + dims.v_head_dim
    scores = 0
    if dims.indexer is not None:
        values_per_token = 2 * dims.latent_dim + dims.qk_rope_head_dim + dims.qk_head_dim + dims.v_head_dim
        scores = 2 * tokens * launch.longest  # a float32 score counts as two bf16 values
    max_tokens = math.inf if launch.engine == "tensorrt-llm" else _MOST_EXPERT_TOKENS
    gathered = tokens if launch.deepep else min(tokens * mesh.dp_size, max(tokens, max_tokens))
    rows = min(gathered, max_tokens) * (config.num_experts_per_tok if config.is_moe else 0)
    has_whole_experts = mesh.dp_size > 1 and launch.engine in _WHOLE_EXPERTS
    shards = mesh.tp_size if launch.deepep else mesh.expert_width_shards if has_whole_experts else mesh.num_devices
    experts = rows * (width + 3 * config.moe_intermediate_size // shards)
    residual = 4 * tokens * width + (2 * gathered * width if gathered > tokens else 0)
    values = max(tokens * heads * values_per_token + scores, experts) + residual
    needed = values * BF16 + 3 * 4 * launch.sampled * config.vocab_size
    why = "the largest arrays of a prefill step; allocators keep more, and kernels reuse some"
    return assumed(needed, 0.6 * needed, 2.0 * needed, "step", why, "B")


def show(verdict: Verdict, name: str, device: str) -> str:
    """Return the verdict as text."""
    return filled("texts", "fit.txt", verdict=verdict, launch=verdict.launch, name=name, device=device)
