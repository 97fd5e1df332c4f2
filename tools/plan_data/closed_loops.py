"""Closed loops of InferenceX on one host, played as the benchmark plays them: predictions first, its raw columns entered afterwards.

    python -m tools.plan_data.closed_loops predict                    # writes the predictions, without looking at a result
    python -m tools.plan_data.closed_loops enter benchmarks.json      # writes the published columns beside them

The rule was set before a number was read: DeepSeek-R1, no drafts, prefill and decode together, H200, B200 and B300. `RUNS` had been
predicted before by their rate (inferencex.py), and are predicted here by their TTFT; `FURTHER` are all others of that file.

What is played: all users at once, each finished request replaced until each has made ten, lengths evenly from 0.8 to 1 times the given
ones, the engine's own scheduler, steps of 16,384 prompt tokens. Nothing warms the engine up: the first request of each user is taken to
wait a second longer (0 to 2.3, which is what point 8 of validation.py shows of another version of SGLang).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from dsjax.config import ModelConfig, load_config
from dsjax.hardware import Hardware
from dsjax.plan.candidate import Candidate, aggregated
from dsjax.plan.cluster import load_cluster
from dsjax.plan.figure import Figure, assumed
from dsjax.plan.fit import Launch, fit, planned_launch, set_aside
from dsjax.plan.instance import Instance
from dsjax.plan.layout import InstanceLayout, parse_layout
from dsjax.plan.memory import memory
from dsjax.plan.operator_tables import BUNDLED
from dsjax.plan.precision import precision
from dsjax.plan.simulation.load import OfferedLoad
from dsjax.plan.simulation.outcome import SimulationOutcome
from dsjax.plan.simulation.run import simulate
from dsjax.plan.workload import Lengths, Objective, PlanOptions, Workload
from tools.plan_data import files
from tools.plan_data.inferencex import RUN_PRECISIONS, RUNS, Run
from tools.plan_data.protocol import Protocol

DATA = Path(__file__).parent / "closed_loops.csv"
REQUESTS_A_USER, RANGE_RATIO, STEP_TOKENS = 10, 0.8, 16384
COLD = (1.0, 0.0, 2.3)
METRICS = {
    "rate": ("output_tput_per_gpu", 1.0),
    "tpot": ("mean_tpot", 1e3),
    "ttft": ("mean_ttft", 1e3),
    "ttft_median": ("median_ttft", 1e3),
    "ttft_p99": ("p99_ttft", 1e3),
}
"""What is predicted: its column in InferenceX's results and what it is multiplied by (ms; rates are tokens a second a device)."""
COLUMNS = (
    "key",
    "device",
    "engine",
    "weights",
    "prompt",
    "output",
    "users",
    "mesh",
    "metric",
    "predicted",
    "low",
    "high",
    "measured",
)

