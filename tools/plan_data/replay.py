"""Predict blind rows anew, as today's planner plays their settings.

    python -m tools.plan_data.replay OUT.csv                       # rates and TPOT of every run, as mean values
    python -m tools.plan_data.replay OUT.csv --round "all left"    # of these rounds
    python -m tools.plan_data.replay OUT.csv --played              # the whole loop, TTFT too; the largest runs take hours
    python -m tools.plan_data.replay OUT.csv --rows NEW.csv        # predict the rows of a new round, whose measurements are not entered
    python -m tools.plan_data.replay --mechanisms                  # the error with each mechanism of an engine left out in turn

OUT.csv has the columns of `configs/blind_predictions.csv`, with new predictions; `python tools/plan_score.py OUT.csv` scores it. A run is
a closed loop of InferenceX: all users at once, each finished request replaced until each user has made ten. Rows without a day in `ran`
are of other sources and are left out.
"""

import argparse
import csv
import dataclasses
import functools
import statistics
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from dsjax.config import load_config
from dsjax.plan.calibration import LONGER, RATE, TPOT
from dsjax.plan.candidate import Candidate, aggregated, prefill_pool, separated
from dsjax.plan.cluster import Cluster, load_cluster
from dsjax.plan.engine import PUBLISHED, Engine
from dsjax.plan.figure import assumed
from dsjax.plan.fit import Launch, fit
from dsjax.plan.instance import Instance
from dsjax.plan.layout import parse_layout
from dsjax.plan.operator_tables import BUNDLED
from dsjax.plan.precision import precision
from dsjax.plan.simulation.outcome import SimulationOutcome, reported, simulate
from dsjax.plan.simulation.service import OfferedLoad
from dsjax.plan.workload import Lengths, Objective, PlanOptions, Workload
from sharding import MeshSpec
from tools.plan_data.inferencex import (
    ACCEPTANCE,
    PRECISIONS,
    RANGE_RATIO,
    REQUESTS_A_USER,
    Protocol,
    Run,
    protocol,
    separated_engine,
    separated_tables,
)

DATA = Path(__file__).parents[2] / "configs" / "blind_predictions.csv"
ROOMY = 2
"""Devices of a run with prefill and decode apart are given so much more memory: it ran, so there was room."""
REDUNDANT, WIDE = 32, 16
"""Redundant experts of a decode instance with so many DP ranks and more, by NVIDIA's and SGLang's guides; results do not say."""
SWITCHES = ("fp8_rate", "holds_prompts", "mixes")
"""Fields of an `Engine` by which runs differ from `PUBLISHED`."""
MECHANISMS = (*SWITCHES, "as_sent", "tables")
"""What `--mechanisms` leaves out in turn: a switch, prompts as most likely sent, and the tables of an engine's own version."""


