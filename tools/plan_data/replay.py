"""Predict the rows of blind rounds again with today's planner.

    python -m tools.plan_data.replay OUT.csv                       # rate and TPOT of every run, by the planner's closed forms
    python -m tools.plan_data.replay OUT.csv --round "all left"    # only the rows of this round
    python -m tools.plan_data.replay OUT.csv --played              # simulate every request, TTFT too; the largest runs take hours
    python -m tools.plan_data.replay OUT.csv --rows NEW.csv        # predict the rows of a new round, which have no measurements yet
    python -m tools.plan_data.replay --mechanisms                  # the error without each mechanism of an engine

OUT.csv has the columns of `configs/blind_predictions.csv` with new predictions; `python tools/plan_score.py OUT.csv` scores it. A run is a
closed loop of InferenceX: all users start at once, and each sends ten requests, one after another. Rows without a day in `ran` come from
other sources and are skipped.

The columns from `running` on say how InferenceX started the engine on that day, by its own scripts and recipes
(SemiAnalysisAI/InferenceX, `benchmarks/single_node/fixed_seq_len/dsr1_*.sh` with their history, `configs/nvidia-master.yaml`, and
NVIDIA/srt-slurm for separate prefill):

- `running`: most running requests of the engine, or of a DP rank with separate prefill
- `step`: most prompt tokens of a DP rank in a step
- `sent`: tokens of a prompt as the server most likely counted them, where the client's tokenizer differed (InferenceX pull requests 937,
  1381)
- `fraction`: memory fraction, by the engine's own rule (`fit.RULES`)
- `first_prompt`: extra seconds of a user's first request: `warm`, or a key of `COLD`
- `tables`, `prefill_tables`: tables of the engine's own version (`configs/operators/VERSION`); `without TABLE` leaves one out
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dsjax.config import load_config
from dsjax.plan.calibration import LONGER, RATE, TPOT
from dsjax.plan.candidate import Candidate, aggregated, prefill_pool, separated
from dsjax.plan.cluster import Cluster, load_cluster
from dsjax.plan.engine import PUBLISHED, Engine
from dsjax.plan.figure import assumed, ends
from dsjax.plan.fit import Launch, fit
from dsjax.plan.instance import Instance
from dsjax.plan.layout import parse_layout
from dsjax.plan.operations import FLASHINFER_FP8_RATE
from dsjax.plan.operator_tables import BUNDLED, BUNDLED_FOLDER, OperatorTables, operator_tables
from dsjax.plan.precision import named_precision
from dsjax.plan.simulation.outcome import SimulationOutcome, reported, simulate
from dsjax.plan.simulation.service import OfferedLoad
from dsjax.plan.workload import Lengths, Objective, PlanOptions, Workload
from sharding import MeshSpec

DATA = Path(__file__).parents[2] / "configs" / "blind_predictions.csv"
REQUESTS_A_USER, RANGE_RATIO = 10, 0.8
"""Requests of each user; lengths are uniform between 0.8 and 1 times the given ones (`--random-range-ratio`)."""
ACCEPTANCE = 0.70
"""Acceptance rate of the first draft for random prompts: DeepSeek-V4-Flash at temperature 1 (vllm-project/vllm pull request 41044), whose
single MTP module is trained and used as R1's. No figure for R1 on random prompts is published."""
PRECISIONS = {"fp4": "nvfp4-bf16", "fp8": "fp8"}
"""The FP4 checkpoint is nvidia/DeepSeek-R1-0528-FP4-V2, which keeps attention in bf16."""
COLD = {
    "sglang": (1.0, 0.0, 2.3),
    "trt h200": (5.3, 2.0, 8.3),
    "trt b200": (0.9, 0.1, 2.2),
    "warm": ends("a user's first prompt"),
}
"""Extra seconds of a user's first request: median, least, most. Cold engines: read from the results of 2025-12-15. `warm`: two warm-up
requests a user, since 2026-01-21 (`--num-warmups`)."""
STEP = 16384
"""Prompt tokens of a DP rank in a step of a prefill instance without a known recipe: an assumption."""
ROOMY = 2
"""Memory of a device with separate prefill, as a multiple of its own: the run happened, so there was room."""
REDUNDANT, WIDE = 32, 16
"""Redundant experts of a decode instance with this many DP ranks or more, by NVIDIA's and SGLang's guides; results do not say."""
SWITCHES = ("fp8_rate", "holds_prompts", "mixes")
"""Fields of an `Engine` by which runs differ from `PUBLISHED`."""
MECHANISMS = (*SWITCHES, "as_sent", "tables")
"""What `--mechanisms` leaves out, one at a time: a switch, the prompts as sent, the tables of the engine's own version."""


