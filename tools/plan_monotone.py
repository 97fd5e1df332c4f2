"""Random plans, each made easier in one way, which must never make the answer worse.

    python tools/plan_monotone.py 1000        # cases 0 to 999
    python tools/plan_monotone.py 740 744     # the cases of these numbers; four of them are of one question

Exit status 1 if any answer got worse by more than rounding. Easier: more of a resource of the cluster, more memory, a faster network, a
looser objective, a shorter prompt, an FP8 cache. The answer: most output tokens a second within the objectives.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dsjax.config import load_config
from dsjax.plan.candidate import Candidate
from dsjax.plan.cluster import RESOURCES, bundled_clusters, load_cluster
from dsjax.plan.precision import precision
from dsjax.plan.question import Question
from dsjax.plan.search import search
from dsjax.plan.workload import Lengths, Objective, PlanOptions, Workload

CONFIG = load_config("deepseek-v3")
ROUNDING = 1e-6
EACH = 4
"""Cases of one question, which is answered once for them."""


def question(source: random.Random) -> Question:
    """A cluster, a workload and objectives such as people ask for."""
    cluster = load_cluster(source.choice(bundled_clusters()))
    if source.random() < 0.5:
        cluster = cluster.resized(max(1, cluster.hosts // 2))
    work = Workload(
        Lengths(source.choice((512, 1024, 2000, 4096, 8192))), Lengths(source.choice((128, 500, 1000, 2048)))
    )
    objective = Objective(source.choice((None, 0.5, 1.0, 2.0, 5.0)), source.choice((None, 0.02, 0.03, 0.05, 0.1)))
    return Question(CONFIG, cluster, work, objective, PlanOptions(skew=PlanOptions().skew))


def easier(asked: Question, source: random.Random) -> tuple[str, Question] | None:
    """The same made easier in one way; None where that way does not apply."""
    way = source.choice((*RESOURCES, "memory", "ttft", "tpot", "prompt", "cache"))
    factor = source.choice((1.05, 1.2, 1.5, 2.0))
    named = f"{way} × {factor:g}"
    if way in RESOURCES:
        return named, dataclasses.replace(asked, cluster=asked.cluster.scaled(way, factor))
    if way == "memory":
        chip = asked.cluster.hardware
        chip = dataclasses.replace(chip, driver_bytes=round(chip.visible_bytes * factor))
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


def worse(asked: Question, name: str, eased: Question, before: Candidate) -> float:
    """Share of its tokens a second that the answer lost; 0 where it lost none. Prints what it lost."""
    after = search(eased).winner
    lost = 1 - (after.throughput if after else 0.0) / before.throughput
    if lost <= ROUNDING:
        return 0.0
    work, objective = asked.workload, asked.objective
    print(
        f"worse by {lost:.2%}: {asked.cluster.name}, {asked.cluster.num_devices} devices, "
        f"{work.input.mean:g} / {work.output.mean:g}, {objective.ttft} s, {objective.tpot} s: {name}; "
        f"{before.name()} at {before.batch:g} -> {after.name() if after else None} at {after.batch if after else 0:g}",
        flush=True,
    )
    return lost


def main(first: int, last: int) -> int:
    """Play the cases of these numbers, four of each question; give how many got worse."""
    lost, start = [], time.time()
    for number in range(first, last, EACH):
        source = random.Random(number)
        asked = question(source)
        before = search(asked).winner
        made: dict[str, Question] = {}
        while len(made) < min(EACH, last - number):
            found = easier(asked, source)
            if found:
                made[found[0]] = found[1]
        if before:
            lost += [worse(asked, name, eased, before) for name, eased in made.items()]
        done, bad = min(last, number + EACH) - first, sum(each > 0 for each in lost)
        print(
            f"\r{done} cases, {len(lost)} with an answer, {bad} worse, at most by {max(lost, default=0.0):.2%}, "
            f"{time.time() - start:.0f} s", end="", flush=True,
        )  # fmt: skip
    print()
    return sum(each > 0 for each in lost)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "first", nargs="?", type=int, help="the first case; alone, how many cases from 0 on (default 1000)"
    )
    parser.add_argument("last", nargs="?", type=int, help="the case that ends them and is not played")
    given = parser.parse_args()
    first, last = (0, given.first or 1000) if given.last is None else (given.first, given.last)
    sys.exit(bool(main(first, last)))