FURTHER = (
    Run("b200", "trt", "fp8", 1024, 1024, 64, "dp=8"),
    Run("b200", "trt", "fp8", 1024, 8192, 64, "tp=8"),
    Run("b200", "trt", "fp4", 1024, 1024, 16, "tp=8"),
    Run("b200", "trt", "fp4", 1024, 1024, 64, "tp=8,ep=1"),
    Run("b200", "trt", "fp4", 1024, 8192, 64, "tp=4,ep=1"),
    Run("b200", "trt", "fp4", 1024, 8192, 128, "tp=4"),
    Run("h200", "trt", "fp8", 1024, 1024, 4, "tp=8,ep=1"),
    Run("h200", "trt", "fp8", 1024, 1024, 64, "tp=8,ep=1"),
    Run("h200", "trt", "fp8", 1024, 8192, 4, "tp=8,ep=1"),
    Run("h200", "trt", "fp8", 1024, 8192, 8, "tp=8"),
    Run("h200", "trt", "fp8", 1024, 8192, 64, "tp=8,ep=1"),
    Run("h200", "trt", "fp8", 8192, 1024, 4, "tp=8,ep=1"),
    Run("h200", "trt", "fp8", 8192, 1024, 64, "tp=8,ep=1"),
    Run("b200", "sglang", "fp8", 1024, 1024, 4, "tp=8"),
    Run("b200", "sglang", "fp8", 1024, 1024, 16, "tp=8"),
    Run("b200", "sglang", "fp8", 8192, 1024, 4, "tp=8"),
    Run("b200", "sglang", "fp8", 8192, 1024, 16, "tp=8,ep=1"),
    Run("b200", "sglang", "fp8", 1024, 8192, 8, "tp=8"),
    Run("b200", "sglang", "fp8", 1024, 8192, 64, "tp=8"),
    Run("b200", "sglang", "fp4", 1024, 1024, 8, "tp=4,ep=1"),
    Run("b200", "sglang", "fp4", 1024, 8192, 4, "tp=4,ep=1"),
    Run("b200", "sglang", "fp4", 1024, 8192, 32, "tp=4,ep=1"),
    Run("b200", "sglang", "fp4", 1024, 8192, 64, "tp=8,ep=1"),
    Run("b200", "sglang", "fp4", 8192, 1024, 64, "tp=8,ep=1"),
    Run("b300", "sglang", "fp4", 1024, 1024, 1, "tp=4"),
    Run("b300", "sglang", "fp4", 1024, 1024, 4, "tp=4"),
    Run("b300", "sglang", "fp4", 1024, 1024, 16, "tp=4"),
    Run("b300", "sglang", "fp4", 1024, 1024, 32, "tp=8"),
    Run("b300", "sglang", "fp4", 1024, 1024, 128, "tp=8"),
    Run("b300", "sglang", "fp4", 8192, 1024, 1, "tp=4"),
    Run("b300", "sglang", "fp4", 8192, 1024, 2, "tp=8"),
    Run("b300", "sglang", "fp4", 8192, 1024, 8, "tp=4"),
    Run("b300", "sglang", "fp4", 8192, 1024, 16, "tp=8"),
    Run("b300", "sglang", "fp4", 8192, 1024, 128, "tp=4"),
    Run("b300", "sglang", "fp8", 1024, 1024, 1, "tp=8,ep=1"),
    Run("b300", "sglang", "fp8", 1024, 1024, 4, "tp=8,ep=1"),
    Run("b300", "sglang", "fp8", 1024, 1024, 16, "tp=8,ep=1"),
    Run("b300", "sglang", "fp8", 1024, 1024, 64, "tp=8,ep=1"),
    Run("b300", "sglang", "fp8", 8192, 1024, 1, "tp=8,ep=1"),
    Run("b300", "sglang", "fp8", 8192, 1024, 8, "tp=4,ep=1"),
)


def every_run() -> list[tuple[str, Run, tuple[str, ...]]]:
    """(key, run, metrics that are predicted of it): the rates of the first had been read when their TTFT was predicted."""
    first = [(f"X{n}", run, tuple(METRICS)[2:]) for n, run in enumerate(RUNS, 1)]
    return [*first, *((f"Y{n}", run, tuple(METRICS)) for n, run in enumerate(FURTHER, 1))]


def deployment(run: Run, rule: Protocol | None = None, drafts: int = 0) -> Candidate:
    """A run as a deployment of the planner. A B300 is a GB300 behind the NVSwitch of a host of eight.

    rule: how its engine was started, which says what the cache has room for; without it steps have `STEP_TOKENS` prompt tokens, and there
    is room for all. drafts: a step's, for which the MTP module's weights and cache take room.
    """
    config = load_config("deepseek-v3")
    cluster = load_cluster("b200-8" if run.device == "b300" else f"{run.device}-8")
    if run.device == "b300":
        chip = dataclasses.replace(load_cluster("gb300-nvl72-36").hardware, scale_up_devices=8, devices_per_host=8)
        cluster = dataclasses.replace(cluster, hardware=chip)
    lengths = (Lengths(tokens).ranged(RANGE_RATIO) for tokens in (run.prompt, run.output))
    cache = "bf16" if (run.device, run.engine) == ("h200", "sglang") else "fp8"
    operators = BUNDLED.of_version(run.tables) if run.tables else BUNDLED
    step_tokens = rule.step_tokens if rule else STEP_TOKENS
    options = PlanOptions(
        precision(RUN_PRECISIONS[run.weights], cache),
        overlap="off",
        operators=operators,
        prefill_tokens=step_tokens,
        engine=rule.engine if rule else run.program,
        host=rule.host if rule else "overlapped",
    )
    layout = dataclasses.replace(parse_layout(run.mesh, 0, config), fused=run.fuses)
    bytes_of_device = (
        _bytes_with_room(rule, drafts, config, layout, options, cluster.hardware)
        if rule
        else 2 * cluster.hardware.visible_bytes
    )
    cluster = dataclasses.replace(cluster, hardware=dataclasses.replace(cluster.hardware, driver_bytes=bytes_of_device))
    work = Workload(*lengths, concurrency=float(run.users))
    return aggregated(Instance(config, cluster, layout, options, work), 1, run.users / layout.mesh.dp_size, step_tokens)