@dataclass(frozen=True)
class Run:
    """One run of the benchmark, by the columns of `configs/blind_predictions.csv`.

    prefill, decode: (instances, mesh); prefill is None if one engine does both. drafts: tokens drafted a step.
    """

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
    step: int = STEP
    sent: int = 0
    fraction: float = 0.0
    first_prompt: str = "warm"
    prefill_tables: str = ""
    tables: str = ""

    @classmethod
    def of(cls, row: Mapping[str, str]) -> Run:
        """Read the settings of a row."""
        prompt, output, users, drafts = (int(row[name]) for name in ("prompt", "output", "users", "drafts"))
        return cls(
            *(row[name] for name in ("device", "engine", "weights")),
            *(prompt, output, users),
            *(_side(row["prefill"]) if row["prefill"] else None, _side(row["mesh"])),
            *(drafts, float(row["running"] or math.inf), int(row["step"] or STEP), int(row["sent"] or prompt)),
            *(float(row["fraction"] or 0), row["first_prompt"], row["prefill_tables"], row["tables"]),
        )

    @property
    def cache(self) -> str:
        """The cache's dtype, by the scripts."""
        return "bf16" if self.engine == "sglang" and self.device in ("h100", "h200") else "fp8"

    @property
    def fuses(self) -> bool:
        """Whether the shared expert is computed as a routed one: SGLang on Hopper with experts split over `tp`."""
        return (self.device, self.engine) == ("h200", "sglang") and self.decode[1].endswith("ep=1")

    def started(self, without: str = "") -> Engine:
        """The engine with the switches of this run. without: a switch of `SWITCHES` that stays as in `PUBLISHED`."""
        switches = {}
        if not self.prefill:
            switches = {"holds_prompts": self.engine == "trt", "mixes": self.engine == "trt"}
        elif self.engine != "trt" and self.drafts:
            switches = {"mixes": False}
        if switches.get("mixes") is False and self.weights == "fp8" and (self.prefill or self.device != "h200"):
            # SGLang with --fp8-gemm-backend flashinfer_trtllm.
            switches["fp8_rate"] = FLASHINFER_FP8_RATE
        return dataclasses.replace(PUBLISHED, **{name: value for name, value in switches.items() if name != without})


def _side(text: str) -> tuple[int, str]:
    """`4 x dp=8` as (4, "dp=8"); a mesh alone is one instance."""
    count, several, mesh = text.partition(" x ")
    return (int(count), mesh) if several else (1, text)


@functools.cache
def _tables(name: str, without: str) -> OperatorTables:
    version, _, table = name.partition(" without ")
    if not version or without == "tables":
        return BUNDLED
    tables = operator_tables(BUNDLED_FOLDER / version)
    return tables.without(table) if table else tables


