"""The public measured serving points, and what the model says of each. No efficiency was fitted to any of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from dsjax.config import load_config
from dsjax.plan.candidate import aggregated
from dsjax.plan.cluster import load_cluster
from dsjax.plan.figure import Figure
from dsjax.plan.instance import Instance
from dsjax.plan.layout import parse_layout
from dsjax.plan.operator_tables import BUNDLED, OperatorTables
from dsjax.plan.precision import PRECISIONS
from dsjax.plan.simulation.load import OfferedLoad
from dsjax.plan.simulation.run import simulate
from dsjax.plan.skew import DEFAULT_SKEW, UNIFORM, Skew
from dsjax.plan.step import StepModel
from dsjax.plan.workload import Lengths, Objective, PlanOptions, Workload

NODE = 8
LMSYS = "LMSYS 2025-05-05"
INFERENCEX = "InferenceX issue 870"
DAY_6 = "DeepSeek open-infra-index, day 6"


@dataclass(frozen=True)
class Point:
    """One measurement: what, by whom, and how it is predicted.

    kind: `prefill`, `decode` or `serving` (a rate), `gain` (of an ablation), or `ttft`. comparable: False where the source leaves out
    a quantity that the prediction depends on, averages over idle hours, or is the same run as another point: shown, not
    counted. caveat: why, or what had to be assumed.
    """

    key: str
    what: str
    source: str
    unit: str
    measured: float
    predict: Callable[[], Figure]
    kind: str
    comparable: bool = True
    caveat: str = ""

    @cached_property
    def figure(self) -> Figure:
        """The prediction."""
        return self.predict()

    @property
    def inside(self) -> bool:
        """Whether the interval has the measured value."""
        return self.figure.low <= self.measured <= self.figure.high

    @property
    def error(self) -> float:
        """Predicted ÷ measured - 1."""
        return self.figure.value / self.measured - 1


def _step(
    cluster: str, mesh: str, precision: str, skew: Skew, overlap: bool, hosts: int | None, operators: OperatorTables
) -> StepModel:
    config, found = load_config("deepseek-v3"), load_cluster(cluster)
    if hosts:
        found = found.resized(hosts)
    layout = parse_layout(mesh, None, config)
    if layout.redundant == 0 and overlap:
        layout = parse_layout(mesh, layout.mesh.ep_size, config)
    # The points whose experts are cut are SGLang's on Hopper: see `_tp8`.
    layout = dataclasses.replace(layout, fused=layout.mesh.ep_size == 1)
    return StepModel(config, found, layout, PRECISIONS[precision], skew, overlap, operators=operators)


def _prefill(
    cluster: str,
    mesh: str,
    prompt: float,
    *,
    tokens: float = 16384,
    cached: float = 0,
    precision: str = "fp8",
    skew: Skew = DEFAULT_SKEW,
    overlap: bool = False,
    devices: int = 1,
    operators: OperatorTables,
) -> Figure:
    """Prompt tokens computed a second on `devices` devices."""
    model = _step(cluster, mesh, precision, skew, overlap, None, operators)
    each = tokens * model.layout.mesh.dp_size / model.layout.devices
    return each * devices / model.prefill(tokens, prompt=prompt, cached=cached)


def _decode(
    cluster: str,
    mesh: str,
    batch: float,
    context: float,
    *,
    precision: str = "fp8",
    overlap: bool = False,
    hosts: int | None = None,
    devices: int = 1,
    operators: OperatorTables,
) -> Figure:
    """Output tokens a second on `devices` devices."""
    model = _step(cluster, mesh, precision, DEFAULT_SKEW, overlap, hosts, operators)
    each = batch * model.layout.mesh.dp_size / model.layout.devices
    return each * devices / model.decode(batch, context)


def _serving(
    cluster: str, mesh: str, batch: float, prompt: float, output: float, operators: OperatorTables, fused: bool = False
) -> dict[str, Figure]:
    """Aggregated serving at a batch of each DP rank: seconds a token, and output tokens a second a device.

    fused: the shared expert is a routed one.
    """
    config = load_config("deepseek-v3")
    work = Workload(Lengths(prompt), Lengths(output))
    options = PlanOptions(overlap="off", prefill_tokens=8192, operators=operators)
    layout = dataclasses.replace(parse_layout(mesh, 0, config), fused=fused)
    instance = Instance(config, load_cluster(cluster), layout, options, work)
    found = aggregated(instance, 1, batch, prompt)
    return {"tpot": found.tpot, "ttft": found.ttft, "rate": found.per_device}


_TP8 = (
    (8, 12.8, 74.6, 330.6, 1975.4),
    (16, 17.2, 111.9, 356.0, 2149.4),
    (32, 25.6, 151.1, 426.5, 2644.1),
    (64, 34.6, 223.6, 423.1, 2741.1),
)
"""What point 8 measured: users, TPOT in ms, output tokens a second a GPU, mean and P99 of TTFT in ms."""
_VERSION = "sglang-0.5.9"
"""The version nearest to point 8's, 0.5.7, of which the fused experts kernel was timed with even routing."""
_REQUESTS_A_USER = 10
"""By the benchmark's published script (SemiAnalysisAI/InferenceX, benchmarks/single_node/dsr1_fp8_h200.sh), as are all users at once
and steps of up to 32,768 prompt tokens."""
_DRAWN = 922.0
"""Mean length of point 8's prompts and outputs: 0.8 to 1 times 1,024 evenly, as its end-to-end time tells ((12.22 - 0.33) s ÷ 12.8 ms)."""
_DRAWN_VARIATION = 0.064


