"""Write docs/h20-32.md: a published plan for 32 H20, every figure of it worked through.

python tools/h20_study.py
"""

# ruff: noqa: E501 (a row of a Markdown table is one line)

import argparse
import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dsjax.config import load_config
from dsjax.model.mla_costs import mla_cost
from dsjax.model.parameter_counts import parameter_counts
from dsjax.plan.candidate import aggregated
from dsjax.plan.cluster import load_cluster
from dsjax.plan.figure import Figure
from dsjax.plan.instance import Instance
from dsjax.plan.layout import InstanceLayout, parse_layout
from dsjax.plan.limits import bottlenecks
from dsjax.plan.memory import cache_bytes_per_token, weight_bytes
from dsjax.plan.network import hosts_of_a_token
from dsjax.plan.pareto import draw_front, draw_sweep
from dsjax.plan.precision import PRECISIONS
from dsjax.plan.prompts import best_step
from dsjax.plan.question import Question
from dsjax.plan.search import search
from dsjax.plan.skew import DEFAULT_SKEW
from dsjax.plan.sweep import Sweep, SweepPoint, sweep
from dsjax.plan.workload import Lengths, Objective, PlanOptions, Workload
from tools.plan_data.h20_claims import draw as draw_claims
from tools.plan_data.h20_claims import table as claims_table

SESSIONS, CONTEXT, OUTPUT, GOAL = 200, 32 * 1024, 1000, 50_000
PICTURES = Path("docs") / "h20-32"
CONFIG, CLUSTER = load_config("deepseek-v3"), load_cluster("h20-32")
ONE_CARD = dataclasses.replace(CLUSTER, nics_per_host=1)
CHIP, DEVICES = CLUSTER.hardware, CLUSTER.num_devices


def gb(value: float) -> str:
    return f"{value / 1e9:.1f} GB"


def ranged(figure: Figure, factor: float = 1, digits: int = 0) -> str:
    low, value, high = (f"{end * factor:,.{digits}f}" for end in (figure.low, figure.value, figure.high))
    return f"**{value}** ({low} – {high})"