def cluster_of(run: Run, devices: int) -> Cluster:
    """As many hosts as it takes. A B300 is a GB300 behind the NVSwitch of a host of eight, with its 800 Gb/s card."""
    name = "b200" if run.device == "b300" else run.device
    size = {"b200": "8", "gb200": "nvl72-36", "gb300": "nvl72-36"}.get(name, "32" if run.prefill else "8")
    cluster = load_cluster(f"{name}-{size}")
    if run.device == "b300":
        chip = dataclasses.replace(load_cluster("gb300-nvl72-36").hardware, scale_up_devices=8, devices_per_host=8)
        gbps = 800.0 if run.prefill else cluster.network_gbps
        cluster = dataclasses.replace(cluster, hardware=chip, network_gbps=gbps)
    return cluster.resized(-(-devices // cluster.devices_per_host))


def answer(run: Run, without: str = "") -> Candidate:
    """The closed-form estimate of a run. without: the mechanism to leave out, one of `MECHANISMS`."""
    if run.prefill:
        return _separated(run, without)
    return _on_one_host(run if without == "as_sent" else dataclasses.replace(run, prompt=run.sent), without)


def _work(run: Run) -> Workload:
    mean, half = (1 + RANGE_RATIO) / 2, (1 - RANGE_RATIO) / (1 + RANGE_RATIO)
    lengths = (Lengths(tokens * mean).around(half) for tokens in (run.prompt, run.output))
    return Workload(*lengths, concurrency=float(run.users))


def _options(run: Run, without: str) -> PlanOptions:
    how = {"drafts": run.drafts, "acceptance": ACCEPTANCE, "engine": run.started(without)}
    return PlanOptions(named_precision(PRECISIONS[run.weights], run.cache), overlap="off", **how)


def _with_memory(cluster: Cluster, room: int) -> Cluster:
    chip = dataclasses.replace(cluster.hardware, memory_bytes=room, driver_bytes=room)
    return dataclasses.replace(cluster, hardware=chip)


def _on_one_host(run: Run, without: str) -> Candidate:
    config, tables = load_config("deepseek-v3"), _tables(run.tables, without)
    layout = dataclasses.replace(parse_layout(run.decode[1], 0, config), fused=run.fuses)
    options = dataclasses.replace(_options(run, without), operators=tables, prefill_tokens=run.step)
    instance = Instance(config, cluster_of(run, layout.devices), layout, options, _work(run))
    cluster = _with_memory(instance.cluster, _bytes_with_room(run, instance))
    batch = min(run.users, run.running) / layout.mesh.dp_size
    return aggregated(dataclasses.replace(instance, cluster=cluster, steps={}), 1, batch, run.step)


def _bytes_with_room(run: Run, instance: Instance) -> int:
    """Bytes of a device in which the planner's cache is as large as the engine's own rule leaves room for."""
    options, device = instance.options, instance.cluster.hardware.visible_bytes
    how = {"prefill_tokens": run.step, "sampled": 256, "mtp": run.drafts > 0}
    launch = Launch("tensorrt-llm" if run.engine == "trt" else "sglang", device, run.fraction, **how)
    tokens = fit(instance.config, instance.layout, options.precision, launch).cache_tokens
    if tokens <= 0:
        raise ValueError(f"{launch} leaves no room for a cache")
    usual = instance.memory
    return round(usual.weights_total + usual.reserve + tokens * usual.cache_per_token)


def _separated(run: Run, without: str) -> Candidate:
    config, options = load_config("deepseek-v3"), _options(run, without)
    redundant = REDUNDANT if MeshSpec.parse(run.decode[1]).dp_size >= WIDE else 0
    layouts = [parse_layout(run.prefill[1], 0, config), parse_layout(run.decode[1], redundant, config)]
    counts = run.prefill[0], run.decode[0]
    cluster = cluster_of(run, sum(n * layout.devices for n, layout in zip(counts, layouts, strict=True)))
    cluster = _with_memory(cluster, ROOMY * cluster.hardware.memory_bytes)
    operators = (_tables(name, without) for name in (run.prefill_tables, run.tables))
    first, then = (
        Instance(config, cluster, layout, dataclasses.replace(options, operators=tables), _work(run))
        for layout, tables in zip(layouts, operators, strict=True)
    )
    batch = min(run.running, run.users / (then.replicas * counts[1]))
    return separated(prefill_pool(first, run.step), counts[0], then, counts[1], batch)


def mean_values(run: Run, without: str = "") -> dict[str, float]:
    """Rate (tokens a second of a device that decodes) and TPOT (ms) of a run, as the planner's closed forms have them."""
    found = _within_cache(run, answer(run, without))
    return {RATE: found.throughput / _devices(found), TPOT: found.tpot * 1e3}


def _within_cache(run: Run, found: Candidate) -> Candidate:
    """No more running requests than the KV cache holds. The other users wait.

    TensorRT-LLM admits a request if the cache has room for all of its tokens (`GUARANTEED_NO_EVICT`, its default); SGLang admits by the
    tokens in use, and retracts requests when the cache is full.
    """
    decode = found.decode
    most = decode.memory.cache_tokens / (decode.workload.held if run.engine == "trt" else decode.workload.context)
    return found if run.prefill or found.batch <= most else aggregated(decode, 1, most, run.step)


def played(run: Run, without: str = "") -> dict[str, float]:
    """What the benchmark reports of a run, by kind: its loop is simulated."""
    found = answer(run, without)
    seen = _simulated(found, run.users)
    seconds = (0.0, 0.0, 0.0) if run.prefill else COLD[run.first_prompt]
    cold = assumed(*seconds, "a user's first prompt", "runs of InferenceX", "s")
    made = reported(seen, REQUESTS_A_USER, cold)
    return {kind: figure / _devices(found) if kind == RATE else figure * 1e3 for kind, figure in made.items()}


def _devices(found: Candidate) -> int:
    return found.decode.layout.devices * found.count


def _simulated(found: Candidate, users: int) -> SimulationOutcome:
    load, count = OfferedLoad(None, users), REQUESTS_A_USER * users
    return simulate(found, load, Objective(), num_requests=count, warmup=0, at_once=True)


def read(path: Path = DATA) -> list[dict[str, str]]:
    """The rows of a file of predictions."""
    with path.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def write(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """Write rows in the columns of `DATA`, once all of them are made."""
    made = list(rows)
    with path.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, list(read()[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(made)


def replayed(rows: Iterable[dict[str, str]], play: bool = False, without: str = "") -> Iterator[dict[str, str]]:
    """Rows with what the planner predicts today. Runs that are started alike are predicted once.

    play: simulate the loops; otherwise only rates and TPOT are given.
    """
    predict = functools.cache(played if play else mean_values)
    for row in rows:
        if row["ran"]:
            run = Run.of(row)
            figure = predict(run, without).get(row["kind"])
            if figure:
                yield row | dict.fromkeys(("predicted", "low", "high"), f"{figure:.5g}")


def mechanisms(rows: list[dict[str, str]], play: bool = False) -> str:
    """Markdown: the mean absolute error of each kind of figure with each of `MECHANISMS` left out in turn."""
    rows = [row for row in rows if row["distance"] != LONGER]
    kinds = list(dict.fromkeys(row["kind"] for row in rows if play or row["kind"] in (RATE, TPOT)))
    lines = [f"| left out | {' | '.join(kinds)} |", "|---" * (1 + len(kinds)) + "|"]
    for without in ("", *MECHANISMS):
        errors: dict[str, list[float]] = {kind: [] for kind in kinds}
        for row in replayed(rows, play, without):
            errors[row["kind"]].append(abs(float(row["predicted"]) / float(row["measured"]) - 1))
        lines.append(
            f"| {without or 'nothing'} | {' | '.join(f'{statistics.mean(errors[kind]):.1%}' for kind in kinds)} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, metavar="OUT.csv")
    parser.add_argument("--rows", type=Path, default=DATA, help="a file of rows (default: all blind rounds)")
    parser.add_argument("--round", action="append", help="only rows of this round; may be repeated")
    parser.add_argument("--played", action="store_true", help="simulate each loop, request by request")
    parser.add_argument("--mechanisms", action="store_true", help="print the errors with each mechanism left out")
    given = parser.parse_args()
    asked = [row for row in read(given.rows) if not given.round or row["round"] in given.round]
    if given.mechanisms:
        sys.exit(print(mechanisms(asked, given.played)))
    if not given.out:
        parser.error("expected OUT.csv or --mechanisms")
    write(given.out, replayed(asked, given.played))
