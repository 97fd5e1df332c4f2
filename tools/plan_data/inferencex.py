"""How InferenceX starts its engines, by the scripts and recipes that it publishes: what `replay.py` takes from there.

Sources: SemiAnalysisAI/InferenceX, `benchmarks/single_node/fixed_seq_len/dsr1_*.sh` (commit 843c6254) with their history, and
`utils/bench_serving/benchmark_serving.py`; for prefill and decode on devices of their own NVIDIA/srt-slurm (commit c88ef731) and the names
of the recipes in `configs/nvidia-master.yaml`. `COLD` was read from results; everything else was set before a result was read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from dsjax.plan.engine import PUBLISHED, Engine
from dsjax.plan.figure import ends
from dsjax.plan.operations import FLASHINFER_FP8_RATE
from dsjax.plan.operator_tables import BUNDLED, SPREAD, OperatorTables

REQUESTS_A_USER, RANGE_RATIO = 10, 0.8
"""Each user makes ten requests, with lengths drawn evenly from 0.8 to 1 times the given ones (`--random-range-ratio`)."""
ACCEPTANCE = 0.70
"""Chance that the first draft is accepted where prompts are random tokens: measured of DeepSeek-V4-Flash at temperature 1
(vllm-project/vllm pull request 41044), whose one module is trained and used as R1's. Of R1 on random prompts nothing is published."""
PRECISIONS = {"fp4": "nvfp4-bf16", "fp8": "fp8"}
"""The FP4 checkpoint is nvidia/DeepSeek-R1-0528-FP4-V2, whose attention is not FP8."""
COLD = {"sglang": (1.0, 0.0, 2.3), "trt h200": (5.3, 2.0, 8.3), "trt b200": (0.9, 0.1, 2.2)}
"""Seconds that the first request of each user waits longer where nothing warmed the engine up: median, least and most of the runs of the
round *scripts* of 2025-12-15, and of SGLang those of its 0.5.7 on H200."""
WARM = ends("a user's first prompt")
_WARM_SINCE = "2026-01-21"
"""Since commit d053ae24 two requests a user warm the engine up (`--num-warmups`). Since commit 64af5a77 of the same day TensorRT-LLM's
steps hold 8,192 tokens; before, as many as one prompt and the decodes."""
_OLD_TENSORRT_LLM, _OLD_BEFORE = "tensorrt-llm-1.2.0rc5", "2026-05-18"
"""Bundled tables of TensorRT-LLM up to 1.2.0rc6 with FP8, and the day from which images have 1.3.0rc14 (commit 0d8d1f93d)."""
_FEWER_SINCE = "2026-07-02"
"""Since commit 53973500 SGLang with FP4 and drafts runs 256 requests at most, as without; before, 512 with 0.82 of the memory."""
_IMAGES = {
    ("h200", "fp8"): (("", "0.5.9"), ("2026-05-13", "0.5.11"), ("2026-05-17", "0.5.12")),
    ("b200", "fp8"): (("", "0.5.9"), ("2026-05-15", "0.5.11"), ("2026-05-17", "0.5.12")),
    ("b200", "fp4"): (("", "0.5.9"), ("2026-05-18", "0.5.12")),
    ("b300", "fp8"): (("2026-04-17", "0.5.10.post1"), ("2026-05-13", "0.5.11"), ("2026-05-17", "0.5.12")),
    ("b300", "fp4"): (("2026-04-17", "0.5.10.post1"), ("2026-05-13", "0.5.11"), ("2026-05-17", "0.5.12")),
}
"""SGLang's version by device, weights and day (`nvidia-master.yaml`); 0.5.9 stands for older ones too."""
_LONG_BEFORE, _LONG_BY = "2026-05-16", 35921 / 7140
"""With SGLang's images from 0.5.10 on, whose Transformers is version 5, the client cut DeepSeek's text differently from the server: a
prompt of 7,140 of its tokens had 35,921 of the server's (pull request 937). Pull request 1381 of 2026-05-15 ended that."""
_STEP = 16384
"""Prompt tokens of a DP rank in a step of a prefill instance, where no recipe is known: an assumption."""


@dataclass(frozen=True)
class Run:
    """One run of the benchmark, by the columns of `configs/blind_predictions.csv`.

    ran: its day. prefill, decode: (instances, mesh); prefill is None where one engine does both. drafts: tokens drafted a step. running,
    step: what a recipe says of requests that a DP rank decodes at once at most, and of prompt tokens in a step.
    """

    ran: str
    device: str
    engine: str
    weights: str
    prompt: int
    output: int
    users: int
    prefill: tuple[int, str] | None
    decode: tuple[int, str]
    drafts: int = 0
    running: float = math.inf
    step: int = _STEP

    @classmethod
    def of(cls, row: Mapping[str, str]) -> Run:
        """Read the settings of a row."""
        told = [row[name] for name in ("ran", "device", "engine", "weights")]
        numbers = [int(row[name]) for name in ("prompt", "output", "users")]
        sides = _side(row["prefill"]) if row["prefill"] else None, _side(row["mesh"])
        given = int(row["drafts"]), float(row["running"] or math.inf), int(row["step"] or _STEP)
        return cls(*told, *numbers, *sides, *given)

    @property
    def has_attention_dp(self) -> bool:
        """Whether the engine that decodes has attention replicas."""
        return self.decode[1].startswith("dp=")

    @property
    def version(self) -> str:
        """SGLang's version in a run on one host."""
        return [name for since, name in _IMAGES[self.device, self.weights] if self.ran >= since][-1]

    @property
    def cache(self) -> str:
        """The cache's type by the scripts."""
        return "bf16" if self.engine == "sglang" and self.device in ("h100", "h200") else "fp8"

    @property
    def fuses(self) -> bool:
        """Whether the shared expert is a routed one: SGLang's way on Hopper where experts are cut."""
        return (self.device, self.engine) == ("h200", "sglang") and self.decode[1].endswith("ep=1")

    def as_sent(self) -> Run:
        """The run with the prompts that the server most likely was given (`_LONG_BY`).

        Where a runner had the model in a local folder the client's text was right; results do not say which had.
        """
        long = not self.prefill and self.engine == "sglang" and self.ran < _LONG_BEFORE and self.version != "0.5.9"
        return dataclasses.replace(self, prompt=round(_LONG_BY * self.prompt)) if long else self


