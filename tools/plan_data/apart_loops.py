"""Runs of InferenceX with prefill and decode apart, all that had not been predicted: predictions first, results entered afterwards.

    python -m tools.plan_data.apart_loops predict benchmarks.json     # reads the runs' settings and none of their metrics
    python -m tools.plan_data.apart_loops enter benchmarks.json       # writes the published columns beside the predictions

The rule was set before a number was read: DeepSeek-R1 on NVIDIA's devices, prefill and decode apart, no drafts, and not among those of
inferencex_apart.py; runs whose settings do not agree with their numbers of devices are left out. What is assumed is what was assumed
there, and no redundant experts where decode has fewer than 16 replicas.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from dsjax.config import load_config
from dsjax.plan.calibration import HOST, WIDE
from dsjax.plan.candidate import Candidate, prefill_pool, separated
from dsjax.plan.cluster import Cluster, load_cluster
from dsjax.plan.drafting import FIRST
from dsjax.plan.engine import PUBLISHED, Engine
from dsjax.plan.instance import Instance
from dsjax.plan.layout import parse_layout
from dsjax.plan.operator_tables import BUNDLED, SPREAD, OperatorTables
from dsjax.plan.precision import precision
from dsjax.plan.workload import Lengths, PlanOptions, Workload
from sharding import MeshSpec
from tools.plan_data import files
from tools.plan_data.inferencex import RUN_PRECISIONS
from tools.plan_data.inferencex_apart import APART, ApartRun
from tools.plan_data.protocol import tables_of

DATA = Path(__file__).parent / "apart_loops.csv"
ENGINES = {"dynamo-sglang": "sglang", "dynamo-trt": "trt"}
CLUSTERS = {
    "h100": "h100-32",
    "h200": "h200-32",
    "b200": "b200-8",
    "b300": "b200-8",
    "gb200": "gb200-nvl72-36",
    "gb300": "gb300-nvl72-36",
}
METRICS = {"rate": ("output_tput_per_gpu", 1.0), "tpot": ("mean_tpot", 1e3)}
STEP, REDUNDANT, RATIO = 16384, 32, 0.8
COLUMNS = (
    "key", "device", "engine", "weights", "prompt", "output", "users", "prefill", "decode", "metric", "predicted", "low", "high",
    "measured",
)  # fmt: skip


def mesh_of(workers: int, devices: int, ep: int, dp: bool) -> tuple[int, str]:
    """(instances, mesh) by the fields of a result: workers, devices of all of them, their EP, and whether attention is data parallel."""
    each = devices // workers
    kind = "dp" if dp else "tp"
    return workers, f"{kind}={each}" if ep == each else f"{kind}={each},ep={ep}"


def agrees(result: dict[str, Any]) -> bool:
    """Whether a result says how many instances there are, how wide they are, and either cuts experts or spreads them over an instance."""
    for side in ("prefill", "decode"):
        workers, devices = result[f"{side}_num_workers"], result[f"num_{side}_gpu"]
        if not workers or result[f"{side}_tp"] * workers != devices:
            return False
        spread = result[f"{side}_ep"] == result[f"{side}_tp"]
        if not spread and (result[f"{side}_ep"] != 1 or result[f"{side}_dp_attention"]):
            return False
    return True


def run_of(result: dict[str, Any]) -> ApartRun:
    """A result's settings."""
    sides = [
        mesh_of(
            max(1, result[f"{side}_num_workers"]),
            result[f"num_{side}_gpu"],
            result[f"{side}_ep"],
            result[f"{side}_dp_attention"],
        )
        for side in ("prefill", "decode")
    ]
    engine = ENGINES[result["framework"]]
    return ApartRun(
        result["hardware"], engine, result["precision"], result["isl"], result["osl"], result["conc"], *sides
    )


def chosen(results: list[dict[str, Any]]) -> list[tuple[ApartRun, dict[str, Any]]]:
    """The runs of the rule, each once, in the file's order."""
    found: dict[ApartRun, dict[str, Any]] = {}
    for result in results:
        wanted = result["model"] == "dsr1" and result["spec_method"] == "none" and result["disagg"]
        if wanted and result["hardware"] in CLUSTERS and result["framework"] in ENGINES:
            run = run_of(result)
            if run not in APART and agrees(result):
                found.setdefault(run, result)
    return list(found.items())


def operators_of(run: ApartRun, date: str) -> tuple[OperatorTables, OperatorTables]:
    """Tables of prefill and of decode: TensorRT-LLM's own of that day with FP8, and those of all engines otherwise.

    Whole experts are timed with its backends DEEPGEMM and CUTLASS. By the recipes (NVIDIA/srt-slurm, commit c88ef731,
    recipes/trtllm/*-fp8) Hopper has CUTLASS throughout; prefill has DEEPGEMM on GB200 and GB300, and on B200 for prompts of 1,024
    tokens; decode has it with attention DP, but on B300 never, and on B200 with prompts of 8,192 tokens never. The rest has TRTLLM, which
    is priced as for all engines.
    """
    name = tables_of(run.weights, date) if run.engine == "trt" else ""
    if not name:
        return BUNDLED, BUNDLED
    whole = BUNDLED.of_version(name)
    hopper, racks = run.device in ("h100", "h200"), run.device in ("gb200", "gb300")
    short = run.device == "b200" and run.prompt == 1024
    timed = hopper or racks or short, hopper or ((racks or short) and run.decode[1].startswith("dp="))
    bare = whole.without(SPREAD)
    return whole if timed[0] else bare, whole if timed[1] else bare


