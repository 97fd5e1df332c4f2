"""`Engine`: what a serving program can do, so that nothing is credited to a plan which the program that runs it lacks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from dsjax.errors import UserError
from dsjax.plan.precision import BF16, FP8_CACHE, Precision


@dataclass(frozen=True)
class Engine:
    """balances: places experts by their load. overlaps: two half batches. transfers: caches from prefill to decode.
    drafts: with the MTP module. fp4: loads FP4 experts; widens_fp4: multiplies by them in bf16. int8: loads block-wise INT8 weights.
    fp8_cache: bytes a value of its FP8 latent cache, None without one.
    dispatch: of tokens to experts, by default. eager: starts the kernels of a prefill step one by one, and each pass of the
    MTP module by itself; otherwise one compiled program has all of them.
    most_drafts: tokens that it drafts a step at most, None where no bound is known. shared_beside: decode computes the shared expert
    beside the routed ones, on a second stream. holds_prompts: with attention DP prompts wait until every replica has some. mixes: a step
    of a DP rank has prompts and decodes; otherwise its decodes wait while it computes prompts.
    apart: has attention and experts on devices of their own.
    fp8_mla: decode multiplies an FP8 cache as FP8 on an H20. fp8_rate: operations a second that its dense FP8 products reach at most on
    Blackwell, as of `Chip`; SGLang's where it is started with `--fp8-gemm-backend flashinfer_trtllm`. poll_steps: decode steps between two
    looks for new prompts; hold_steps: those that prompts are held back at most; fill: (steps, share of a step's tokens) until which they
    are held back with one replica; keeps: the share of running requests' outputs to come that the cache keeps room for; knows_ends: what
    is kept for requests that run to their given length is all that they will need (all five of a simulation: `simulation.admission`).
    absorbs_below: on other devices than Blackwell, a step whose prompts have fewer cached positions than this, but some, computes all of
    them with absorbed attention. captured: prefill steps of up to so many tokens are in CUDA graphs, attention between them.
    gathers: with attention DP experts get all ranks' tokens by collectives and not by an all-to-all, as SGLang's do with
    `--moe-a2a-backend none`, its default: a step with prompts sums them and its results up over all ranks (`DpPaddingMode` in its
    srt/layers/dp_attention.py), one of decodes gathers and scatters.
    credits: capability → the option or file of the engine that has it; what is not in it is not credited.
    """

    name: str
    balances: bool
    overlaps: bool
    transfers: bool
    drafts: bool
    fp4: bool
    fp8_cache: float | None
    dispatch: str
    eager: bool
    int8: bool = False
    most_drafts: int | None = None
    widens_fp4: bool = False
    shared_beside: bool = False
    holds_prompts: bool = False
    mixes: bool = True
    fp8_mla: bool = False
    fp8_rate: tuple[float, float, float] | None = None
    apart: bool = False
    poll_steps: int = 1
    hold_steps: int = 50
    fill: tuple[int, float] = (0, 0.0)
    keeps: tuple[float, float, int] = (0.0, 0.0, 1)
    knows_ends: bool = False
    absorbs_below: int = 0
    captured: int = 0
    gathers: bool = False
    credits: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def check(
        self,
        *,
        separated: bool,
        overlap: bool,
        drafts: int,
        fp4: bool,
        fp8_cache: bool,
        dispatch: str,
        int8: bool = False,
        mxfp4: bool = False,
    ) -> None:
        """Raise `UserError` where something is asked for that this engine cannot do."""
        if mxfp4 and not self.widens_fp4:
            raise UserError(
                f"--precision mxfp4 or mxfp4-bf16 is asked for, but experts of {self.name} are priced in NVFP4 only; give --precision "
                "nvfp4 or nvfp4-bf16, or --engine dsjax"
            )
        asked = (
            (separated and not self.transfers, "--mode separated", "does not move caches between instances"),
            (overlap and not self.overlaps, "--two-batch-overlap on", "does not overlap two half batches"),
            (drafts and not self.drafts, "--mtp", "does not draft with the MTP module"),
            (
                drafts > (self.most_drafts or drafts),
                f"--mtp {drafts}",
                f"drafts at most {self.most_drafts} tokens a step",
            ),
            (fp4 and not self.fp4, "--precision nvfp4 or nvfp4-bf16", "does not load FP4 experts"),
            (int8 and not self.int8, "--precision int8", "does not load block-wise INT8 weights"),
            (fp8_cache and self.fp8_cache is None, "an FP8 cache", "has none"),
            (dispatch == "deepep" and self.dispatch != "deepep", "--dispatch deepep", "has dispatches of its own"),
        )
        for wrong, flag, reason in asked:
            if wrong:
                who = "dsjax serve" if self.name == "dsjax" else self.name
                raise UserError(
                    f"{flag} is asked for, but {who} {reason}; change that, or give --engine published for engines that can"
                )

    def precision(self, chosen: Precision) -> Precision:
        """What was chosen, with an FP8 cache as this engine keeps it, and FP4 where it has it."""
        if chosen.expert < 1 and self.widens_fp4:
            chosen = chosen.only_experts_in_fp4()
        if chosen.cache >= BF16 or self.fp8_cache is None:
            return chosen
        return dataclasses.replace(chosen, cache=self.fp8_cache)


CAPABILITIES = (
    "balances",
    "overlaps",
    "transfers",
    "drafts",
    "fp4",
    "fp8_cache",
    "int8",
    "shared_beside",
    "holds_prompts",
    "mixes",
    "apart",
)
"""Fields of `Engine` that make a plan better, and that something must be named for."""
_CREDITS = {
    "vllm": {
        "balances": "--enable-eplb, --eplb-config",
        "overlaps": "--enable-dbo",
        "transfers": "--kv-transfer-config",
        "drafts": "--speculative-config",
        "fp4": "--quantization modelopt_fp4, read from the checkpoint",
        "fp8_cache": "--kv-cache-dtype fp8",
        "shared_beside": "VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD: up to 256 tokens, on a stream of their own",
        "mixes": "--enable-chunked-prefill, on by default",
    },
    "sglang": {
        "balances": "--enable-eplb",
        "overlaps": "--enable-two-batch-overlap",
        "transfers": "--disaggregation-mode",
        "drafts": "--speculative-algorithm NEXTN",
        "fp4": "--quantization modelopt_fp4",
        "fp8_cache": "--kv-cache-dtype fp8_e4m3",
        "int8": "--quantization, read from the checkpoint (meituan/DeepSeek-R1-Block-INT8)",
        "shared_beside": "sglang/srt/models/deepseek_v2.py, alt_stream",
    },
    "tensorrt-llm": {
        "balances": "moe_config.load_balancer",
        "transfers": "cache_transceiver_config",
        "drafts": "speculative_config",
        "fp4": "moe_config.backend, with an NVFP4 checkpoint",
        "fp8_cache": "kv_cache_config.dtype",
        "shared_beside": "tensorrt_llm/_torch/models/modeling_deepseekv3.py, aux_stream",
        "holds_prompts": "attention_dp_config.enable_balance",
        "mixes": "tensorrt_llm/_torch/pyexecutor/scheduler.py: context and generation requests of one step",
    },
}
KEEPS = {"sglang": (0.7, 0.7 * 0.14, 600), "tensorrt-llm": (1.0, 1.0, 1)}
"""Engine → `Engine.keeps`. SGLang's `new_token_ratio` begins at 0.7, and falls to 0.14 of that in 600 decode steps
(`SGLANG_INIT_NEW_TOKEN_RATIO`, `SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR` and `SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS` in its srt/environ.py).
TensorRT-LLM's default, `CapacitySchedulerPolicy.GUARANTEED_NO_EVICT`, begins a request where its whole output has room
(llmapi/llm_args.py). vLLM and dsjax keep none, and preempt."""
ABSORBS_BELOW = {"sglang": 8192}
"""Engine → `Engine.absorbs_below`. With FlashInfer's attention or FlashAttention 3 SGLang computes a step of prompts in the multi-head form
where none has cached positions, or where they have `SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD` together, and all of them absorbed between the
two (`_handle_attention_backend` in its srt/models/deepseek_common/attention_backend_handler.py). A prompt that the step before had room
for in part has such positions. TensorRT-LLM's kernels, which it uses on Blackwell, have no such rule (`handle_attention_trtllm_mla`)."""
_OURS = {
    "balances": "--enable-eplb",
    "overlaps": "--enable-dbo",
    "transfers": "--disaggregation-mode, --prefill-mesh",
    "drafts": "--speculative-config",
    "fp4": "--weights nvfp4",
    "fp8_cache": "--kv-cache-dtype fp8",
    "mixes": "--max-num-batched-tokens",
    "apart": "--attention-mesh, --expert-mesh",
}
"""What `dsjax serve` would have each capability by; only those that it has become credits."""


def _one(name: str) -> Engine:
    credits = _CREDITS[name]
    able = {capability: capability in credits for capability in CAPABILITIES if capability != "fp8_cache"}
    return Engine(
        name,
        fp8_cache=1.0 if "fp8_cache" in credits else None,
        dispatch="deepep",
        eager=True,
        keeps=KEEPS.get(name, (0.0, 0.0, 1)),
        absorbs_below=ABSORBS_BELOW.get(name, 0),
        credits=credits,
        **able,
    )


_OTHERS = {name: _one(name) for name in _CREDITS}
_ALL = {
    what: "; ".join(f"{name}: {each[what]}" for name, each in _CREDITS.items() if what in each) for what in CAPABILITIES
} | {"apart": "papers of MegaScale-Infer, StepFun and Baidu Baige; no released engine has it"}
PUBLISHED = Engine(
    "published",
    True,
    True,
    True,
    True,
    True,
    1.0,
    "deepep",
    eager=True,
    int8=True,
    shared_beside=True,
    fp8_mla=True,
    apart=True,
    credits=_ALL,
)
"""SGLang and TensorRT-LLM with the kernels and overlaps that they publish; fp8_mla: FlashMLA's pull request 82, which the image
`ghcr.io/antgroup/sglang:h20-blog-release` has and SGLang's releases have not."""
"""One engine of them: the published kernels, the layouts that it can be asked for (`launch.unfit`), and its own commands."""


@functools.cache
def dsjax_engine() -> Engine:
    """What `dsjax serve` of this version can do, by the options that it has."""
    from dsjax.engine.contract.speculative import MOST_DRAFTS
    from dsjax.engine.setup.args import EngineArgs

    fields = {field.name: field for field in dataclasses.fields(EngineArgs)}
    cache = fields["kv_cache_dtype"].metadata.get("choices") or ()
    made = Engine(
        "dsjax",
        balances="enable_eplb" in fields,
        overlaps="enable_dbo" in fields,
        transfers="kv_transfer_config" in fields or "prefill_mesh" in fields or "disaggregation_mode" in fields,
        drafts="speculative_config" in fields,
        fp4="nvfp4" in (fields["weights"].metadata.get("choices") or ()),
        fp8_cache=FP8_CACHE if any("fp8" in name for name in cache) else None,
        dispatch="auto",
        eager=False,
        apart="expert_mesh" in fields,
        most_drafts=MOST_DRAFTS,
        widens_fp4=True,
    )
    return dataclasses.replace(made, credits={what: _OURS[what] for what in CAPABILITIES if getattr(made, what)})


def credit_table() -> str:
    """Markdown: what each engine is credited with, and by what."""
    names = ("dsjax", *_OTHERS)
    lines = [f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for what in CAPABILITIES:
        cells = (find_engine(name).credits.get(what, "no") for name in names)
        lines.append(f"| {WORDS[what]} | {' | '.join(cells)} |")
    return "\n".join(lines)


WORDS = {
    "balances": "experts placed by their load",
    "overlaps": "two half batches overlap",
    "transfers": "prefill apart from decode",
    "drafts": "drafts by the MTP module",
    "fp4": "FP4 experts",
    "fp8_cache": "FP8 cache",
    "int8": "block-wise INT8",
    "shared_beside": "shared expert beside the routed ones, in decode",
    "holds_prompts": "prompts held back until every replica has some",
    "mixes": "prompts and decodes in one step",
    "apart": "attention and experts apart",
}
"""`CAPABILITIES` for a reader."""
ENGINES = ("dsjax", "published", *_OTHERS)


def find_engine(name: str) -> Engine:
    """By name.

    Raises:
        UserError: no such engine.
    """
    if name not in ENGINES:
        raise UserError(f"--engine is {name!r}, expected one of {', '.join(ENGINES)}")
    return dsjax_engine() if name == "dsjax" else _OTHERS.get(name, PUBLISHED)
