"""Write docs/rtx4090-32.md: whether 32-way data parallelism is compute-bound on 32 × RTX 4090.

python tools/home_study.py
"""

# ruff: noqa: E501 (a row of a Markdown table is one line)

import argparse
import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dsjax.config import load_config
from dsjax.plan.cluster import load_cluster
from dsjax.plan.instance import Instance
from dsjax.plan.layout import parse_layout
from dsjax.plan.precision import PRECISIONS, precision
from dsjax.plan.workload import Lengths, PlanOptions, Workload

CONFIG, CLUSTER = load_config("deepseek-v3"), load_cluster("rtx4090-32")
CHIP, PORT = CLUSTER.hardware, CLUSTER.network_gbps * 1e9 / 8
PROMPT, OUTPUT = 1000, 200
CONTEXT = PROMPT + OUTPUT / 2
EXPERT = 3 * 7168 * 2048
"""Parameters of one expert."""
SENT = 8 * (7168 * PRECISIONS["fp8"].wire + 2 * 7168)
"""Bytes of a token's eight rows to its experts in FP8 and back in bf16, in one layer."""


def instance(mesh: str, hosts: int = CLUSTER.hosts, weights: str = "fp8", cache: str = "fp8", **changed) -> Instance:
    """A layout over so many hosts of eight boards, prompts of 1,000 tokens and outputs of 200."""
    cluster = dataclasses.replace(CLUSTER.resized(hosts), **changed)
    work = Workload(Lengths(PROMPT), Lengths(OUTPUT))
    return Instance(CONFIG, cluster, parse_layout(mesh, 0, CONFIG), PlanOptions(precision(weights, cache)), work)


def bounds() -> str:
    """Milliseconds of one layer's experts and their exchange on 32 replicas, each by itself at its ceiling, by requests of a replica."""
    rows = [
        "| requests a GPU = rows an expert | operations, ms | weights, ms | longer | one port a host: exchange, ms | how many times the longer |",
        "|---|---|---|---|---|---|",
    ]
    held = 256 // CLUSTER.num_devices
    for batch in (1, 32, 164, 2048):
        operations = 2 * held * batch * EXPERT / CHIP.fp8_flops
        weights = held * EXPERT / CHIP.memory_bandwidth
        away = CLUSTER.devices_per_host * batch * SENT * (1 - 1 / CLUSTER.hosts) / PORT
        longer = max(operations, weights)
        rows.append(
            f"| {batch:,} | {operations * 1e3:.2f} | {weights * 1e3:.2f} | {'operations' if operations >= weights else 'weights'} | "
            f"{away * 1e3:.2f} | {away / longer:.0f} |"
        )
    return "\n".join(rows)


def room() -> str:
    """Show what weights take and how many requests a replica holds, in layouts over 32 and 64 boards."""
    rows = [
        "| boards | layout | weights a board, FP8 | of 24 GB, 1.9 set aside | requests a replica holds, FP8 cache |",
        "|---|---|---|---|---|",
    ]
    for hosts, mesh in (
        (4, "dp=32"),
        (4, "dp=4,tp=8"),
        (4, "tp=32,ep=32"),
        (8, "dp=32,tp=2"),
        (8, "dp=8,tp=8"),
    ):
        found = instance(mesh, hosts)
        weights = found.memory.weights_total
        fits = "fits" if found.max_batch else "too much"
        rows.append(f"| {hosts * 8} | `{mesh}` | {weights / 1e9:.1f} GB | {fits} | {found.max_batch or 'none'} |")
    return "\n".join(rows)