def _tp8(users: int, operators: OperatorTables) -> dict[str, Figure]:
    """Point 8. SGLang fuses the shared expert with the routed ones on Hopper where experts are cut and not spread
    (`determine_num_fused_shared_experts` in srt/models/deepseek_v2.py), and the script does not forbid it."""
    return _serving("h200-8", "tp=8,ep=1", users, _DRAWN, _DRAWN, operators.of_version(_VERSION), fused=True)


@functools.cache
def _started(users: int, operators: OperatorTables) -> Figure:
    """Milliseconds of the mean TTFT of all requests where all users start at once, as the benchmark plays and reports it.

    The interval is that of one prompt's own time. The engine is played warm: what a cold one costs was learnt from this very point.
    """
    lengths = Lengths(_DRAWN, _DRAWN_VARIATION)
    work = Workload(lengths, lengths, concurrency=users)
    config = load_config("deepseek-v3")
    layout = dataclasses.replace(parse_layout("tp=8,ep=1", 0, config), fused=True)
    options = PlanOptions(overlap="off", prefill_tokens=32768, operators=operators.of_version(_VERSION))
    found = aggregated(Instance(config, load_cluster("h200-8"), layout, options, work), 1, users, 32768)
    count = _REQUESTS_A_USER * users
    mean = simulate(found, OfferedLoad(None, users), Objective(), num_requests=count, warmup=0, at_once=True).ttft.mean
    own = found.ttft
    return Figure(mean, mean * own.low / own.value, mean * own.high / own.value, own.kinds) * 1e3


def _gain(fast: Figure, slow: Figure) -> Figure:
    """Ratio of two times. They share most of their assumptions, so that the interval, of independent times, is on the wide side."""
    return slow / fast


def _h100(mesh: str, hosts: int, operators: OperatorTables, *, overlap: bool, balancing: bool = True) -> StepModel:
    config = load_config("deepseek-v3")
    cluster, layout = load_cluster("h100-32").resized(hosts), parse_layout(mesh, 32, config)
    precision = PRECISIONS["fp8"]
    return StepModel(config, cluster, layout, precision, overlap=overlap, balancing=balancing, operators=operators)


def _overlap_gain(batch: float | None, operators: OperatorTables) -> Figure:
    """What two-batch overlap gains in decode at a batch, or (None) in prefill of 4 K prompts."""
    if batch is None:
        on, off = (_h100("dp=32", 4, operators, overlap=o).prefill(16384, prompt=4096) for o in (True, False))
    else:
        on, off = (_h100("dp=72", 9, operators, overlap=o).decode(batch, 2050) for o in (True, False))
    return _gain(on, off)


def _balancing_gain(decode: bool, operators: OperatorTables) -> Figure:
    """What placing experts by their load gains on the same redundant experts, which without a balancer lie anywhere."""
    if decode:
        models = [_h100("dp=72", 9, operators, overlap=True, balancing=b) for b in (True, False)]
        times = [model.decode(256, 2050) for model in models]
    else:
        models = [_h100("dp=32", 4, operators, overlap=True, balancing=b) for b in (True, False)]
        times = [model.prefill(16384, prompt=4096) for model in models]
    return _gain(*times)


