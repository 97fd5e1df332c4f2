"""The public measured serving points, and what the model says of each. No efficiency was fitted to any of them."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from dsjax.config import load_config
from dsjax.plan.candidate import aggregated
from dsjax.plan.cluster import load_cluster
from dsjax.plan.figure import Figure
from dsjax.plan.instance import Instance
from dsjax.plan.layout import parse_layout
from dsjax.plan.precision import PRECISIONS
from dsjax.plan.skew import DEFAULT_SKEW, DRIFT, UNIFORM, Skew
from dsjax.plan.step import StepModel
from dsjax.plan.simulation.load import Load
from dsjax.plan.simulation.run import simulate
from dsjax.plan.workload import Lengths, Objective, Options, Workload

NODE = 8
LMSYS = "LMSYS 2025-05-05"
INFERENCEX = "InferenceX issue 870"
DAY_6 = "DeepSeek open-infra-index, day 6"


@dataclass(frozen=True)
class Point:
    """One measurement: what, by whom, and how it is predicted.

    comparable: False where the source leaves out a quantity that the prediction depends on, or averages over idle hours: shown,
    not counted. caveat: why, or what had to be assumed.
    """

    key: str
    what: str
    source: str
    unit: str
    measured: float
    predict: Callable[[], Figure]
    comparable: bool = True
    caveat: str = ""

    @property
    def error(self) -> float:
        """Predicted ÷ measured - 1."""
        return self.predict().value / self.measured - 1


def _step(cluster: str, mesh: str, precision: str, skew: Skew, overlap: bool, hosts: int | None) -> StepModel:
    config, found = load_config("deepseek-v3"), load_cluster(cluster)
    if hosts:
        found = found.resized(hosts)
    layout = parse_layout(mesh, None, config)
    if layout.redundant == 0 and overlap:
        layout = parse_layout(mesh, layout.mesh.ep_size, config)
    return StepModel(config, found, layout, PRECISIONS[precision], skew, overlap)


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
) -> Figure:
    """Prompt tokens computed a second on `devices` devices."""
    model = _step(cluster, mesh, precision, skew, overlap, None)
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
) -> Figure:
    """Output tokens a second on `devices` devices."""
    model = _step(cluster, mesh, precision, DEFAULT_SKEW, overlap, hosts)
    each = batch * model.layout.mesh.dp_size / model.layout.devices
    return each * devices / model.decode(batch, context)


def _serving(cluster: str, mesh: str, batch: float, prompt: float, output: float) -> dict[str, Figure]:
    """Aggregated serving at a batch of each DP rank: seconds a token, and output tokens a second a device."""
    config = load_config("deepseek-v3")
    work = Workload(Lengths(prompt), Lengths(output))
    options = Options(overlap="off", prefill_tokens=8192)
    layout = parse_layout(mesh, 0, config)
    instance = Instance(config, load_cluster(cluster), layout, options, work)
    found = aggregated(instance, 1, batch, prompt)
    return {"tpot": found.tpot, "ttft": found.ttft, "rate": found.per_device}


_TP8 = ((8, 12.8, 74.6, 330.6), (16, 17.2, 111.9, 356.0), (32, 25.6, 151.1, 426.5), (64, 34.6, 223.6, 423.1))
"""Of point 8: users, TPOT in ms, output tokens a second a GPU, TTFT in ms."""
_DRAWN = 922.0
"""Mean length of point 8's prompts and outputs: 0.8 to 1 times 1,024 evenly, as its end-to-end time tells ((12.22 - 0.33) s ÷ 12.8 ms)."""
_DRAWN_VARIATION = 0.064


@functools.cache
def _started(users: int, operators: OperatorTables) -> Figure:
    """Milliseconds of the mean TTFT of ten requests a user, all users at once; the interval is that of one prompt's own time."""
    lengths = Lengths(_DRAWN, _DRAWN_VARIATION)
    work = Workload(lengths, lengths, concurrency=users)
    config, layout = load_config("deepseek-v3"), parse_layout("tp=8,ep=1", 0, load_config("deepseek-v3"))
    options = Options(overlap="off", prefill_tokens=8192, operators=operators)
    found = aggregated(Instance(config, load_cluster("h200-8"), layout, options, work), 1, users, 8192)
    mean = simulate(found, Load(None, users), Objective(), num_requests=10 * users, warmup=0, at_once=True).ttft.mean
    own = found.decode.prefill_step(8192)
    return Figure(mean, mean * own.low / own.value, mean * own.high / own.value, own.kinds) * 1e3


def _gain(fast: Figure, slow: Figure) -> Figure:
    """Ratio of two times that share their assumptions: taken end by end."""
    ends = [slow.value / fast.value, slow.low / fast.low, slow.high / fast.high]
    return Figure(ends[0], min(ends), max(ends), fast.kinds | slow.kinds)


