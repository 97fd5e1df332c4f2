"""How InferenceX starts its engines on one host and asks them, by the scripts that it publishes: what a simulated run takes from there.

The scripts are SemiAnalysisAI/InferenceX, `benchmarks/single_node/fixed_seq_len/dsr1_*.sh` (commit 843c6254), and their history in that
repository; the client is `utils/bench_serving/benchmark_serving.py`. Nothing here was taken from a result.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from dsjax.plan.engine import Engine
from tools.plan_data.inferencex import Run

WARM_SINCE = "2026-01-21"
"""Since commit d053ae24 two requests a user warm the engine up (`--num-warmups`); before, one went ahead of all. Since commit 64af5a77
of the same day TensorRT-LLM's steps hold 8,192 tokens, before as many as one prompt and the decodes."""
_MOST_OF_ONE_PROMPT = 64
_HOLD_STEPS = 60
"""`attention_dp_config.timeout_iters` of TensorRT-LLM's configuration."""
_MOST_IN_FP4 = 256
_FEW, _MANY, _MANY_USERS = 10, 30, 16
"""`--scheduler-recv-interval` on Blackwell, with fewer users than 16 and with as many."""


@dataclass(frozen=True)
class Protocol:
    """step_tokens: most prompt tokens in a step. engine: what it can do, and when it takes prompts in. warm: whether it was warmed up.
    running: requests that have begun at most (`--max-running-requests`), where there are runs with more users.
    """

    step_tokens: int
    engine: Engine
    warm: bool
    running: float = math.inf


def protocol(run: Run, date: str, drafts: int = 0) -> Protocol:
    """The protocol of a run of that day (`2026-05-22`), with so many drafts a step."""
    warm = date >= WARM_SINCE
    if run.engine == "trt":
        replicas = int(run.mesh[3:]) if run.mesh.startswith("dp=") else 1
        one = (1 + drafts) * run.users // replicas + run.prompt + _MOST_OF_ONE_PROMPT
        # The scripts with drafts kept to one prompt.
        step_tokens = max(one, 8192) if warm and not drafts else one
        return Protocol(step_tokens, dataclasses.replace(run.program, hold_steps=_HOLD_STEPS), warm)
    apart = run.mesh.startswith("dp=")
    if run.device == "h200":
        return Protocol(32768, run.program, warm)
    polls = 1 if apart else _MANY if run.users >= _MANY_USERS else _FEW
    if run.weights == "fp4" or drafts:
        step_tokens = 32768 if apart else 16384
    else:
        step_tokens = 32768
        if "tp=4" in run.mesh:
            step_tokens, polls = 8192, _FEW
    running = _MOST_IN_FP4 if run.weights == "fp4" else math.inf
    return Protocol(step_tokens, dataclasses.replace(run.program, poll_steps=polls), warm, running)