def cluster_of(run: ApartRun, devices: int) -> Cluster:
    """As many hosts of the run's devices as it takes. A B300 is a GB300 behind the NVSwitch of a host of eight, with its 800 Gb/s card."""
    cluster = load_cluster(CLUSTERS[run.device])
    if run.device == "b300":
        chip = dataclasses.replace(load_cluster("gb300-nvl72-36").hardware, scale_up_devices=8, devices_per_host=8)
        cluster = dataclasses.replace(cluster, hardware=chip, network_gbps=800.0)
    roomy = dataclasses.replace(
        cluster.hardware, driver_bytes=2 * cluster.hardware.visible_bytes
    )  # it ran, so there was room
    return dataclasses.replace(cluster, hardware=roomy).resized(-(-devices // cluster.devices_per_host))


def deployment(
    run: ApartRun,
    most: float = math.inf,
    drafts: int = 0,
    acceptance: float = FIRST,
    *,
    engine: Engine = PUBLISHED,
    host: str = "overlapped",
    step: int = STEP,
    operators: tuple[OperatorTables, OperatorTables] = (BUNDLED, BUNDLED),
) -> Candidate:
    """The mean-value answer of a closed loop, without two-batch overlap.

    most: requests of a DP rank that decode at once at most; drafts: a step's, the first of which is accepted with that chance; step: most
    prompt tokens of a DP rank in a step; operators: of prefill and of decode.
    """
    config = load_config("deepseek-v3")
    redundant = REDUNDANT if MeshSpec.parse(run.decode[1]).dp_size >= 16 else 0
    meshes = [parse_layout(run.prefill[1], 0, config), parse_layout(run.decode[1], redundant, config)]
    counts = run.prefill[0], run.decode[0]
    cluster = cluster_of(run, sum(n * layout.devices for n, layout in zip(counts, meshes, strict=True)))
    lengths = (Lengths(tokens).ranged(RATIO) for tokens in (run.prompt, run.output))
    work = Workload(*lengths, concurrency=float(run.users))
    cache = "bf16" if run.engine == "sglang" and run.device in ("h100", "h200") else "fp8"
    options = PlanOptions(
        precision(RUN_PRECISIONS[run.weights], cache),
        overlap="off",
        drafts=drafts,
        acceptance=acceptance,
        engine=engine,
        host=host,
    )
    first, then = (
        Instance(config, cluster, layout, dataclasses.replace(options, operators=tables), work)
        for layout, tables in zip(meshes, operators, strict=True)
    )
    batch = min(most, run.users / (then.replicas * run.decode[0]))
    return separated(prefill_pool(first, step), run.prefill[0], then, run.decode[0], batch)


def rows() -> list[dict[str, str]]:
    """Give the rows of `apart_loops.csv`: one for each figure of each run."""
    return files.read(DATA)


def distance(row: dict[str, str]) -> str:
    """Tell whether an instance of a row is wider than a host."""
    sizes = (MeshSpec.parse(row[side].partition(" x ")[2]).num_devices for side in ("prefill", "decode"))
    return WIDE if max(sizes) > load_cluster(CLUSTERS[row["device"]]).devices_per_host else HOST


def settings_of(run: ApartRun) -> tuple[str, ...]:
    """A run's settings as its row has them, from `device` to `decode`."""
    sides = (f"{count} x {mesh}" for count, mesh in (run.prefill, run.decode))
    return tuple(map(str, (run.device, run.engine, run.weights, run.prompt, run.output, run.users, *sides)))


def predict(results: Path) -> None:
    """Write every prediction, with no measured value."""
    made = []
    for number, (run, _) in enumerate(chosen(json.loads(results.read_text(encoding="utf-8"))), 1):
        found = deployment(run)
        devices = found.decode.layout.devices * found.count
        for metric, figure in (("rate", found.throughput / devices), ("tpot", found.tpot * 1e3)):
            ends = (f"{end:.4g}" for end in (figure.value, figure.low, figure.high))
            made.append(dict(zip(COLUMNS, (f"Z{number}", *settings_of(run), metric, *ends, ""), strict=True)))
    files.write(DATA, COLUMNS, made)


def enter(results: Path) -> None:
    """Write the published columns beside predictions that are there already, and leave these as they are."""
    published = {settings_of(run): one for run, one in chosen(json.loads(results.read_text(encoding="utf-8")))}
    found = rows()
    for row in found:
        column, factor = METRICS[row["metric"]]
        one = published[tuple(row[name] for name in COLUMNS[1:9])]
        row["measured"] = f"{one['metrics'][column] * factor:.4g}"
    files.write(DATA, COLUMNS, found)


if __name__ == "__main__":
    command, given = files.arguments(__doc__, predict=1, enter=1)
    {"predict": predict, "enter": enter}[command](Path(given[0]))
