"""How InferenceX starts its engines on one host and asks them, by the scripts that it publishes: what a simulated run takes from there.

The scripts are SemiAnalysisAI/InferenceX, `benchmarks/single_node/fixed_seq_len/dsr1_*.sh` (commit 843c6254), and their history in that
repository; the client is `utils/bench_serving/benchmark_serving.py`. Nothing here was taken from a result.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from dsjax.plan.engine import ABSORBS_BELOW, KEEPS, Engine
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
COLD_TENSORRT_LLM = {"h200": (5.3, 2.0, 8.3), "b200": (0.9, 0.1, 2.2)}
"""Seconds that the first request of each user waited longer of TensorRT-LLM where no request had warmed it up: the median, the least and
the most of the runs of *scripts* of 2025-12-15 (P99 of the TTFT without what is played of it; tools/plan_data/history.csv, U19 to U60)."""
OLD_TENSORRT_LLM, OLD_BEFORE = "tensorrt-llm-1.2.0rc5", "2026-05-18"
"""Bundled tables that stand for the versions up to 1.2.0rc6 of TensorRT-LLM with FP8, and the day from which images have 1.3.0rc14
(`nvidia-master.yaml` of the benchmark, commit 0d8d1f93d): dense FP8 products on B200 of 8,192 rows took 0.2 to 0.3 ms longer each, and
experts are computed by the backends that the scripts name, DEEPGEMM on B200 and CUTLASS on H200."""
_FEWER_SINCE = "2026-07-02"
"""Since commit 53973500 SGLang with FP4 and drafts begins 256 requests at most, as without; before, 512 with 0.82 of the memory."""
IMAGES = {
    ("h200", "fp8"): (("", "0.5.9"), ("2026-05-13", "0.5.11"), ("2026-05-17", "0.5.12")),
    ("b200", "fp8"): (("", "0.5.9"), ("2026-05-15", "0.5.11"), ("2026-05-17", "0.5.12")),
    ("b200", "fp4"): (("", "0.5.9"), ("2026-05-18", "0.5.12")),
    ("b300", "fp8"): (("2026-04-17", "0.5.10.post1"), ("2026-05-13", "0.5.11"), ("2026-05-17", "0.5.12")),
    ("b300", "fp4"): (("2026-04-17", "0.5.10.post1"), ("2026-05-13", "0.5.11"), ("2026-05-17", "0.5.12")),
}
"""SGLang's version by the date of a result, of each device and weights: `nvidia-master.yaml` of the benchmark.

0.5.9 stands for older ones too."""
LONG_BEFORE, LONG_BY = "2026-05-16", 35921 / 7140
"""Images of SGLang from 0.5.10 on have version 5 of Transformers, with which the benchmark's client cut DeepSeek's text otherwise than the
server: a prompt of 7,140 of its tokens had 35,921 of the server's (SemiAnalysisAI/InferenceX pull request 937). For models named by
their repository that lasted until pull request 1381 of 2026-05-15 (`5fe6d56e`), which calls what was published until then a false
regression; pull request 1502 ran such settings again."""
_SERIAL_DRAFTS = ("0.5.9", "0.5.10.post1")
"""SGLang schedules while the device drafts where `SGLANG_ENABLE_SPEC_V2` is set, which it is by default from 0.5.11 on (its
srt/environ.py). The scripts for FP8 on B200 and B300 set it as a variable of the shell and do not export it, so that the server does
not see it; those for FP4 and for H200 export it. Without it `disable_overlap_schedule` is set (srt/server_args.py)."""
CAPTURED = 2048
"""From 0.5.10 on SGLang captures prefill steps of up to 2,048 tokens in pieces, where it computes MLA, without attention DP, and
prompts need no hidden states for drafts (`_handle_piecewise_cuda_graph` and `piecewise_cuda_graph_max_tokens` of its srt/server_args.py,
`can_run` of srt/model_executor/piecewise_cuda_graph_runner.py)."""
_FEW, _MANY, _MANY_USERS = 10, 30, 16
"""`--scheduler-recv-interval` on Blackwell, with fewer users than 16 and with as many."""


@dataclass(frozen=True)
class Protocol:
    """step_tokens: most prompt tokens in a step. engine: what it can do, and when it takes prompts in. warm: whether it was warmed up.
    running: requests that have begun at most (`--max-running-requests`), where there are runs with more users. fraction: of the memory
    that the engine is given, by its own rule (`fit.RULES`). tables: bundled tables of operations of its version, where there are such.
    host: as of `PlanOptions`. cold: seconds that a user's first request waits longer where nothing warmed the engine up, its least and
    its most; None are those of SGLang.
    """

    step_tokens: int
    engine: Engine
    warm: bool
    running: float = math.inf
    fraction: float = 0.82
    tables: str = ""
    host: str = "overlapped"
    cold: tuple[float, float, float] | None = None

    @property
    def launched(self) -> str:
        """The engine's name among those of `fit.RULES`."""
        return "tensorrt-llm" if self.engine.keeps == KEEPS["tensorrt-llm"] else "sglang"


def version(run: Run, date: str) -> str:
    """SGLang's version in a run of that day, as `IMAGES` has it."""
    return [name for since, name in IMAGES[run.device, run.weights] if date >= since][-1]


def has_long_prompts(run: Run, date: str) -> bool:
    """Whether the server was most likely given prompts `LONG_BY` times as long as the run says, by its version and day alone.

    Where a runner had the model in a local folder the client's text was right (pull request 937); results do not say which had.
    """
    return run.engine == "sglang" and date < LONG_BEFORE and version(run, date) != "0.5.9"


def sent_by(run: Run, date: str) -> Run:
    """The run with the prompts that the server most likely was given."""
    return dataclasses.replace(run, prompt=round(LONG_BY * run.prompt)) if has_long_prompts(run, date) else run


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
    tables, cold = tables_of(run.weights, date), COLD_TENSORRT_LLM.get(run.device)
    return Protocol(step_tokens, engine, warm, fraction=fraction, tables=tables, cold=cold)


def tables_of(weights: str, date: str) -> str:
    """Bundled tables of TensorRT-LLM's version in a run of that day; none are those of all engines."""
    return OLD_TENSORRT_LLM if weights == "fp8" and date < OLD_BEFORE else ""


def _sglang(run: Run, date: str, drafts: int) -> Protocol:
    # The client asks for outputs of given lengths (`--ignore-eos`), and the prefix cache is off.
    engine = dataclasses.replace(
        run.program, keeps=KEEPS["sglang"], knows_ends=True, absorbs_below=ABSORBS_BELOW["sglang"]
    )
    warm = date >= WARM_SINCE
    apart, half = run.mesh.startswith("dp="), "tp=4" in run.mesh
    if not drafts and not apart and version(run, date) != "0.5.9":
        engine = dataclasses.replace(engine, captured=CAPTURED)
    if run.device == "h200":
        running = 512 if run.prompt == run.output == 1024 else 256
        old = version(run, date) == "0.5.9"  # configs/operators/SOURCES.md
        return Protocol(32768, engine, warm, running, tables="sglang-0.5.9" if old else "")
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
    serial = drafts and run.weights == "fp8" and version(run, date) in _SERIAL_DRAFTS
    host = "serial" if serial else "overlapped"
    return Protocol(step_tokens, dataclasses.replace(engine, poll_steps=polls), warm, running, fraction, host=host)