def steps() -> str:
    """Decode steps at the batches that fill the caches of 64 boards: their parts, and what twice of a resource would give."""
    rows = [
        "| 64 boards | requests a replica | TPOT, ms | experts | attention and projections | exchange | tokens/s | twice the network | twice the operations | twice the memory's rate |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for mesh in ("dp=32,tp=2", "dp=8,tp=8"):
        found = instance(mesh, 8)
        batch = float(found.max_batch)
        step = found.tpot(batch)
        parts = found.step_models()[0].parts(batch, batch * CONTEXT, CONTEXT, True)
        own = [parts[name].value * 1e3 for name in ("experts", "attention", "projections", "dispatch", "combine")]

        def gain(resource: str, mesh: str = mesh, batch: float = batch, now: float = step.value) -> str:
            cluster = CLUSTER.resized(8).scaled(resource, 2)
            there = dataclasses.replace(instance(mesh, 8), cluster=cluster, steps={})
            return f"{now / there.tpot(batch).value - 1:+.0%}"

        rate = batch * found.replicas / step
        rows.append(
            f"| `{mesh}` | {batch:g} | **{step.value * 1e3:,.0f}** ({step.low * 1e3:,.0f} – {step.high * 1e3:,.0f}) | {own[0]:.0f} | "
            f"{own[1] + own[2]:.0f} | {own[3] + own[4]:,.0f} | **{rate.value:,.0f}** ({rate.low:,.0f} – {rate.high:,.0f}) | "
            f"{gain('network')} | {gain('compute')} | {gain('memory bandwidth')} |"
        )
    return "\n".join(rows)


def page() -> str:
    """The page."""
    balance = CHIP.fp8_flops / CHIP.memory_bandwidth / 2
    rows_time = 2 * 8 * EXPERT / CHIP.fp8_flops
    needed = CLUSTER.devices_per_host * SENT * (1 - 1 / CLUSTER.hosts) / rows_time
    narrowest = instance("tp=32,ep=32").memory
    left = 0.95 * CHIP.memory_bytes - narrowest.weights_total
    narrow = int(left // (narrowest.cache_per_token * (PROMPT + OUTPUT)))
    return f"""# "32-way data parallelism is compute-bound", at home: 32 × RTX 4090

A note on DeepSeek-R1 ([noooop/wde](https://github.com/noooop/wde), `docs/performance_tuning_for_deepseek_v3.md`, commit 1c65804) reasons: a token goes to 8 of 256 experts, and 256 ÷ 8 = 32, so at least 32-way data parallelism makes expert parallelism compute-bound, on 32 RTX 4090 at home too. This page checks that. Exact figures have no range; estimates are **middle** (low – high), with the
assumptions of [plan.md](plan.md). A layout `dp=4,tp=8` has 4 attention replicas of 8 devices each. `python tools/home_study.py` writes this page.

## What 256 ÷ 8 says

With R replicas of B requests an expert gets R × B × 8 ÷ 256 rows in a decode step: with 32 replicas as many as one replica has requests. Whether B rows are compute-bound hangs on the device: a weight in FP8 is one byte and two operations a row, so that an RTX 4090 with {CHIP.fp8_flops / 1e12:.0f} TFLOP/s and {CHIP.memory_bandwidth / 1e9:,.0f} GB/s
needs **{balance:.0f} rows an expert** (in bf16 {CHIP.bf16_flops / CHIP.memory_bandwidth:.0f}).

One layer on 32 boards, 8 experts each, even routing, each bound by itself at the datasheet's figure (exact):

{bounds()}

From {balance:.0f} rows on the experts are compute-bound, and by then their exchange over one 25 Gb/s port of a host takes far longer than either; a row's operations grow with its bytes, so that no batch helps. The port would have to carry {needed / 1e9:,.0f} GB/s ({needed * 8 / 1e9:,.0f} Gb/s) a host, {needed / PORT:.0f} times what it does (exact).

## Whether it fits

{room()}

Not on 32 boards, in FP8, with any of these layouts; `tp=32,ep=32` misses by less than 0.1 GB, and would hold {narrow} requests if 5 % of a board were set aside instead of 8 %. `dsjax plan --cluster rtx4090-32 --engine published --input 1000 --output 200` looks at all layouts with a `tp` of up to two hosts (16), and says that the narrowest of them misses by 3 %.

## What it would do on twice as many

Decode steps at the batches that fill the caches, {CONTEXT:,.0f} cached tokens a request, no overlap of two half batches in the columns of parts (ms):

{steps()}

The network is what holds it back: the exchange takes about fifty times as long as experts and attention together, and twice the operations give nothing. Two half batches, the note's remedy, hide no more than the computation takes. **"32-way data parallelism is compute-bound at home" does not come out.** What would change it is a network of about twice what a board's PCIe carries
({needed / CLUSTER.devices_per_host / 1e9:.0f} GB/s a board), not more replicas.
"""


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    (Path(__file__).parents[1] / "docs" / "rtx4090-32.md").write_text(page(), encoding="utf-8")