def weights() -> str:
    rows = [
        "| precision | redundant experts | attention | experts | shared | the rest | total |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, extra in (("bf16", 0), ("fp8", 0), ("fp8", 32)):
        found = weight_bytes(CONFIG, parse_layout("dp=32", extra, CONFIG), PRECISIONS[name])
        total = sum(found.values())
        rest = total - found["attention"] - found["experts"] - found["shared experts"]
        parts = (found["attention"], found["experts"], found["shared experts"], rest)
        rows.append(f"| {name} | {extra} | {' | '.join(gb(p) for p in parts)} | **{gb(total)}** ({total:,} B) |")
    return "\n".join(rows)


def operations() -> tuple[float, float]:
    """(linear and head, attention) operations of one decoded token at the study's context."""
    active = parameter_counts(CONFIG)
    linear = 2 * (active["active"] - active["embedding"])
    attention = 61 * mla_cost(CONFIG, "A_CC", rows=1, chunk=1, context=CONTEXT).attention_flops
    return float(linear), float(attention)


def decode_instance(layout: InstanceLayout, cluster=CLUSTER) -> Instance:
    """Sessions whose prompts are in the cache: nothing but decoding happens."""
    work = Workload(Lengths(CONTEXT - OUTPUT / 2), Lengths(OUTPUT), concurrency=SESSIONS)
    return Instance(CONFIG, cluster, layout, PlanOptions(), work)


def decode_table() -> tuple[str, float]:
    """Every kind of layout over the 32 GPUs, decoding the 200 sessions; and the best middle estimate."""
    rows = [
        "| layout | sessions a replica | TPOT, ms | output tokens/s | one card a host: tokens/s | first to go |",
        "|---|---|---|---|---|---|",
    ]
    best = 0.0
    for mesh, redundant in (
        ("dp=32", 0),
        ("dp=32", 32),
        ("dp=16,tp=2", 0),
        ("dp=8,tp=4", 0),
        ("dp=4,tp=8", 0),
        ("dp=16", 0),
        ("dp=8,tp=2", 0),
        ("tp=8,ep=1", 0),
        ("tp=16,ep=1", 0),
    ):
        layout = parse_layout(mesh, redundant, CONFIG)
        count = DEVICES // layout.devices
        each = SESSIONS / (layout.mesh.dp_size * count)
        instance = decode_instance(layout)
        if each > instance.max_batch:
            rows.append(
                f"| {count} × `{layout}` ({layout.kind}) | {each:.4g} | no room: {instance.max_batch} fit | | | memory |"
            )
            continue
        step = instance.tpot(each)
        rate, slow = SESSIONS / step, SESSIONS / decode_instance(layout, ONE_CARD).tpot(each)
        best = max(best, rate.value)
        gains = {
            r: step.value / decode_instance(layout, CLUSTER.scaled(r, 2)).tpot(each).value
            for r in ("compute", "memory bandwidth", "network", "latency")
        }
        first = max(gains, key=gains.get)
        rows.append(
            f"| {count} × `{layout}` ({layout.kind}) | {each:.4g} | {ranged(step, 1e3, 1)} | {ranged(rate)} | {ranged(slow)} | "
            f"{first}, {gains[first] - 1:+.0%} |"
        )
    return "\n".join(rows), best


def prefill_table() -> str:
    rows = [
        "| layout | TTFT, s, each replica with one 32 K prompt | prompts a second, all GPUs | seconds to fill 200 sessions |",
        "|---|---|---|---|",
    ]
    for mesh in ("dp=32", "dp=4,tp=8", "tp=8,ep=1", "tp=16,ep=1"):
        layout = parse_layout(mesh, None, CONFIG)
        count = DEVICES // layout.devices
        work = Workload(Lengths(CONTEXT), Lengths(OUTPUT))
        instance = Instance(CONFIG, CLUSTER, layout, PlanOptions(prefill_tokens=CONTEXT), work)
        alone = instance.prefill_step(CONTEXT)
        rate = layout.mesh.dp_size * count / instance.prompt_seconds(CONTEXT)
        rows.append(
            f"| {count} × `{layout}` | {ranged(alone, 1, 1)} | {ranged(rate, 1, 2)} | {ranged(SESSIONS / rate)} |"
        )
    return "\n".join(rows)


PORTS = (1, 3, 8)
"""25 Gb/s ports of a host: what the plan says in one place, in another, and one for each GPU."""
WRITTEN = ("dp=32", "dp=16,tp=2", "dp=4,tp=8", "dp=16", "tp=16,ep=1")


def ported(ports: int):
    return dataclasses.replace(CLUSTER, nics_per_host=ports)


def written_first_token() -> str:
    """Seconds of a step in which each replica computes one prompt of 512 tokens, in bf16, by ports of a host; FP8 beside."""
    rows = [
        "| layout | bf16, one port: TTFT, s | three ports | eight | FP8, one port |",
        "|---|---|---|---|---|",
    ]
    work = Workload(Lengths(512), Lengths(OUTPUT))
    for mesh in WRITTEN:
        layout = parse_layout(mesh, 0, CONFIG)
        cells = []
        for name, ports in (*(("bf16", p) for p in PORTS), ("fp8", 1)):
            instance = Instance(CONFIG, ported(ports), layout, PlanOptions(PRECISIONS[name]), work)
            if not instance.max_batch:
                cells.append("" if cells else f"no room: {gb(instance.memory.weights_total)} of weights")
                continue
            cells.append(ranged(instance.prefill_step(512.0), 1, 2))
        rows.append(f"| `{layout}` | {' | '.join(cells)} |")
    return "\n".join(rows)


def written_decode() -> str:
    """The 200 sessions in bf16: how many the caches hold, and a step with as many of them as fit."""
    rows = [
        "| layout | sessions of 32 K held in bf16 | TPOT, ms, one port | tokens/s, one port | three ports | eight | FP8, one port: held, tokens/s |",
        "|---|---|---|---|---|---|---|",
    ]
    work = Workload(Lengths(CONTEXT - OUTPUT / 2), Lengths(OUTPUT))
    for mesh in WRITTEN:
        layout = parse_layout(mesh, 0, CONFIG)
        count = DEVICES // layout.devices
        replicas = layout.mesh.dp_size * count
        found = {}
        for name, ports in (*(("bf16", p) for p in PORTS), ("fp8", 1)):
            instance = Instance(CONFIG, ported(ports), layout, PlanOptions(PRECISIONS[name]), work)
            held = min(SESSIONS, instance.max_batch * replicas)
            found[name, ports] = (held, held and instance.tpot(held / replicas))
        held, step = found["bf16", 1]
        fp8_held, fp8_step = found["fp8", 1]
        beside = f"{fp8_held}, {ranged(fp8_held / fp8_step)}" if fp8_held else "none"
        if not held:
            rows.append(f"| {count} × `{layout}` | none: no room beside the weights | | | | | {beside} |")
            continue
        rates = " | ".join(ranged(h / s) for h, s in (found["bf16", p] for p in PORTS))
        rows.append(
            f"| {count} × `{layout}` | {held}{' of 200' if held < SESSIONS else ''} | {ranged(step, 1e3, 0)} | {rates} | {beside} |"
        )
    return "\n".join(rows)


LATER = (
    "[a later revision](https://github.com/ShinnChou/AI-fundermentals/blob/70308a9/09_inference_system/inference_solutions/"
    "deepseek_v3_moe_vllm_h20_deployment.md)"
)
ROW_BF16 = 58 * 8 * 2 * 2 * 7168
"""Bytes of a token's rows to its experts and back, in bf16, over the layers that have experts."""
PORT = CLUSTER.network_gbps * 1e9 / 8


def memory_rows() -> str:
    """The plan's rows of a device's memory beside those of the same layout in bf16."""
    layout = parse_layout("dp=32", 0, CONFIG)
    found = weight_bytes(CONFIG, layout, PRECISIONS["bf16"])
    device = Instance(
        CONFIG, CLUSTER, layout, PlanOptions(PRECISIONS["bf16"]), Workload(Lengths(CONTEXT), Lengths(1))
    ).memory
    token = cache_bytes_per_token(CONFIG, PRECISIONS["bf16"])
    rest = (
        sum(found.values())
        - found["attention"]
        - found["experts"]
        - found["shared experts"]
        - found["embedding and head"]
    )
    rows = [
        (
            "routed experts",
            "27.3 GB (436 B parameters ÷ 32)",
            gb(found["experts"]),
            "653.9 B parameters: 97% of the model and not 65%",
        ),
        (
            "attention",
            "8.4 GB (60 layers × 70 M)",
            gb(found["attention"]),
            "187 M a layer",
        ),
        (
            "shared experts, embedding and head, dense MLP, router, norms",
            "6.4 GB",
            gb(found["shared experts"] + found["embedding and head"] + rest),
            "three dense layers of 396 M each",
        ),
        ("**weights**", "**42.1 GB**", f"**{gb(sum(found.values()))}**", ""),
        (
            "activations, communication, runtime",
            "10 – 15 GB",
            ranged(device.reserve, 1e-9, 1) + " GB",
            "assumed here too",
        ),
        (
            "routing and load balancing",
            "6.4 – 9.8 GB",
            "none; 32 redundant experts take 5.1 GB of weights",
            "a balancer's state is kilobytes",
        ),
        (
            "cache, 200 sessions of 32 K",
            "25.6 GB",
            f"{gb(SESSIONS / DEVICES * CONTEXT * token)} (exact)",
            "the latent instead of keys and values",
        ),
        (
            "**a device needs**",
            "**83.9 – 92.3 GB**",
            f"**{gb(sum(found.values()) + device.reserve.value + SESSIONS / DEVICES * CONTEXT * token)}** of 96",
            "it does not fit: 160 of the 200 sessions do",
        ),
    ]
    lines = ["| a device, bf16, `dp=32` | the plan | here | |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def other_claims() -> str:
    """What the plan says of its exchanges and of what sparsity saves, worked out again."""
    hosts = CLUSTER.hosts
    step = SESSIONS * 61 * 8 * 2 * 2 * 7168
    away = SESSIONS / hosts * ROW_BF16 * 3 / 4 / PORT
    fill = SESSIONS * CONTEXT / hosts * 58 * 2 * 2 * 7168 * hosts_of_a_token(CONFIG, hosts) * 3 / 4 / PORT
    linear, attention = operations()
    expert = 6 * 7168 * 2048 * 58
    dense = linear + attention + expert * (256 - 8)
    touched = DEFAULT_SKEW.touched(SESSIONS, 8, 256)
    whole, chunked = (chunked_prompt(tokens) for tokens in (CONTEXT, 4096))
    return f"""- **2.8 GB in 9.77 s.** 200 × 61 layers × 8 experts × 7,168 × 2 B, there and back, are {step / 1e9:.2f} GB: what **one decode step** of 200 sessions
  exchanges, not their prompts. Over one port a host that step needs {away * 1e3:.0f} ms (exact: three quarters leave the host). The 200 prompts of 32 K
  need {fill / 60:.0f} minutes (exact), a token's row going once to each host that has one of its experts.
- **Chunked: 1.22 s.** That is the time of the first of eight chunks. A replica of `dp=32` with one 32 K prompt, bf16, one port, takes {ranged(whole)} s in one step, {ranged(chunked)} s in eight.
- **An all-to-all of 2,027 GB/s.** The plan adds NVLinks and network links. An exchange is done when its slowest part is: through one port a host {hosts * PORT / 0.75 / 1e9:.1f} GB/s in
  all, through three {3 * hosts * PORT / 0.75 / 1e9:.0f} (exact), {2027e9 / (hosts * PORT / 0.75):.0f} and {2027e9 / (3 * hosts * PORT / 0.75):.0f} times less.
- **Sparsity gains 67.1%.** The routed experts leave out 96.9% of their operations (248 of 256), {expert * 248 / dense:.1%} of all at 32 K (exact: {(linear + attention) / 1e9:,.0f} of {dense / 1e9:,.0f} GFLOP remain). Reading weights saves little: 200 tokens touch {touched:.0f} of a layer's 256 experts (an even router {256 * (1 - (1 - 8 / 256) ** SESSIONS):.1f})."""


def chunked_prompt(tokens: int) -> Figure:
    """Seconds of a 32 K prompt on each replica of `dp=32`, bf16, one port a host, in steps of so many tokens."""
    options = PlanOptions(PRECISIONS["bf16"], prefill_tokens=tokens)
    work = Workload(Lengths(CONTEXT), Lengths(OUTPUT))
    instance = Instance(CONFIG, ONE_CARD, parse_layout("dp=32", 0, CONFIG), options, work)
    return instance.prefill_step(float(tokens)) * (CONTEXT / tokens)


def serving() -> tuple[str, Question, object]:
    question = Question(
        CONFIG,
        CLUSTER,
        Workload(Lengths(4096), Lengths(OUTPUT)),
        Objective(ttft=3.0, tpot=0.05),
        PlanOptions(),
    )
    plan = search(question)
    winner = plan.winner
    decoding = winner.throughput.value / OUTPUT * winner.tpot.value * (OUTPUT - 1)
    text = (
        f"`{winner.name()}` ({winner.mode}), {decoding:.0f} requests decoding at once (room for {winner.concurrency:g}): "
        f"{ranged(winner.throughput)} output tokens/s, TTFT {ranged(winner.ttft, 1, 2)} s, TPOT {ranged(winner.tpot, 1e3, 1)} ms. First bottlenecks: "
        + ", ".join(str(b) for b in bottlenecks(winner)[:3])
        + "."
    )
    return text, question, plan


POINTS = {
    "latency": (1, 5, 20, 100, 1_000, 10_000, 100_000),
    "bandwidth": (1, 5, 10, 25, 100, 200, 400, 800),
    "loss-of-hosts": (0, 1, 2, 3),
    "hosts": ((4, 200), (8, 400), (16, 800)),
    "concurrency": (1, 10, 50, 200, 500),
}
"""The points of each sweep, up to what the plan asks about (100 ms, 1 Gb/s, 64 GPUs for 400 sessions and 128 for 800)."""
SHOWN = {
    "latency": (1_000, 100_000),
    "bandwidth": (1, 100),
    "loss-of-hosts": (1, 3),
    "hosts": (8, 16),
    "concurrency": (1, 50, 500),
}
"""Values of each sweep that the page's table shows; its picture shows all."""


def sweep_table(question: Question, winner) -> str:
    """Draws every sweep, and gives one table of the points in `SHOWN`."""
    rows = [
        "| | winner unchanged: tokens/s | TPOT, ms | best there | tokens/s |",
        "|---|---|---|---|---|",
    ]
    for quantity, points in POINTS.items():
        found = sweep(question, winner, quantity, points)
        draw_sweep(found, PICTURES / f"{quantity}.png")
        rows += [_sweep_row(found, point) for point in found.points if point.value in SHOWN[quantity]]
    return "\n".join(rows)


def _sweep_row(found: Sweep, point: SweepPoint) -> str:
    same = (
        (f"{point.same.throughput.value:,.0f}", f"{point.same.tpot.value * 1e3:.1f}")
        if point.same
        else ("cannot run", "")
    )
    best = (f"`{point.best.name()}`", f"{point.best.throughput.value:,.0f}") if point.best else ("nothing fits", "")
    met = "" if point.met else " (missed)"
    layout = best[0].replace("|", chr(92) + "|")
    label = (
        f"{point.value:g} {found.unit}" if point.users is None else f"{point.value:g} hosts, {point.users:g} in flight"
    )
    return f"| {label} | {same[0]} | {same[1]} | {layout}{met} | {best[1]} |"


def hosts_for_goal(per_token: float) -> int:
    """Hosts of 8 whose attention units, at their peak and doing nothing else, decode the goal."""
    return -(-int(GOAL * per_token) // int(8 * CHIP.bf16_flops))


def page() -> str:
    PICTURES.mkdir(parents=True, exist_ok=True)
    linear, attention = operations()
    token = cache_bytes_per_token(CONFIG, PRECISIONS["fp8"])
    wrong = 2 * 512 * 2 * 61
    total = SESSIONS * CONTEXT * token
    full = -(-SESSIONS // DEVICES)
    prompt = CONTEXT * (linear - 2 * parameter_counts(CONFIG)["head"])
    naive = (
        61 * mla_cost(CONFIG, "CD", rows=1, chunk=CONTEXT, context=CONTEXT, attended=(CONTEXT + 1) / 2).attention_flops
    )
    least = (prompt / CHIP.fp8_flops + naive / CHIP.bf16_flops) / DEVICES
    ceiling = DEVICES * CHIP.bf16_flops / attention
    weights_once = sum(weight_bytes(CONFIG, parse_layout("dp=32", 0, CONFIG), PRECISIONS["fp8"]).values())
    row = 58 * 8 * (7168 * PRECISIONS["fp8"].wire + 14336)
    away = SESSIONS / DEVICES * row * 3 / 4
    left_out = sum(weight_bytes(CONFIG, parse_layout("dp=32", 0, CONFIG), PRECISIONS["bf16"]).values()) / 1e9 - 42.1
    decode, best = decode_table()
    served, question, plan = serving()
    draw_front(plan, PICTURES / "front.png")
    draw_claims(PICTURES / "figures.png")
    sweeps = sweep_table(question, plan.winner)
    lone = Instance(
        CONFIG,
        CLUSTER,
        parse_layout("dp=16,tp=2", None, CONFIG),
        PlanOptions(),
        Workload(Lengths(CONTEXT), Lengths(OUTPUT), concurrency=SESSIONS),
    )
    light = aggregated(lone, 1, SESSIONS / 16, best_step(lone, SESSIONS / 16, lone.prefill_sizes(chunks=True)))
    return f"""# DeepSeek-V3 on 32 × H20: a published plan, worked through

This page checks a published plan for 4 hosts of 8 H20 (96 GB) with 25 Gb/s RoCE, 200 sessions of 32 K tokens and a goal of 50,000 tokens a second ("DeepSeek-V3 on a cluster of 32 H20, theoretical analysis", of which {LATER} is public). Exact figures have no range; estimates are **middle** (low – high), with the assumptions of [plan.md](plan.md). A layout `dp=4,tp=8` has 4 attention replicas of 8 devices each; `ep` devices share whole
experts, and `+32` adds 32 redundant experts. `python tools/h20_study.py` writes this page.

| | the plan | here | why it differs |
|---|---|---|---|
| weights a GPU | 42.1 GB "in bf16" | 75.1 GB in bf16, 39.5 GB in FP8 (exact) | 42.1 GB is what **FP8 with 32 redundant experts** takes: 9 experts a layer and GPU instead of 8. In bf16 the same placement is {gb(sum(weight_bytes(CONFIG, parse_layout("dp=32", 32, CONFIG), PRECISIONS["bf16"]).values()))} |
| cache a GPU | 25.6 GB | {gb(total / DEVICES)} on average, {gb(full * CONTEXT * token)} on the fullest (exact) | 25.6 GB is 200 × 32,768 × 61 × (2 × 512) × 2 B ÷ 32 = {gb(SESSIONS * CONTEXT * wrong / DEVICES)}; MLA keeps one latent of 512 and 64 rotary values: {token:,} B a token, not {wrong:,}. 200 sessions on 32 replicas are 6.25: some hold 7 |
| operations a token | 69.5 TFLOP | {(linear + attention) / 1e9:,.0f} GFLOP at 32 K context (exact): {linear / 1e9:.2f} linear and head, {attention / 1e9:,.0f} attention | its terms are 13 (attention) to 6,000 times (shared expert) too large. Attention over the context, {attention / linear:.1f} times the linear part at this length, is missing |
| TTFT | 0.21 – 0.37 s, for 512 tokens | for 512 tokens see [below](#the-plan-as-it-is-written); for 32 K not below {least:.2f} s, with all 32 GPUs on one prompt at their peak (exact) | a 32 K prompt is {(prompt + naive) / 1e15:.2f} PFLOP, of which attention {naive / (prompt + naive):.0%}; 32 H20 have {DEVICES * CHIP.fp8_flops / 1e15:.1f} PFLOP/s in FP8 and half in bf16 |
| tokens/s | 35,000 – 45,000, goal 50,000 | at most {ceiling:,.0f} (exact bound), about {best:,.0f} (estimate) | attention in bf16 alone: {attention / 1e9:,.0f} GFLOP a token, {DEVICES * CHIP.bf16_flops / 1e12:,.0f} TFLOP/s in all. No batch, layout or network changes this |

## The plan as it is written

The plan forbids quantisation, gives a host one 25 Gb/s port in one place and three links in another, and means prompts of 512 tokens by its TTFT. A step in which each replica computes one such prompt:

{written_first_token()}

With one port no layout that holds the sessions is as fast as the plan says. With three links `tp=16` is, which holds next to no session, and with a card a GPU `dp=4,tp=8`.

Decode with as many of the 200 sessions of 32 K as the caches hold in bf16, nothing being prefilled:

{written_decode()}

The plan's rows of memory:

{memory_rows()}

The plan's sum leaves out {left_out:.0f} GB of weights. A session of 32 K takes {gb(CONTEXT * token)}.

{other_claims()}

## Every figure of the plan, in its order

Sections are the plan's. *Reproduced*: the figure follows. *Refuted*: the arithmetic in one line says what does. *Not checkable*: it hangs on something that only a running service has, or that is not said. Estimates are of `dp=32` in bf16 over one port a host, with the sessions that fit.

{claims_table()}

![The plan's figures beside those worked out](h20-32/figures.png)

What follows has FP8 weights and one 25 Gb/s card a GPU, as the cluster file has: the most favourable reading.

## Weights and cache

{weights()}

FP8 figures include the float32 scale of each block; embedding, head, router and norms stay bf16. `dsjax plan --cluster h20-32 --explain memory` prints the same. The caches of 200 sessions of 32,768 tokens are {gb(total)} in all. With `tp` every device of a replica holds the whole latent: `dp=4,tp=8` needs {gb(SESSIONS / 4 * CONTEXT * token)} on each device
for them, which does not fit beside its weights.

## A decode step

Each bound by itself, at 200 sessions on `dp=32`:

| bound | arithmetic | least time of a step | tokens/s at most |
|---|---|---|---|
| attention, bf16 | 6.25 × {attention / 1e9:,.0f} GFLOP ÷ 148 TFLOP/s | {SESSIONS / ceiling * 1e3:.1f} ms | {ceiling:,.0f} |
| weights read once | {gb(weights_once)} ÷ 4.0 TB/s (1,600 choices of 256 experts: nearly all are read) | {weights_once / CHIP.memory_bandwidth * 1e3:.1f} ms | {SESSIONS / (weights_once / CHIP.memory_bandwidth):,.0f} |
| network, one 25 Gb/s card a GPU | 6.25 × {row / 1e6:.2f} MB × 3/4 ÷ 3.125 GB/s | {away / 3.125e9 * 1e3:.1f} ms | {SESSIONS / (away / 3.125e9):,.0f} |
| network, one card a host | the same ÷ 8 | {away / 3.125e9 * 8e3:.0f} ms | {SESSIONS / (away / 3.125e9 * 8):,.0f} |

The goal of {GOAL:,} tokens/s is a step of {SESSIONS / GOAL * 1e3:.0f} ms: {weights_once / CHIP.memory_bandwidth / (SESSIONS / GOAL):.1f} times less than reading the weights, {SESSIONS / ceiling / (SESSIONS / GOAL):.1f} times less than attention, which more sessions do not amortise: at 32 K context it needs {hosts_for_goal(attention)} hosts of H20 for attention alone. At 2 K a token is {attention / 16 / 1e9:.0f} GFLOP.

Estimates for the whole step, sessions resident and nothing being prefilled (`static_gen`):

{decode}

## Time to first token

{prefill_table()}

An `aggregated` service that also prefills a fresh 32 K prompt for every 1,000 output tokens gives, on `{light.decode.layout}`, {ranged(light.throughput)} output tokens/s, TPOT {ranged(light.tpot, 1e3, 0)} ms, in chunks of {light.prefill_tokens:,.0f} tokens. 200 sessions of 32 K can only be served well where prompts are found in the prefix cache.

## What these machines do well

4 K prompts, 1 K outputs, TTFT within 3 s, TPOT within 50 ms, everything searched: {served}

![Pareto front](h20-32/front.png)

`dsjax plan --cluster h20-32 --input 4096 --output 1000 --ttft-ms 3000 --tpot-ms 50 --pareto front.html`

## How it depends on the network, and on losing hosts

For that workload, with `--sweep latency=1,5,20,100,1000,10000,100000 --sweep bandwidth=1,5,10,25,100,200,400,800 --sweep loss-of-hosts --sweep concurrency=1,10,50,200,500 --plots FOLDER`; and with as many requests in flight, of these lengths, as the plan gives sessions to 32, 64 and 128 GPUs, `--sweep hosts=4:200,8:400,16:800`.
Up to 100 µs and from 10 to 25 Gb/s the winner stays. Pictures: [latency](h20-32/latency.png), [bandwidth](h20-32/bandwidth.png), [hosts lost](h20-32/loss-of-hosts.png), [hosts](h20-32/hosts.png), [requests in flight](h20-32/concurrency.png).

{sweeps}

Where no deployment meets the objectives, the one that misses them least is shown (missed). "Cannot run" means more sessions than the caches hold, or experts that were lost with a host.
"""


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    (Path(__file__).parents[1] / "docs" / "h20-32.md").write_text(page(), encoding="utf-8")