def _h100(mesh: str, hosts: int, *, overlap: bool, skew: Skew = DEFAULT_SKEW) -> StepModel:
    config = load_config("deepseek-v3")
    cluster, layout = load_cluster("h100-32").resized(hosts), parse_layout(mesh, 32, config)
    return StepModel(config, cluster, layout, PRECISIONS["fp8"], skew, overlap)


def _overlap_gain(batch: float | None) -> Figure:
    """Of two-batch overlap, in decode at a batch, or (None) in prefill of 4 K prompts."""
    if batch is None:
        on, off = (_h100("dp=32", 4, overlap=o).prefill(16384, prompt=4096) for o in (True, False))
    else:
        on, off = (_h100("dp=72", 9, overlap=o).decode(batch, 2050) for o in (True, False))
    return _gain(on, off)


def _balancing_gain(decode: bool) -> Figure:
    """Of placing experts by their load, on the same redundant experts: the whole skew against what a balancer leaves."""
    whole = Skew(
        DEFAULT_SKEW.variation / DRIFT[0],
        DEFAULT_SKEW.low / DRIFT[1],
        DEFAULT_SKEW.high / DRIFT[2],
        f"{DEFAULT_SKEW.source}; unbalanced",
    )
    if decode:
        times = [_h100("dp=72", 9, overlap=True, skew=s).decode(256, 2050) for s in (DEFAULT_SKEW, whole)]
    else:
        times = [_h100("dp=32", 4, overlap=True, skew=s).prefill(16384, prompt=4096) for s in (DEFAULT_SKEW, whole)]
    return _gain(*times)


