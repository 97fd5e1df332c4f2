"""Public measurements that were looked for after the model was written: predictions committed first, measured values afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

from dsjax.config import load_config
from dsjax.plan.candidate import aggregated
from dsjax.plan.cluster import Cluster, load_cluster
from dsjax.plan.figure import Figure, Kind
from dsjax.plan.instance import Instance
from dsjax.plan.layout import InstanceLayout, parse_layout
from dsjax.plan.precision import Precision, precision
from dsjax.plan.simulation.load import OfferedLoad
from dsjax.plan.simulation.run import simulate
from dsjax.plan.step import StepModel
from dsjax.plan.workload import Lengths, Objective, PlanOptions, Workload
from tools.plan_data.validation import Point

GB200_1 = "LMSYS 2025-06-16, GB200 part 1"
GB200_2 = "LMSYS 2025-09-25, GB200 part 2"
TRTLLM = "TensorRT-LLM, Best_perf_practice_on_DeepSeek-R1, commit 01c4ece"
TENSTORRENT = "tenstorrent/tt-inference-server issue 356"
DSTACK = "dstackai/benchmarks, branch deepseek-r1-benchmark, online_results.csv"
GPUSTACK = "gpustack/gpustack, docs/performance-lab/deepseek-r1/h200.md"
ANT = "LMSYS 2025-09-26, Ant Group"
_CONFIG = load_config("deepseek-v3")


@dataclasses.dataclass(frozen=True)
class Unseen:
    """What is predicted, in which unit, from what; and what the source leaves open."""

    key: str
    what: str
    source: str
    unit: str
    predict: Callable[[], Figure]
    kind: str
    open: str = ""


def _steps(cluster: Cluster, layout: InstanceLayout, numbers: Precision) -> StepModel:
    return StepModel(_CONFIG, cluster, layout, numbers)


def _gb200_decode(batch: float, numbers: Precision) -> Figure:
    """Output tokens a second a GPU of 48 GB200, EP48 with 32 redundant experts, prompts of 2,000."""
    layout = parse_layout("dp=48", 32, _CONFIG)
    return batch / _steps(load_cluster("gb200-nvl72-36").resized(12), layout, numbers).decode(batch, 2050)


def _gb200_prefill(numbers: Precision) -> Figure:
    """Prompt tokens a second a GPU of 8 GB200, EP8 with 32 redundant experts, steps of 16,384 tokens a GPU."""
    layout = parse_layout("dp=8", 32, _CONFIG)
    model = _steps(load_cluster("gb200-nvl72-36").resized(2), layout, numbers)
    return 16384.0 / model.prefill(16384, prompt=2000)


def _b200_serving(batch: float, numbers: Precision) -> Figure:
    """Output tokens a second a GPU of 8 B200, DEP8, 1K/2K, one prompt a step as `max_num_tokens` leaves room for."""
    layout, work = parse_layout("dp=8", 0, _CONFIG), Workload(Lengths(1024), Lengths(2048))
    instance = Instance(_CONFIG, load_cluster("b200-8"), layout, PlanOptions(numbers, overlap="off"), work)
    return aggregated(instance, 1, batch, 1024).per_device


def _h100_tp16(prompt: float) -> Figure:
    """Milliseconds a token of one request on 16 H100, TP16 over InfiniBand, outputs of 128."""
    layout, work = parse_layout("tp=16,ep=1", 0, _CONFIG), Workload(Lengths(prompt), Lengths(128))
    instance = Instance(_CONFIG, load_cluster("h100-32").resized(2), layout, PlanOptions(), work)
    return instance.tpot(1) * 1e3


def _h20_decode() -> Figure:
    """Output tokens a second a node of 16 H20, EP16, FP8 cache, prompts of 4,096, the largest batch within 50 ms a token."""
    cluster = dataclasses.replace(load_cluster("h20-32").resized(2), network_gbps=400.0, nics_per_host=4)
    model = StepModel(_CONFIG, cluster, parse_layout("dp=16", 0, _CONFIG), precision("fp8", "fp8"), fp8_mla=True)
    batch = max(b for b in range(1, 129) if model.decode(b, 4096 + 512).value <= 0.05)
    return batch * 8.0 / model.decode(batch, 4096 + 512)


def unseen() -> list[Unseen]:
    """Ten of them."""
    fp8, fp4 = precision("fp8"), precision("nvfp4")
    batch = (
        "the batch is that of the engine's limit in the published scripts, from memory; overlap of two batches is off"
    )
    return [
        Unseen(
            "A", "GB200, decode EP48, FP8, prompts of 2K, batch 768, tokens/s a GPU", GB200_1, "tokens/s",
            lambda: _gb200_decode(768, fp8), "decode", batch,
        ),
        Unseen(
            "B", "the same with later software", GB200_2, "tokens/s", lambda: _gb200_decode(768, fp8), "decode", batch,
        ),
        Unseen(
            "C", "GB200, decode EP48, NVFP4 experts, FP8 cache, batch 1,408, tokens/s a GPU", GB200_2, "tokens/s",
            lambda: _gb200_decode(1408, fp4), "decode", batch,
        ),
        Unseen(
            "D", "GB200, prefill EP8, FP8, prompts of 2K, tokens/s a GPU", GB200_2, "tokens/s",
            lambda: _gb200_prefill(fp8), "prefill", "tokens a step are not given; 16,384 a GPU assumed",
        ),
        Unseen(
            "E", "GB200, prefill EP8, NVFP4 experts, FP8 cache, prompts of 2K, tokens/s a GPU", GB200_2, "tokens/s",
            lambda: _gb200_prefill(fp4), "prefill", "tokens a step are not given; 16,384 a GPU assumed",
        ),
        Unseen(
            "F", "B200, DEP8, NVFP4, FP8 cache, 1K/2K, 896 requests a GPU, output tokens/s a GPU", TRTLLM, "tokens/s",
            lambda: _b200_serving(896, fp4), "serving",
        ),
        Unseen(
            "G", "B200, DEP8, NVFP4, bf16 cache, 1K/2K, 384 requests a GPU, output tokens/s a GPU", TRTLLM, "tokens/s",
            lambda: _b200_serving(384, precision("nvfp4", "bf16")), "serving",
        ),
        Unseen(
            "H", "H100, TP16 over InfiniBand, one request, 4K/128, TPOT", TENSTORRENT, "ms", lambda: _h100_tp16(4096), "decode",
        ),
        Unseen(
            "I", "H100, TP16 over InfiniBand, one request, 8K/128, TPOT", TENSTORRENT, "ms", lambda: _h100_tp16(8192), "decode",
        ),
        Unseen(
            "J", "H20, decode EP16, FP8 cache, prompts of 4K, output tokens/s a node", ANT, "tokens/s", _h20_decode, "decode",
            "the batch is not given; the largest within 50 ms a token, and 4 cards of 400 Gb/s a host assumed",
        ),
    ]  # fmt: skip


def _closed(users: int, output: Lengths, requests: int, prompt: Lengths) -> Figure:
    """Output tokens a second of 8 H200, TP8, whose engine schedules while the device waits: played as the benchmark does.

    All users at once, each finished request replaced until so many have come. The interval is that of the mean-value answer.
    """
    layout = parse_layout("tp=8,ep=1", 0, _CONFIG)
    work = Workload(prompt, output, concurrency=float(users))
    options = PlanOptions(overlap="off", prefill_tokens=32768, host="serial")
    found = aggregated(Instance(_CONFIG, load_cluster("h200-8"), layout, options, work), 1, users, 32768)
    played = simulate(found, OfferedLoad(None, users), Objective(), num_requests=requests, warmup=0, at_once=True)
    rate, mean = played.tokens_per_s, found.throughput
    return Figure(rate, rate * mean.low / mean.value, rate * mean.high / mean.value, mean.kinds)


def further() -> list[Unseen]:
    """Ten more, of one kind of machine and layout, by two sources."""
    found = []
    for key, users, output in (
        ("K", 4, 800), ("L", 8, 800), ("M", 16, 800), ("N", 32, 800), ("O", 64, 800), ("P", 128, 800), ("Q", 128, 1600), ("R", 128, 3200),
    ):  # fmt: skip
        what = f"H200, TP8, vLLM of March 2025, 3,200/{output:,}, {users} concurrent, output tokens/s"
        predict = partial(_closed, users, Lengths(output), 500, Lengths(3200))
        found.append(Unseen(key, what, DSTACK, "tokens/s", predict, "serving"))
    spread = "ShareGPT's lengths: only the means are given, a variation of 1 assumed"
    asked = Lengths(228.36, 1.0), Lengths(213.38, 1.0)
    found.append(
        Unseen(
            "S", "H200, TP8, vLLM 0.11, ShareGPT, 4 concurrent, output tokens/s", GPUSTACK, "tokens/s",
            partial(_closed, 4, asked[1], 100, asked[0]), "serving", spread,
        )
    )  # fmt: skip
    asked = Lengths(219.2, 1.0), Lengths(200.8, 1.0)
    found.append(
        Unseen(
            "T", "H200, TP8, SGLang 0.5.3, ShareGPT, 1,000 requests at once, output tokens/s", GPUSTACK, "tokens/s",
            partial(_closed, 1000, asked[1], 1000, asked[0]), "serving", spread,
        )
    )  # fmt: skip
    return found


MEASURED = {
    "A": 7_583, "B": 9_087, "C": 13_386, "D": 18_471, "E": 26_156, "F": 5_393.3, "G": 4_548.0, "H": 23.7, "I": 24.0, "J": 5_700,
}  # fmt: skip
"""As published, in the units of `unseen`; entered after the commit 1257918, which has the predictions."""


SAID = {
    "A": (9421.2, 7631.6, 11238.2), "B": (9421.2, 7631.6, 11238.2), "C": (14467.4, 11786.6, 17224.9), "D": (14004.9, 11611.6, 16583.1),
    "E": (18649.5, 15420.6, 22125.0), "F": (5861.7, 5056.8, 8780.7), "G": (3463.5, 2974.6, 6218.8), "H": (11.2, 9.1, 15.4),
    "I": (11.4, 9.3, 15.6), "J": (3398.5, 2770.1, 4044.7),
}  # fmt: skip
"""The prediction, low and high of each row of `unseen`, as the commit 1257918 has them."""
FURTHER = {
    "K": (214.9, 166.2, 271.5, 148.58), "L": (369.4, 291.9, 457.0, 237.59), "M": (539.2, 439.8, 648.9, 294.07),
    "N": (915.6, 759.8, 1084.8, 512.86), "O": (1377.5, 1167.2, 1603.4, 758.38), "P": (1973.8, 1703.2, 2261.2, 744.78),
    "Q": (2264.6, 1923.5, 2633.3, 780.83), "R": (2087.9, 1754.1, 2457.0, 747.78), "S": (206.0, 160.7, 260.5, 196.81),
    "T": (2727.4, 2306.3, 3790.4, 3172.46),
}  # fmt: skip
"""What commit 5262201 predicts of `further` (figure, low, high), and what was published, entered afterwards."""


def unseen_points() -> list[Point]:
    """Predictions beside what was measured."""
    return [
        Point(one.key, one.what, one.source, one.unit, MEASURED[one.key], one.predict, one.kind, caveat=one.open)
        for one in unseen()
    ]


def further_points() -> list[Point]:
    """Predictions of the second ten, as they were committed, beside what was measured; playing them anew takes a minute."""
    found = []
    for one in further():
        *ends, published = FURTHER[one.key]
        predicted = Figure(*ends, Kind.MEASURED | Kind.ASSUMPTION)
        found.append(
            Point(
                one.key, one.what, one.source, one.unit, published, lambda f=predicted: f, one.kind, caveat=one.open
            )
        )  # fmt: skip
    return found