def _side(text: str) -> tuple[int, str]:
    """`4 x dp=8` as (4, "dp=8"); a mesh alone is one instance."""
    count, apart, mesh = text.partition(" x ")
    return (int(count), mesh) if apart else (1, text)


@dataclass(frozen=True)
class Protocol:
    """step_tokens: most prompt tokens in a step. engine: what it can do. cold: seconds that a user's first request waits longer. running:
    requests that run at most (`--max-running-requests`). fraction: of the memory that the engine is given, by its own rule (`fit.RULES`).
    tables: bundled tables of operations of its version, if any.
    """

    step_tokens: int
    engine: Engine
    cold: tuple[float, float, float]
    running: float = math.inf
    fraction: float = 0.82
    tables: str = ""


def protocol(run: Run) -> Protocol:
    """How the engine of a run on one host is started."""
    return _tensorrt_llm(run) if run.engine == "trt" else _sglang(run)


def _tensorrt_llm(run: Run) -> Protocol:
    warm, apart, drafts = run.ran >= _WARM_SINCE, run.has_attention_dp, run.drafts
    replicas = int(run.decode[1][3:]) if apart else 1
    one = (1 + drafts) * run.users // replicas + run.prompt + 64
    fraction = 0.75 if run.device == "h200" else 0.8
    if (run.device, run.weights) == ("b200", "fp8"):
        if run.decode[1].startswith("tp=4") and run.prompt == 8192 and not drafts:
            fraction = 0.75
        elif apart and drafts:
            fraction = 0.7
    return Protocol(
        # The scripts with drafts kept to one prompt a step.
        step_tokens=max(one, 8192) if warm and not drafts else one,
        engine=dataclasses.replace(PUBLISHED, holds_prompts=True, mixes=True),
        cold=WARM if warm else COLD.get(f"trt {run.device}", COLD["sglang"]),
        fraction=fraction,
        tables=_tensorrt_llm_tables(run),
    )


def _tensorrt_llm_tables(run: Run) -> str:
    return _OLD_TENSORRT_LLM if run.weights == "fp8" and run.ran < _OLD_BEFORE else ""


def _sglang(run: Run) -> Protocol:
    engine = dataclasses.replace(PUBLISHED, mixes=False)
    cold = WARM if run.ran >= _WARM_SINCE else COLD["sglang"]
    if run.device == "h200":
        running = 512 if run.prompt == run.output == 1024 else 256
        return Protocol(32768, engine, cold, running, tables="sglang-0.5.9" if run.version == "0.5.9" else "")
    step_tokens, running, fraction = 32768, 128, 0.82
    if run.weights == "fp4" and not (run.drafts and run.ran < _FEWER_SINCE):
        step_tokens, running, fraction = 32768 if run.has_attention_dp else 16384, 256, 0.85
    elif run.drafts:
        step_tokens, running = 16384, 512
    elif "tp=4" in run.decode[1]:
        step_tokens, running, fraction = 8192, 32, 0.95
    if run.weights == "fp8":
        # SGL_ENABLE_JIT_DEEPGEMM=false, with SGLANG_ENABLE_FLASHINFER_GEMM=true or --fp8-gemm-backend flashinfer_trtllm.
        engine = dataclasses.replace(engine, fp8_rate=FLASHINFER_FP8_RATE)
    return Protocol(step_tokens, engine, cold, running, fraction)


def separated_engine(run: Run) -> Engine:
    """The engine of a run with prefill and decode apart."""
    if run.engine == "trt" or not run.drafts:
        return PUBLISHED
    rate = FLASHINFER_FP8_RATE if run.weights == "fp8" else None
    return dataclasses.replace(PUBLISHED, mixes=False, fp8_rate=rate)


def separated_tables(run: Run) -> tuple[OperatorTables, OperatorTables]:
    """Tables of prefill and of decode: TensorRT-LLM's own of that day with FP8, and those of all engines otherwise.

    Whole experts are timed with its backends DEEPGEMM and CUTLASS. By the recipes Hopper has CUTLASS throughout; prefill has DEEPGEMM on
    GB200 and GB300, and on B200 for prompts of 1,024 tokens; decode has it with attention DP, but never on B300, nor on B200 with prompts
    of 8,192 tokens. The rest has TRTLLM, which is priced as for all engines.
    """
    name = _tensorrt_llm_tables(run) if run.engine == "trt" else ""
    if not name:
        return BUNDLED, BUNDLED
    whole = BUNDLED.of_version(name)
    hopper, racks = run.device in ("h100", "h200"), run.device in ("gb200", "gb300")
    short = run.device == "b200" and run.prompt == 1024
    timed = hopper or racks or short, hopper or ((racks or short) and run.has_attention_dp)
    return tuple(whole if each else whole.without(SPREAD) for each in timed)