def points(operators: OperatorTables = BUNDLED) -> list[Point]:
    """All of them, in the order of the reference table. operators: tables that the predictions are made with."""
    with_tables = {"operators": operators}

    def prefill(*arguments, **options):
        return lambda: _prefill(*arguments, **options, **with_tables)

    def decode(*arguments, **options):
        return lambda: _decode(*arguments, **options, **with_tables)

    found = [
        Point(
            "1", "H800, prefill EP32 + 32, production, computed tokens/s a node", DAY_6, "tokens/s", 32_200,
            prefill("h800-32", "dp=32", 1915, cached=2468, overlap=True, devices=NODE), "prefill", False,
            "mean over a day of production, idle hours included, not a saturated system; prompts of 4,383 tokens "
            "follow from the page's totals",
        ),
        Point(
            "2", "H800, prefill EP32, prompts of 4K, even routing, two-batch overlap", "DeepSeek profile-data", "tokens/s",
            62_713, prefill("h800-32", "dp=32", 4096, skew=UNIFORM, overlap=True, devices=NODE), "prefill",
        ),
        *(
            Point(
                f"3 ({prompt // 1024}K)", f"H100, prefill EP32, prompts of {prompt // 1024}K, expert balancer", LMSYS,
                "tokens/s", rate, prefill("h100-32", "dp=32", prompt, overlap=True, devices=NODE), "prefill",
            )
            for prompt, rate in ((1024, 57_674), (2048, 54_543), (4096, 50_302))
        ),
        Point(
            "3 (even)", "H100, prefill EP32, prompts of 4K, perfect balance", LMSYS, "tokens/s", 59_337,
            prefill("h100-32", "dp=32", 4096, skew=UNIFORM, overlap=True, devices=NODE), "prefill",
        ),
        Point(
            "4", "H100, decode EP72, batch 256, context 2K, two-batch overlap", LMSYS, "tokens/s", 22_282,
            decode("h100-32", "dp=72", 256, 2050, hosts=9, overlap=True, devices=NODE), "decode",
        ),
        Point(
            "4 (ITL)", "the same, gap between two tokens", LMSYS, "ms", 100,
            lambda: 256 / _decode("h100-32", "dp=72", 256, 2050, hosts=9, overlap=True, operators=operators) * 1e3,
            "decode", False, 'the same run as the rate; given as "about 100", the rate says 92',
        ),
        Point(
            "5", "H20, prefill TP8, prompts of 4K", "LMSYS 2025-09-26", "tokens/s", 16_500,
            prefill("h20-32", "tp=8,ep=1", 4096, devices=NODE), "prefill",
        ),
        Point(
            "6", "H200, DEP8, 1K/2K, batch 128, output tokens/s a GPU", "TensorRT-LLM best practices", "tokens/s", 1_436,
            lambda: _serving("h200-8", "dp=8", 128, 1024, 2048, operators)["rate"], "serving",
            caveat="software of early 2025; DeepEP's and SGLang's speeds assumed",
        ),
        Point(
            "6 (user)", "the same, tokens/s a user", "TensorRT-LLM best practices", "tokens/s", 11.35,
            lambda: 1 / _serving("h200-8", "dp=8", 128, 1024, 2048, operators)["tpot"], "serving", False,
            "the same run as the rate",
        ),
        Point(
            "7 (prefill)", "GB200, prefill 2 GPUs, NVFP4, prompts of 2K, tokens/s a GPU", "vLLM blog 2026-02-03", "tokens/s",
            26_200, prefill("gb200-nvl72-36", "dp=2", 2048, precision="nvfp4"), "prefill",
        ),
        Point(
            "7 (decode)", "GB200, decode 8 GPUs, NVFP4, 2K/2K, tokens/s a GPU", "vLLM blog 2026-02-03", "tokens/s", 10_100,
            decode("gb200-nvl72-36", "dp=8", 512, 3072, precision="nvfp4"), "decode", False,
            "the batch is not given; 512 a GPU assumed",
        ),
    ]  # fmt: skip
    for batch, tpot, rate, ttft, last in _TP8:
        what = f"H200, TP8, 1K/1K, {batch} concurrent"
        for key, unit, value, factor in (("rate", "tokens/s", rate, 1), ("tpot", "ms", tpot, 1e3)):
            found.append(
                Point(
                    f"8 ({batch}{', TPOT' if key == 'tpot' else ''})",
                    f"{what}, {'TPOT' if key == 'tpot' else 'output tokens/s a GPU'}", INFERENCEX, unit, value,
                    lambda b=batch, k=key, f=factor: _tp8(b, operators)[k] * f,
                    "serving", key == "rate", "" if key == "rate" else "the same run as the rate",
                )
            )  # fmt: skip
        found.append(
            Point(
                f"8 ({batch}, TTFT)", f"{what}, mean TTFT of all requests, as reported", INFERENCEX, "ms", ttft,
                lambda b=batch: _started(b, operators), "ttft",
                caveat=f"the first request of each user met a cold engine: the P99 is {last / 1e3:.1f} s; played warm",
            )
        )  # fmt: skip
    for batch, gain in ((32, 0.73), (256, 1.255), (None, 1.31)):
        what = f"decode EP72, gain of two-batch overlap at batch {batch}"
        found.append(
            Point(
                f"overlap ({batch or 'prefill'})",
                f"H100, {what if batch else 'prefill EP32, prompts of 4K, gain of two-batch overlap (1.27 to 1.35)'}", LMSYS,
                "×", gain, lambda b=batch: _overlap_gain(b, operators), "gain",
            )
        )  # fmt: skip
    for decode_side, gain in ((False, 1.49), (True, 2.54)):
        where = "decode EP72, batch 256" if decode_side else "prefill EP32, prompts of 4K"
        found.append(
            Point(
                f"balancing ({'decode' if decode_side else 'prefill'})", f"H100, {where}, gain of the expert balancer", LMSYS,
                "×", gain, lambda d=decode_side: _balancing_gain(d, operators), "gain", False,
                "the skew of the data is not given; that of another data set is taken",
            )
        )  # fmt: skip
    return found
