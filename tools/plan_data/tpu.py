"""Runs of DeepSeek models on TPUs: predicted first, the published figures entered afterwards.

    python -m tools.plan_data.tpu                # writes the predictions, and leaves what was entered

Two sources, all that they have of MLA models: DeepSeek-V2-Lite on four chips of v6e (sgl-project/sglang-jax, commit cddbf6f1,
docs/cookbook/autoregressive/DeepSeek/DeepSeek-V2.md; its launch and workload were read with every figure masked), and a decode step of
DeepSeek-R1 in INT8 on 64 chips of v5e (jax-ml/jax-llm-examples, commit 8b4b2460, deepseek_r1_jax/README.md). Of the second the column
of bandwidth, from which the rate follows, was read before: `seen` is 1, and it is no blind prediction.

R1's INT8 weights are multiplied in bf16 there, which is priced as `fp8` of the v5e: a byte a weight, products in bf16. Its experts lie
over 4 × 16 chips, by expert and by width; `tp=64` has whole experts on each. Operations are those of an H200 carried over, as in every
plan for a TPU.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

from dsjax.config import load_config
from dsjax.plan.candidate import aggregated
from dsjax.plan.cluster import load_cluster
from dsjax.plan.figure import Figure, exact
from dsjax.plan.instance import Instance
from dsjax.plan.layout import parse_layout
from dsjax.plan.precision import precision
from dsjax.plan.simulation.load import OfferedLoad
from dsjax.plan.simulation.run import simulate
from dsjax.plan.workload import Lengths, Objective, PlanOptions, Workload
from tools.plan_data import files
from tools.plan_data.validation import Point

SOURCE = "jax-ml/jax-llm-examples, deepseek_r1_jax/README.md, commit 8b4b2460"
DATA = Path(__file__).parent / "tpu.csv"
COLUMNS = ("key", "run", "metric", "seen", "predicted", "low", "high", "measured")
STEPS = ((1, 32), (1, 512), (1, 4096), (1, 8192), (8, 32), (8, 512), (8, 4096), (8, 8192), (128, 32), (128, 512))
"""Batch and context of the decode steps of R1."""
_CHUNK = 4096
"""Prompt tokens of a step: sglang-jax's default `--chunked-prefill-size`."""


def _instance(model: str, cluster: str, hosts: int, mesh: str, kind: str, work: Workload) -> Instance:
    config, hosted = load_config(model), load_cluster(cluster).resized(hosts)
    # The runs were measured, so that there was room for them.
    roomy = dataclasses.replace(hosted.hardware, driver_bytes=4 * hosted.hardware.visible_bytes)
    options = PlanOptions(precision(kind, "bf16"), overlap="off", prefill_tokens=_CHUNK)
    hosted = dataclasses.replace(hosted, hardware=roomy)
    return Instance(config, hosted, parse_layout(mesh, 0, config), options, work)


def served() -> dict[str, Figure]:
    """V2-Lite: eight users at once, 100 requests of 512 and 128 tokens at most, drawn evenly from 0 on (`--random-range-ratio 0`)."""
    work = Workload(Lengths(512).ranged(0.0), Lengths(128).ranged(0.0), concurrency=8.0)
    found = aggregated(_instance("deepseek-v2-lite", "tpu-v6e-32", 1, "tp=4", "bf16", work), 1, 8.0, _CHUNK)
    seen = simulate(found, OfferedLoad(None, 8), Objective(), num_requests=100, warmup=0, at_once=True)

    def around(value: float, like: Figure) -> Figure:
        return Figure(value, value * like.low / like.value, value * like.high / like.value, like.kinds)

    return {
        "rate": around(seen.tokens_per_s, found.throughput),
        "tpot": around(seen.tpot.mean, found.tpot) * 1e3,
        "ttft": around(seen.ttft.mean, found.ttft) * 1e3,
    }


def step_rate(batch: int, context: int) -> Figure:
    """Decode steps a second of R1, which are the tokens a second of one sequence."""
    work = Workload(Lengths(context), Lengths(32), concurrency=float(batch), decoding_at=float(context))
    return exact(1.0) / _instance("deepseek-r1", "tpu-v5e-32", 16, "tp=64", "fp8", work).decode_step(batch)


def predictions() -> list[dict[str, str]]:
    """One row a figure, without what was measured."""
    made = [("T1", "V2-Lite, v6e-4, tp=4, 512/128, 8 users", metric, 0, figure) for metric, figure in served().items()]
    for number, (batch, context) in enumerate(STEPS, 2):
        made.append(
            (f"T{number}", f"R1 INT8, v5e-64, batch {batch}, context {context}", "rate", 1, step_rate(batch, context))
        )
    found = []
    for key, run, metric, seen, figure in made:
        ends = (f"{end:.4g}" for end in (figure.value, figure.low, figure.high))
        found.append(dict(zip(COLUMNS, map(str, (key, run, metric, seen, *ends, "")), strict=True)))
    return found


def rows() -> list[dict[str, str]]:
    """Give the rows of `tpu.csv`."""
    return files.read(DATA)


def tpu_points() -> list[Point]:
    """The decode steps of R1, which are no blind prediction, as the model of today predicts them."""
    measured = [float(row["measured"]) for row in rows() if row["seen"] == "1"]
    found = []
    for number, ((batch, context), value) in enumerate(zip(STEPS, measured, strict=True), 2):
        name = f"v5e-64, R1 INT8, batch {batch}, context {context}"
        found.append(Point(f"T{number}", name, SOURCE, "steps/s", value, partial(step_rate, batch, context), "serving"))
    return found


if __name__ == "__main__":
    files.parser_of(__doc__).parse_args()
    entered = {(row["key"], row["metric"]): row["measured"] for row in rows()} if DATA.exists() else {}
    made = [row | {"measured": entered.get((row["key"], row["metric"]), "")} for row in predictions()]
    files.write(DATA, COLUMNS, made)