def _bytes_with_room(
    rule: Protocol, drafts: int, config: ModelConfig, layout: InstanceLayout, options: PlanOptions, hardware: Hardware
) -> int:
    """Bytes of a device in which the planner's cache is as large as the engine's own rule leaves room for."""
    launch = Launch(
        rule.launched,
        hardware.visible_bytes,
        rule.fraction,
        prefill_tokens=rule.step_tokens,
        sampled=256,
        mtp=drafts > 0,
    )
    tokens = fit(config, layout, options.precision, launch).cache_tokens.value
    if tokens <= 0:
        raise ValueError(f"{launch} leaves no room for a cache")
    planned = planned_launch(options, hardware.visible_bytes, layout, launch.longest)
    aside = set_aside(config, layout, options.precision, planned)
    usual = memory(config, layout, options.precision, hardware.visible_bytes, aside, drafts > 0)
    return round(usual.weights_total + tokens * usual.cache_per_token + aside.value)


def played(found: Candidate, users: int) -> SimulationOutcome:
    """The published loop on that deployment."""
    load, count = OfferedLoad(None, users), REQUESTS_A_USER * users
    return simulate(found, load, Objective(), num_requests=count, warmup=0, at_once=True)


def predictions(run: Run) -> dict[str, Figure]:
    """By the names of `METRICS`: what is played, with the relative ends of the mean-value answer of one prompt or token."""
    found = deployment(run)
    seen = played(found, run.users)
    cold = assumed(*COLD, "a cold engine's first prompt", "point 8", "s")

    def around(value: float, like: Figure) -> Figure:
        return Figure(value, value * like.low / like.value, value * like.high / like.value, like.kinds)

    devices = found.decode.layout.devices
    return {
        "rate": around(seen.tokens_per_s / devices, found.throughput),
        "tpot": around(seen.tpot.mean, found.tpot) * 1e3,
        "ttft": (around(seen.ttft.mean, found.ttft) + cold / REQUESTS_A_USER) * 1e3,
        "ttft_median": around(seen.ttft.p50, found.ttft) * 1e3,
        "ttft_p99": (around(seen.ttft.p99, found.ttft) + cold) * 1e3,
    }


def rows() -> list[dict[str, str]]:
    """Give the rows of `closed_loops.csv`: one for each figure of each run."""
    return files.read(DATA)


def predict() -> None:
    """Write every prediction, with no measured value."""
    made = []
    for key, run, metrics in every_run():
        said = predictions(run)
        for metric in metrics:
            ends = (f"{end:.4g}" for end in (said[metric].value, said[metric].low, said[metric].high))
            fields = (
                key,
                run.device,
                run.engine,
                run.weights,
                run.prompt,
                run.output,
                run.users,
                run.mesh,
                metric,
                *ends,
                "",
            )
            made.append(dict(zip(COLUMNS, map(str, fields), strict=True)))
        print(key, run.name, flush=True)
    files.write(DATA, COLUMNS, made)


def enter(results: Path) -> None:
    """Write the published columns beside predictions that are there already, and leave these as they are."""
    published = json.loads(results.read_text(encoding="utf-8"))
    found = rows()
    for row in found:
        wanted = row["device"], row["engine"], row["weights"], int(row["prompt"]), int(row["output"]), int(row["users"])
        (one,) = (
            r
            for r in published
            if (r["hardware"], r["framework"], r["precision"], r["isl"], r["osl"], r["conc"]) == wanted
            and (r["model"], r["spec_method"], r["disagg"]) == ("dsr1", "none", False)
        )
        column, factor = METRICS[row["metric"]]
        row["measured"] = f"{one['metrics'][column] * factor:.4g}"
    files.write(DATA, COLUMNS, found)


if __name__ == "__main__":
    command, given = files.arguments(__doc__, predict=0, enter=1)
    if command == "predict":
        predict()
    else:
        enter(Path(given[0]))
