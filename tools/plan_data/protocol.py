"""How InferenceX starts its engines on one host and asks them, by the scripts that it publishes: what a simulated run takes from there.

The scripts are SemiAnalysisAI/InferenceX, `benchmarks/single_node/fixed_seq_len/dsr1_*.sh` (commit 843c6254), and their history in that
repository; the client is `utils/bench_serving/benchmark_serving.py`. Nothing here was taken from a result.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from dsjax.plan.engine import KEEPS, Engine
from dsjax.plan.operations import FLASHINFER_FP8_RATE
from tools.plan_data.inferencex import Run

WARM_SINCE = "2026-01-21"
"""Since commit d053ae24 two requests a user warm the engine up (`--num-warmups`); before, one went ahead of all. Since commit 64af5a77
of the same day TensorRT-LLM's steps hold 8,192 tokens, before as many as one prompt and the decodes."""
_MOST_OF_ONE_PROMPT = 64
_HOLD_STEPS = 60
"""`attention_dp_config.timeout_iters` of TensorRT-LLM's configuration."""
_FILLED_SINCE, _FILL = "2026-01-29", (40, 0.8)
"""`batch_wait_timeout_iters` and `batch_wait_max_tokens_ratio` of TensorRT-LLM with FP8 on B200 since commit ec7bafaae, for prompts and
answers of 1,024 tokens and 64 users and more."""
_FEWER_SINCE = "2026-07-02"
"""Since commit 53973500 SGLang with FP4 and drafts begins 256 requests at most, as without; before, 512 with 0.82 of the memory."""
_FEW, _MANY, _MANY_USERS = 10, 30, 16
"""`--scheduler-recv-interval` on Blackwell, with fewer users than 16 and with as many."""


@dataclass(frozen=True)
class Protocol:
    """step_tokens: most prompt tokens in a step. engine: what it can do, and when it takes prompts in. warm: whether it was warmed up.
    running: requests that have begun at most (`--max-running-requests`), where there are runs with more users. fraction: of the memory
    that the engine is given, by its own rule (`fit.RULES`).
    """

    step_tokens: int
    engine: Engine
    warm: bool
    running: float = math.inf
    fraction: float = 0.82

    @property
    def launched(self) -> str:
        """The engine's name among those of `fit.RULES`."""
        return "tensorrt-llm" if self.engine.keeps == KEEPS["tensorrt-llm"] else "sglang"


def protocol(run: Run, date: str, drafts: int = 0) -> Protocol:
    """The protocol of a run of that day (`2026-05-22`), with so many drafts a step."""
    return _tensorrt_llm(run, date, drafts) if run.engine == "trt" else _sglang(run, date, drafts)


def _tensorrt_llm(run: Run, date: str, drafts: int) -> Protocol:
    warm, apart = date >= WARM_SINCE, run.mesh.startswith("dp=")
    replicas = int(run.mesh[3:]) if apart else 1
    one = (1 + drafts) * run.users // replicas + run.prompt + _MOST_OF_ONE_PROMPT
    # The scripts with drafts kept to one prompt.
    step_tokens = max(one, 8192) if warm and not drafts else one
    fraction = 0.75 if run.device == "h200" else 0.8
    if (run.device, run.weights) == ("b200", "fp8"):
        if run.mesh.startswith("tp=4") and run.prompt == 8192 and not drafts:
            fraction = 0.75
        elif apart and drafts:
            fraction = 0.7
    late = (run.device, run.weights) == ("b200", "fp8") and date >= _FILLED_SINCE and not drafts
    fill = _FILL if late and run.prompt == run.output == 1024 and run.users >= 64 else (0, 0.0)
    engine = dataclasses.replace(run.program, hold_steps=_HOLD_STEPS, fill=fill, keeps=KEEPS["tensorrt-llm"])
    return Protocol(step_tokens, engine, warm, fraction=fraction)


def _sglang(run: Run, date: str, drafts: int) -> Protocol:
    warm, engine = date >= WARM_SINCE, dataclasses.replace(run.program, keeps=KEEPS["sglang"])
    apart, half = run.mesh.startswith("dp="), "tp=4" in run.mesh
    if run.device == "h200":
        return Protocol(32768, engine, warm, 512 if run.prompt == run.output == 1024 else 256)
    polls = 1 if apart else _MANY if run.users >= _MANY_USERS else _FEW
    step_tokens, running, fraction = 32768, 128, 0.82
    if run.weights == "fp4" and not (drafts and date < _FEWER_SINCE):
        step_tokens, running, fraction = 32768 if apart else 16384, 256, 0.85
    elif drafts:
        step_tokens, running = 16384, 512
    elif half:
        step_tokens, running, fraction, polls = 8192, 32, 0.95, _FEW
    if run.weights == "fp8":
        # SGL_ENABLE_JIT_DEEPGEMM=false, with SGLANG_ENABLE_FLASHINFER_GEMM=true or --fp8-gemm-backend flashinfer_trtllm.
        engine = dataclasses.replace(engine, fp8_rate=FLASHINFER_FP8_RATE)
    return Protocol(step_tokens, dataclasses.replace(engine, poll_steps=polls), warm, running, fraction)
