"""Random plans, each made easier in one way, which must never make the answer worse. Usage: python tools/plan_monotone.py [CASES [SEED]]

Exit status 1 if any answer got worse by more than rounding. Easier: more of a resource of the cluster, more memory, a faster network, a
looser objective, a shorter prompt, an FP8 cache. The answer: most output tokens a second within the objectives.
"""

from __future__ import annotations

import dataclasses
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dsjax.config import load_config
from dsjax.plan.cluster import RESOURCES, bundled_clusters, load_cluster
from dsjax.plan.precision import precision
from dsjax.plan.search import Question, search
from dsjax.plan.workload import Lengths, Objective, Options, Workload

CONFIG = load_config("deepseek-v3")
ROUNDING = 1e-6


def question(source: random.Random) -> Question:
    """A cluster, a workload and objectives such as people ask for."""
    cluster = load_cluster(source.choice(bundled_clusters()))
    if source.random() < 0.5:
        cluster = cluster.resized(max(1, cluster.hosts // 2))
    work = Workload(
        Lengths(source.choice((512, 1024, 2000, 4096, 8192))), Lengths(source.choice((128, 500, 1000, 2048)))
    )
    objective = Objective(source.choice((None, 0.5, 1.0, 2.0, 5.0)), source.choice((None, 0.02, 0.03, 0.05, 0.1)))
    return Question(CONFIG, cluster, work, objective, Options(skew=Options().skew))


def easier(asked: Question, source: random.Random) -> tuple[str, Question] | None:
    """The same made easier in one way; None where that way does not apply."""
    way = source.choice((*RESOURCES, "memory", "ttft", "tpot", "prompt", "cache"))
    factor = source.choice((1.05, 1.2, 1.5, 2.0))
    named = f"{way} × {factor:g}"
    if way in RESOURCES:
        return named, dataclasses.replace(asked, cluster=asked.cluster.scaled(way, factor))
    if way == "memory":
        chip = asked.cluster.hardware
        chip = dataclasses.replace(chip, memory_bytes=round(chip.memory_bytes * factor))
        return named, dataclasses.replace(asked, cluster=dataclasses.replace(asked.cluster, hardware=chip))
    if way in ("ttft", "tpot"):
        bound = getattr(asked.objective, way)
        if bound is None:
            return None
        return named, dataclasses.replace(
            asked, objective=dataclasses.replace(asked.objective, **{way: bound * factor})
        )
    if way == "prompt":
        work = dataclasses.replace(asked.workload, input=Lengths(round(asked.workload.input.mean / factor)))
        return f"prompt ÷ {factor:g}", dataclasses.replace(asked, workload=work)
    eased = dataclasses.replace(asked.options, precision=precision("fp8", "fp8"))
    return "an FP8 cache", dataclasses.replace(asked, options=eased)


def main(cases: int, seed: int) -> int:
    """Play so many cases; give how many got worse."""
    source, worse, played, start = random.Random(seed), [], 0, time.time()
    while played < cases:
        asked = question(source)
        made = easier(asked, source)
        if made is None:
            continue
        played += 1
        before, after = search(asked).winner, search(made[1]).winner
        if before is None:
            continue
        now = after.throughput.value if after else 0.0
        if now < before.throughput.value * (1 - ROUNDING):
            worse.append(now / before.throughput.value - 1)
            work, objective = asked.workload, asked.objective
            print(
                f"worse by {-worse[-1]:.2%}: {asked.cluster.name}, {asked.cluster.num_devices} devices, "
                f"{work.input.mean:g} / {work.output.mean:g}, {objective.ttft} s, {objective.tpot} s: {made[0]}; "
                f"{before.name()} at {before.batch:g} -> {after.name() if after else None} at {after.batch if after else 0:g}",
                flush=True,
            )
    print(f"{played} cases, {len(worse)} worse, at most by {-min(worse, default=0.0):.2%}, {time.time() - start:.0f} s")
    return len(worse)


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]]
    sys.exit(bool(main(*(numbers + [1000, 0][len(numbers) :]))))