def points() -> list[Point]:
    """All of them, in the order of the reference table."""
    found = [
        Point(
            "1",
            "H800, prefill EP32 + 32, production, computed tokens/s a node",
            DAY_6,
            "tokens/s",
            32_200,
            lambda: _prefill("h800-32", "dp=32", 1915, cached=2468, overlap=True, devices=NODE),
            False,
            "mean over a day of production, idle hours included, not a saturated system; prompts of 4,383 tokens "
            "follow from the page's totals",
        ),
        Point(
            "2",
            "H800, prefill EP32, prompts of 4K, even routing, two-batch overlap",
            "DeepSeek profile-data",
            "tokens/s",
            62_713,
            lambda: _prefill("h800-32", "dp=32", 4096, skew=UNIFORM, overlap=True, devices=NODE),
        ),
        *(
            Point(
                f"3 ({prompt // 1024}K)",
                f"H100, prefill EP32, prompts of {prompt // 1024}K, expert balancer",
                LMSYS,
                "tokens/s",
                rate,
                lambda prompt=prompt: _prefill("h100-32", "dp=32", prompt, overlap=True, devices=NODE),
            )
            for prompt, rate in ((1024, 57_674), (2048, 54_543), (4096, 50_302))
        ),
        Point(
            "3 (even)",
            "H100, prefill EP32, prompts of 4K, perfect balance",
            LMSYS,
            "tokens/s",
            59_337,
            lambda: _prefill("h100-32", "dp=32", 4096, skew=UNIFORM, overlap=True, devices=NODE),
        ),
        Point(
            "4",
            "H100, decode EP72, batch 256, context 2K, two-batch overlap",
            LMSYS,
            "tokens/s",
            22_282,
            lambda: _decode("h100-32", "dp=72", 256, 2050, hosts=9, overlap=True, devices=NODE),
        ),
        Point(
            "4 (ITL)",
            "the same, gap between two tokens",
            LMSYS,
            "ms",
            100,
            lambda: 256 / _decode("h100-32", "dp=72", 256, 2050, hosts=9, overlap=True) * 1e3,
            False,
            'given as "about 100"; the rate says 92',
        ),
        Point(
            "5",
            "H20, prefill TP8, prompts of 4K",
            "LMSYS 2025-09-26",
            "tokens/s",
            16_500,
            lambda: _prefill("h20-32", "tp=8,ep=1", 4096, devices=NODE),
        ),
        Point(
            "6",
            "H200, DEP8, 1K/2K, batch 128, output tokens/s a GPU",
            "TensorRT-LLM best practices",
            "tokens/s",
            1_436,
            lambda: _serving("h200-8", "dp=8", 128, 1024, 2048)["rate"],
            caveat="software of early 2025; DeepEP's and DeepGEMM's speeds assumed",
        ),
        Point(
            "6 (user)",
            "the same, tokens/s a user",
            "TensorRT-LLM best practices",
            "tokens/s",
            11.35,
            lambda: 1 / _serving("h200-8", "dp=8", 128, 1024, 2048)["tpot"],
            False,
            "the same run as the rate",
        ),
        Point(
            "7 (prefill)",
            "GB200, prefill 2 GPUs, NVFP4, prompts of 2K, tokens/s a GPU",
            "vLLM blog 2026-02-03",
            "tokens/s",
            26_200,
            lambda: _prefill("gb200-nvl72-36", "dp=2", 2048, precision="nvfp4"),
        ),
        Point(
            "7 (decode)",
            "GB200, decode 8 GPUs, NVFP4, 2K/2K, tokens/s a GPU",
            "vLLM blog 2026-02-03",
            "tokens/s",
            10_100,
            lambda: _decode("gb200-nvl72-36", "dp=8", 512, 3072, precision="nvfp4"),
            False,
            "the batch is not given; 512 a GPU assumed",
        ),
    ]
    for batch, tpot, rate, ttft in _TP8:
        what = f"H200, TP8, 1K/1K, {batch} concurrent"
        for key, unit, value, factor in (("rate", "tokens/s", rate, 1), ("tpot", "ms", tpot, 1e3)):
            found.append(
                Point(
                    f"8 ({batch}{', TPOT' if key == 'tpot' else ''})",
                    f"{what}, {'TPOT' if key == 'tpot' else 'output tokens/s a GPU'}", INFERENCEX, unit, value,
                    lambda b=batch, k=key, f=factor: _serving("h200-8", "tp=8,ep=1", b, _DRAWN, _DRAWN, operators)[k] * f,
                    "serving", key == "rate", "" if key == "rate" else "the same run as the rate",
                )
            )  # fmt: skip
        found.append(
            Point(
                f"8 ({batch}, TTFT)", f"{what}, TTFT, simulated from a start of all at once", INFERENCEX, "ms", ttft,
                lambda b=batch: _started(b, operators), "ttft", caveat="ten requests a user assumed",
            )
        )  # fmt: skip
    for batch, gain in ((32, 0.73), (256, 1.255)):
        found.append(
            Point(
                f"ablation ({batch})",
                f"H100, decode EP72, gain of two-batch overlap at batch {batch}",
                LMSYS,
                "×",
                gain,
                lambda batch=batch: _overlap_gain(batch),
            )
        )
    found.append(
        Point(
            "ablation (prefill)",
            "H100, prefill EP32, prompts of 4K, gain of two-batch overlap (1.27 to 1.35)",
            LMSYS,
            "×",
            1.31,
            lambda: _overlap_gain(None),
        )
    )
    for decode, gain in ((False, 1.49), (True, 2.54)):
        found.append(
            Point(
                f"balancing ({'decode' if decode else 'prefill'})",
                f"H100, {'decode EP72, batch 256' if decode else 'prefill EP32, prompts of 4K'}, gain of the expert balancer",
                LMSYS,
                "×",
                gain,
                lambda decode=decode: _balancing_gain(decode),
                False,
                "the skew of the data is not given; the default is assumed",
            )
        )
    return found


def mean_absolute_error(counted: list[Point]) -> float:
    """Mean of |predicted ÷ measured - 1|."""
    return statistics.mean(abs(point.error) for point in counted)


def table() -> str:
    """Markdown: every point, predicted beside measured, the interval, the error; then the means."""
    every = points()
    lines = [
        "| # | what | measured | predicted | interval | error | |",
        "|---|---|---|---|---|---|---|",
    ]
    for point in every:
        figure = point.predict()
        inside = "inside" if figure.low <= point.measured <= figure.high else "outside"
        shown = (
            "not counted: " + point.caveat
            if not point.comparable
            else inside + (f"; {point.caveat}" if point.caveat else "")
        )
        lines.append(
            f"| {point.key} | {point.what} ({point.source}) | {_number(point.measured)} {point.unit} | {_number(figure.value)} | "
            f"{_number(figure.low)} – {_number(figure.high)} | {point.error:+.0%} | {shown} |"
        )
    comparable = [point for point in every if point.comparable]
    held = sum(p.predict().low <= p.measured <= p.predict().high for p in comparable)
    one_each = {p.key.split(" ")[0] for p in comparable}
    by_system = statistics.mean(
        mean_absolute_error([p for p in comparable if p.key.split(" ")[0] == k]) for k in one_each
    )
    lines += [
        "",
        f"Mean absolute error: **{mean_absolute_error(comparable):.1%}** over the {len(comparable)} comparable figures, "
        f"{by_system:.1%} with each numbered point counted once, {mean_absolute_error(every):.1%} with those that are not "
        f"comparable. {held} of {len(comparable)} measured values lie inside the predicted interval.",
    ]
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