def cluster_of(run: Run, devices: int) -> Cluster:
    """As many hosts as it takes. A B300 is a GB300 behind the NVSwitch of a host of eight, with its 800 Gb/s card."""
    name = "b200" if run.device == "b300" else run.device
    size = {"b200": "8", "gb200": "nvl72-36", "gb300": "nvl72-36"}.get(name, "32" if run.prefill else "8")
    cluster = load_cluster(f"{name}-{size}")
    if run.device == "b300":
        chip = dataclasses.replace(load_cluster("gb300-nvl72-36").hardware, scale_up_devices=8, devices_per_host=8)
        cluster = dataclasses.replace(
            cluster, hardware=chip, network_gbps=800.0 if run.prefill else cluster.network_gbps
        )
    return cluster.resized(-(-devices // cluster.devices_per_host))


def answer(run: Run, without: str = "") -> Candidate:
    """The mean-value answer of a run. without: a mechanism that is left out, one of `MECHANISMS`."""
    if run.prefill:
        return _separated(run, without)
    return _on_one_host(run if without == "as_sent" else run.as_sent(), without)


def _engine(engine: Engine, without: str) -> Engine:
    return dataclasses.replace(engine, **{without: getattr(PUBLISHED, without)}) if without in SWITCHES else engine


def _work(run: Run) -> Workload:
    mean, half = (
        (1 + RANGE_RATIO) / 2,
        (1 - RANGE_RATIO) / (1 + RANGE_RATIO),
    )  # evenly from RANGE_RATIO to 1 times the tokens
    lengths = (Lengths(tokens * mean).around(half) for tokens in (run.prompt, run.output))
    return Workload(*lengths, concurrency=float(run.users))


def _on_one_host(run: Run, without: str) -> Candidate:
    config, rule = load_config("deepseek-v3"), protocol(run)
    layout = dataclasses.replace(parse_layout(run.decode[1], 0, config), fused=run.fuses)
    options = PlanOptions(
        precision(PRECISIONS[run.weights], run.cache),
        overlap="off",
        operators=BUNDLED.of_version(rule.tables) if rule.tables and without != "tables" else BUNDLED,
        prefill_tokens=rule.step_tokens,
        engine=_engine(rule.engine, without),
    )
    cluster = cluster_of(run, layout.devices)
    if run.drafts:
        options = dataclasses.replace(options, drafts=run.drafts, acceptance=ACCEPTANCE)
    room = _bytes_with_room(rule, Instance(config, cluster, layout, options, _work(run)))
    chip = dataclasses.replace(cluster.hardware, memory_bytes=room, driver_bytes=room)
    cluster = dataclasses.replace(cluster, hardware=chip)
    batch = min(run.users, rule.running) / layout.mesh.dp_size
    return aggregated(Instance(config, cluster, layout, options, _work(run)), 1, batch, rule.step_tokens)


def _bytes_with_room(rule: Protocol, instance: Instance) -> int:
    """Bytes of a device in which the planner's cache is as large as the engine's own rule leaves room for."""
    name = "tensorrt-llm" if rule.engine.holds_prompts else "sglang"
    options, chip = instance.options, instance.cluster.hardware
    launch = Launch(
        name, chip.visible_bytes, rule.fraction, prefill_tokens=rule.step_tokens, sampled=256, mtp=options.drafts > 0
    )
    tokens = fit(instance.config, instance.layout, options.precision, launch).cache_tokens
    if tokens <= 0:
        raise ValueError(f"{launch} leaves no room for a cache")
    usual = instance.memory
    return round(usual.weights_total + usual.reserve + tokens * usual.cache_per_token)


def _separated(run: Run, without: str) -> Candidate:
    config = load_config("deepseek-v3")
    redundant = REDUNDANT if MeshSpec.parse(run.decode[1]).dp_size >= WIDE else 0
    layouts = [parse_layout(run.prefill[1], 0, config), parse_layout(run.decode[1], redundant, config)]
    counts = run.prefill[0], run.decode[0]
    cluster = cluster_of(run, sum(n * layout.devices for n, layout in zip(counts, layouts, strict=True)))
    room = ROOMY * cluster.hardware.memory_bytes
    roomy = dataclasses.replace(cluster.hardware, memory_bytes=room, driver_bytes=room)
    cluster = dataclasses.replace(cluster, hardware=roomy)
    options = PlanOptions(
        precision(PRECISIONS[run.weights], run.cache),
        overlap="off",
        drafts=run.drafts,
        acceptance=ACCEPTANCE,
        engine=_engine(separated_engine(run), without),
    )
    operators = (BUNDLED, BUNDLED) if without == "tables" else separated_tables(run)
    first, then = (
        Instance(config, cluster, layout, dataclasses.replace(options, operators=tables), _work(run))
        for layout, tables in zip(layouts, operators, strict=True)
    )
    batch = min(run.running, run.users / (then.replicas * counts[1]))
    return separated(prefill_pool(first, run.step), counts[0], then, counts[1], batch)


def mean_values(run: Run, without: str = "") -> dict[str, float]:
    """Rate (tokens a second of a device that decodes) and TPOT (ms) of a run, as the planner's closed forms have them."""
    found = answer(run, without)
    return {RATE: found.throughput / _devices(found), TPOT: found.tpot * 1e3}


def played(run: Run, without: str = "") -> dict[str, float]:
    """What the benchmark reports of a run, by kind: its loop is simulated."""
    found = answer(run, without)
    seen = _simulated(found, run.users)
    seconds = (0.0, 0.0, 0.0) if run.prefill else protocol(run.as_sent()).cold
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
