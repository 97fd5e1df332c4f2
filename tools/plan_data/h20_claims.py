"""Every figure of the 32 × H20 plan in its own order: reproduced, refuted with the arithmetic in one line, or not checkable and why.

What the plan says is text; what stands beside it is worked out here, from the model's shapes, the cluster file and the planner.
"""

# ruff: noqa: E501 (a row of a table is one line)

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from dsjax.config import load_config
from dsjax.model.mla_costs import mla_cost
from dsjax.model.parameter_counts import parameter_counts
from dsjax.plan.balancing import STEP_INTERVAL
from dsjax.plan.cluster import Cluster, load_cluster
from dsjax.plan.cold_start import cold_start
from dsjax.plan.instance import Instance
from dsjax.plan.layout import parse_layout
from dsjax.plan.memory import cache_bytes_per_token, weight_bytes
from dsjax.plan.network import hosts_of_a_token
from dsjax.plan.precision import PRECISIONS, precision
from dsjax.plan.workload import Lengths, PlanOptions, Workload

SESSIONS, CONTEXT, OUTPUT, GPUS = 200, 32 * 1024, 1000, 32
CONFIG, CLUSTER = load_config("deepseek-v3"), load_cluster("h20-32")
ONE_PORT = dataclasses.replace(CLUSTER, nics_per_host=1)
"""As the plan's table of interfaces (4.1.3) has it: one 25 Gb/s port of a host for data."""
PORT = CLUSTER.network_gbps * 1e9 / 8
_UNEVEN = 1.03
"""Middle of the planner's "uneven prompts", by which a step with prompts on many replicas is longer than its mean one."""
REPRODUCED, REFUTED, OPEN = "reproduced", "refuted", "not checkable"


@dataclass(frozen=True)
class Claim:
    """One figure. section: of the plan. compared: (the plan's number, ours) where both are of one kind, for the picture."""

    section: str
    what: str
    said: str
    verdict: str
    why: str
    compared: tuple[float, float] | None = None


def written(
    cluster: Cluster = ONE_PORT, name: str = "bf16", redundant: int = 0, mesh: str = "dp=32"
) -> tuple[float, float, float]:
    """(tokens a second, seconds of a decode step, seconds of a step with a 512-token prompt on each replica) of the plan's layout.

    Decode has as many of the 200 sessions as the caches hold; nothing is prefilled beside them.
    """
    return _written(cluster.network_gbps, cluster.nics_per_host, cluster.latency, name, redundant, mesh)


@cache
def _written(
    gbps: float, nics: int, latency: float, name: str, redundant: int, mesh: str
) -> tuple[float, float, float]:
    cluster = dataclasses.replace(CLUSTER, network_gbps=gbps, nics_per_host=nics, latency=latency)
    layout, options = parse_layout(mesh, redundant, CONFIG), PlanOptions(PRECISIONS[name])
    deciding = Workload(Lengths(CONTEXT - OUTPUT / 2), Lengths(OUTPUT))
    instance = Instance(CONFIG, cluster, layout, options, deciding)
    held = min(SESSIONS, instance.max_batch * layout.mesh.dp_size)
    step = instance.tpot(held / layout.mesh.dp_size).value
    first = (
        Instance(CONFIG, cluster, layout, options, Workload(Lengths(512), Lengths(OUTPUT))).prefill_step(512.0).value
    )
    return held / step, step, first


def change(resource: str, factor: float, base: Cluster = ONE_PORT) -> tuple[float, float]:
    """(change of tokens a second, change of a 512-token prompt's time) where a resource is so many times as good."""
    now, then = written(base), written(base.scaled(resource, factor))
    return then[0] / now[0] - 1, then[2] / now[2] - 1


def balanced(cluster: Cluster) -> float:
    """Change of tokens a second with 32 redundant experts, with the sessions that then fit."""
    return written(cluster, redundant=32)[0] / written(cluster)[0] - 1


def slower(milliseconds: float) -> tuple[float, float]:
    """`change` with so much more latency between hosts."""
    return change("latency", ONE_PORT.latency / (ONE_PORT.latency + milliseconds * 1e-3))


def claims() -> list[Claim]:
    """All of them, in the plan's order."""
    return [
        *_targets(),
        *_memory(),
        *_rates(),
        *_first_token(),
        *_network(),
        *_sensitivity(),
        *_topology(),
        *_commands(),
        *_conclusions(),
    ]


def _targets() -> list[Claim]:
    counts = parameter_counts(CONFIG)
    whole, embedding = counts["main_model"] / 1e9, counts["embedding"] / 1e9
    bound = GPUS * CLUSTER.hardware.bf16_flops / _attention()
    return [
        Claim("2", "throughput at 200 × 32 K", "35,000 – 45,000 tokens/s, goal 50,000", REFUTED, f"attention alone: {_attention() / 1e9:,.0f} GFLOP a token; 32 × 148 TFLOP/s ÷ that = {bound:,.0f} tokens/s at most; estimated as written {written()[0]:,.0f}", (40_000, written()[0])),
        Claim("2", "TTFT of 512 tokens", "0.211 – 0.374 s", REFUTED, f"one prompt on each of 32 replicas over one port a host: {written()[2]:.1f} s (estimate)", (0.288, written()[2])),
        Claim("2", "gain of a better network", "5 – 8 %", REFUTED, f"three ports a host instead of one: {change('network', 3)[0]:+.0%} tokens/s (estimate)"),
        Claim("2", "parallelism", "EP=32, TP=1, PP=1, the only one that works", REFUTED, f"vLLM computes EP = TP × DP with TP above 1 too; `dp=16,tp=2` holds more sessions and gives {written(mesh='dp=16,tp=2')[0]:,.0f} tokens/s"),
        Claim("3.1.2", "parameters", "671 B, 37 B active, 685 B with MTP", REPRODUCED, f"{whole:.1f} B; {counts['active'] / 1e9:.1f} B; with the MTP module and its copies of embedding and head {whole + 11.610068224 + 2 * embedding:.1f} B"),
        Claim("3.1.2", "layers and experts", "61 = 58 + 3; 58 × 257 = 14,906", REPRODUCED, f"{CONFIG.num_hidden_layers} layers, {CONFIG.num_moe_layers} of them with {CONFIG.n_routed_experts} + {CONFIG.n_shared_experts} experts: {CONFIG.num_moe_layers * 257:,}"),
        Claim("3.1.3", "an H20", "96 GB, 4.0 TB/s, 148 TFLOP/s", REPRODUCED, "the vendor's figures; configs/hardware/h20.toml"),
        Claim("3.1.3", "an H20 in FP8 or INT8", "296 TFLOP/s", REPRODUCED, f"the vendor's {CLUSTER.hardware.fp8_flops / 1e12:.0f}, twice bf16's 148"),
        Claim("3.1.4", "NVLink", "900 GB/s", REFUTED, "both directions together; 450 GB/s each way", (900, 450)),
        Claim("3.2.2", "kernels of an exchange", "low latency for decode, high throughput for prompts", REPRODUCED, "as vLLM's and DeepEP's documentation; 6.1 then takes the first for both"),
        Claim("3.2.4", "experts of a GPU", "256 ÷ 32 = 8 a layer, 464 in all", REPRODUCED, f"{CONFIG.num_moe_layers} × 8 = {CONFIG.num_moe_layers * 8}"),
    ]  # fmt: skip


def _attention() -> float:
    """Operations of a token's attention at the plan's context."""
    return 61.0 * mla_cost(CONFIG, "A_CC", rows=1, chunk=1, context=CONTEXT).attention_flops


def _linear() -> float:
    counts = parameter_counts(CONFIG)
    return 2.0 * (counts["active"] - counts["embedding"])


def _memory() -> list[Claim]:
    layout, bf16 = parse_layout("dp=32", 0, CONFIG), PRECISIONS["bf16"]
    found = weight_bytes(CONFIG, layout, bf16)
    total = sum(found.values()) / 1e9
    more = sum(weight_bytes(CONFIG, parse_layout("dp=32", 32, CONFIG), bf16).values()) / 1e9 - total
    device = Instance(CONFIG, CLUSTER, layout, PlanOptions(bf16), Workload(Lengths(CONTEXT), Lengths(1))).memory
    reserve = device.reserve
    token, fp8 = cache_bytes_per_token(CONFIG, bf16), cache_bytes_per_token(CONFIG, precision("fp8", "fp8"))
    cache = SESSIONS * CONTEXT * token / GPUS / 1e9
    theirs = SESSIONS * CONTEXT * 512 * 61 * 2 * 2
    expert, mla = 3 * 7168 * 2048, 187_107_328
    need = total + reserve.value / 1e9 + cache
    return [
        Claim("3.3.1", "weights in bf16", "1,342 GB, 43.7 % of 3,072", REPRODUCED, f"2 × 671.03 B = {2 * 671.026:,.0f} GB ÷ 3,072 = {2 * 671.026 / 3072:.1%}; but what 32 GPUs copy is not in it: {32 * total:,.0f} GB"),
        Claim("3.3.2", "routed experts", "436 B, 65 %; 13.63 B a GPU", REFUTED, f"58 × 256 × 3 × 7,168 × 2,048 = {58 * 256 * expert / 1e9:.1f} B, {58 * 256 * expert / 671.026e9:.0%}; ÷ 32 = {58 * 8 * expert / 1e9:.2f} B", (13.63, 58 * 8 * expert / 1e9)),
        Claim("3.3.2", "attention", "4.2 B (60 × 70 M)", REFUTED, f"61 × {mla:,} = {61 * mla / 1e9:.2f} B", (4.2, 61 * mla / 1e9)),
        Claim("3.3.2", "embedding, head", "0.6 B each (128 K × 4.6 K)", REFUTED, f"129,280 × 7,168 = {129_280 * 7168 / 1e9:.3f} B each", (0.6, 0.9267)),
        Claim("3.3.2", "shared experts", "1.9 B", REFUTED, f"58 × {expert:,} = {58 * expert / 1e9:.2f} B", (1.9, 58 * expert / 1e9)),
        Claim("3.3.2", "the rest", "0.1 B", REFUTED, f"three dense layers of 396 M and the routers: {(3 * 396_361_728 + 58 * 1_835_264) / 1e9:.2f} B", (0.1, 1.296)),
        Claim("3.3.2", "weights of a GPU", "13.63 + 7.4 = 21.03 B, 42.1 GB in bf16", REFUTED, f"the sum is right, its terms are not: {total:.1f} GB; 42.1 GB is FP8 with 32 redundant experts", (42.1, total)),
        Claim("3.3.2", "EPLB and routing", "6.4 – 9.8 GB", REFUTED, f"a balancer's counters are 58 × 256 numbers; 32 redundant experts are weights: {more:.1f} GB", (8.1, more)),
        Claim("3.3.2", "activations, runtime", "8 – 12 + 2 – 3 GB", OPEN, f"hangs on the engine; assumed here: {reserve.value / 1e9:.1f} ({reserve.low / 1e9:.1f} – {reserve.high / 1e9:.1f}) GB, less in programs compiled by `dsjax dryrun`"),
        Claim("3.3.2", "without cache", "58.6 – 67.0 GB", REFUTED, f"its terms give {42.1 + 8 + 6.4 + 2:.1f} – {42.1 + 12 + 9.8 + 3:.1f}, its 3.3.5 says 58.3 – 66.7; with the weights above {total + reserve.value / 1e9:.1f}", (62.8, total + reserve.value / 1e9)),
        Claim("3.3.3", "cache, in all", "818.6 GB (813.6 before alignment)", REFUTED, f"200 × 32,768 × 512 × 61 × 2 × 2 = {theirs / 1e9:.1f} GB with nothing aligned; MLA keeps 512 + 64 values once: {SESSIONS * CONTEXT * token / 1e9:.1f} GB", (818.6, SESSIONS * CONTEXT * token / 1e9)),
        Claim("3.3.3", "cache of a GPU", "25.6 GB, 26.7 %", REFUTED, f"{theirs / GPUS / 1e9:.1f} GB by its formula; {token:,} B a token: {cache:.1f} GB", (25.6, cache)),
        Claim("3.3.3", "with 1,024 and 2,048 values", "1,637.2 and 3,274.4 GB", REFUTED, f"twice and four times the figure above ({2 * theirs / 1e9:,.1f}, {4 * theirs / 1e9:,.1f}) for layouts that MLA does not have"),
        Claim("3.3.3", "a GPU's need with 512, 1,024, 2,048", "84.2 – 92.6, 109.4 – 118.4, 160.6 – 169.6 GB", REFUTED, f"58.6 – 67.0 + 25.6 is the first; + 51.2 = {58.6 + 51.2:.1f} – {67.0 + 51.2:.1f}, + 102.4 = {58.6 + 102.4:.1f} – {67.0 + 102.4:.1f}; 3.3.5 has 83.9 – 92.3 for the first"),
        Claim("3.3.3", "cached values", "203.4 × 10⁹, 406.8 with keys and values", REFUTED, f"200 × 32,768 × 512 × 61 = {200 * 32768 * 512 * 61 / 1e9:.1f} × 10⁹: the 5 GB to 818.6 are this slip and no alignment"),
        Claim("3.3.3", "sequences cached on a GPU", "200 (3.3.3.1)", REFUTED, "6.25 on average by its own 3.3.3.3; 200 would be 818.6 GB on each", (200, 6.25)),
        Claim("3.3.3", "sessions of a GPU", "6.25", REPRODUCED, "200 ÷ 32; some replicas hold 7"),
        Claim("3.3.3", "FP8 cache", "half as large", REPRODUCED, f"vLLM's: {fp8 / 61:.0f} B instead of {token / 61:,.0f} a token and layer; dsjax keeps scales and rotary keys in bf16: 656 B"),
        Claim("3.3.5", "a GPU needs", "83.9 – 92.3 GB of 96", REFUTED, f"{total:.1f} + {reserve.value / 1e9:.1f} + {cache:.1f} = {need:.1f} GB: 160 of the 200 sessions fit", (88.1, need)),
        Claim("3.3.5", "memory left", "3.7 – 12.1 GB", REFUTED, f"96 less its needs, 96 - 92.3 and 96 - 83.9, is right; less {need:.1f} it is {96 - need:.1f}"),
    ]  # fmt: skip


def _rates() -> list[Claim]:
    per_layer = (0.12, 0.53, 0.47, 0.02)
    told = 61 * sum(per_layer)
    expert = 6 * 7168 * 2048
    whole = (_linear() + _attention()) / 1e12
    chain = [
        (0.30, 0.75, "639", "15,332"),
        (0.50, 0.80, "1,065", "27,258"),
        (0.70, 0.85, "1,491", "40,546"),
        (0.85, 0.90, "1,810", "52,130"),
    ]
    rows = [
        Claim("3.4.1", "one projection of MLA", "2 × 7,168 × 512 = 7.34 × 10⁹", REFUTED, f"= {2 * 7168 * 512:,}: millions, a thousandfold slip", (7.34e9, 2 * 7168 * 512)),
        Claim("3.4.1", "MLA of a layer", "0.21, 0.0294 G and 0.12 TFLOP", REFUTED, f"three values of one thing; 2 × 187.1 M = {2 * 187.107e6 / 1e9:.2f} GFLOP, and {_attention() / 61 / 1e9:.1f} of attention at 32 K", (120, 2 * 0.1871 + _attention() / 61 / 1e9)),
        Claim("3.4.1", "shared expert", "0.53 TFLOP (d_ff 18,432)", REFUTED, f"18,432 is the dense layers' width; 6 × 7,168 × 2,048 = {expert / 1e9:.3f} GFLOP", (530, expert / 1e9)),
        Claim("3.4.1", "routed experts", "0.47 TFLOP", REFUTED, f"8 × {expert / 1e9:.3f} = {8 * expert / 1e9:.2f} GFLOP", (470, 8 * expert / 1e9)),
        Claim("3.4.1", "router", "0.02 TFLOP", REFUTED, f"2 × 7,168 × 256 = {2 * 7168 * 256 / 1e6:.1f} MFLOP", (20, 2 * 7168 * 256 / 1e9)),
        Claim("3.4.1", "a token", "69.5 TFLOP", REFUTED, f"61 × 1.14 = {told:.1f} is its sum; {_linear() / 1e9:.1f} + {_attention() / 1e9:,.0f} GFLOP = {whole:.2f} TFLOP", (69.5, whole)),
        Claim("3.4.1", "experts that act", "8 ÷ 256 = 3.125 %", REPRODUCED, "96.9 % of the routed experts' operations are left out"),
        Claim("3.4.1", "what sparsity saves", "67.1 % (58.7 – 70)", REFUTED, f"96.9 - 6 - 7.1 - 9.6 - 7.0 = {96.9 - 6 - 7.1 - 9.6 - 7.0:.1f} takes shares of time from a share of operations; of operations at 32 K {248 * expert * 58 / (_linear() + _attention() + 248 * expert * 58):.1%} are saved, without attention {248 * expert * 58 / (_linear() + 248 * expert * 58):.1%}"),
        Claim("3.4.1", "what MLA saves of attention", "90 %", REFUTED, f"operations a position grow: 2 × 128 × (576 + 512) = {2 * 128 * 1088:,} absorbed, {2 * 128 * 320:,} with keys and values; the cache shrinks, 576 of 40,960 values", (0.1, 1088 / 320)),
    ]  # fmt: skip
    for share, factor, one, said in chain:
        alone = 148 * share / told
        rows.append(
            Claim("3.4.2", f"{share:.0%} of the peak, × {factor}", f"{said} tokens/s", REFUTED, f"{148 * share:.1f} ÷ {told:.1f} = {alone:.2f} a GPU, not {one}: × 32 × {factor} = {alone * 32 * factor:.1f} tokens/s, a thousandfold slip", (float(said.replace(",", "")), alone * 32 * factor))
        )  # fmt: skip
    one_card, one_port = (balanced(cluster) for cluster in (CLUSTER, ONE_PORT))
    own = [math.prod(ends) for ends in ((1.10, 1.08, 1.03), (1.20, 1.12, 1.08))]
    return [
        *rows,
        Claim("3.4.2", "32 GPUs", "20,443, 34,072, 47,701, 57,922 tokens/s", REFUTED, f"32 × 44.4 ÷ 69.5 and so on: {', '.join(f'{148 * share / 69.5 * 32:.1f}' for share, *_ in chain)}, the same thousandfold slip", (34_072, 148 * 0.5 / 69.5 * 32)),
        Claim("3.4.3", "after optimising", "20,698, 42,250, 45,412, 56,300 tokens/s", REFUTED, f"the products are right (15,332 × 1.35 = {15_332 * 1.35:,.0f}, …), of rates that are a thousandfold too high"),
        Claim("3.4.3", "share of the goal", "41.4, 84.5, 90.8, 112.6 %", REFUTED, f"÷ 50,000 is right, of these rates; of the bound of section 2 it is {100 * GPUS * 148e12 / _attention() / 50_000:.0f} % at most"),
        Claim("3.4.3", "multipliers", "1.35, 1.55, 1.12, 1.08", REFUTED, f"its own ranges give {own[0]:.2f} – {own[1]:.2f} without and {own[0] * 1.05:.2f} – {own[1] * 1.15:.2f} with EPLB: all optimisations together (1.12) would be less than three"),
        Claim("3.4.3", "continuous batching", "+10 – 20 %", OPEN, "vLLM has no other way to run; a share of the peak that was reached with it has it in already"),
        Claim("3.4.3", "paged attention", "+8 – 12 %", OPEN, "the same; it raises how many sessions fit, which 3.3.5 counts"),
        Claim("3.4.3", "CUDA graphs", "+3 – 8 %", OPEN, "hangs on the host; a decode step as written takes " f"{written()[1] * 1e3:,.0f} ms, of which launches are a few"),
        Claim("3.4.3", "EPLB", "+5 – 15 %", REPRODUCED, f"{one_port:+.0%} over one port, with routing as skewed as published and the sessions that still fit beside 32 redundant experts; {one_card:+.0%} with a card a GPU, as fewer fit (estimates)"),
        Claim("3.4.4", "10 % more MoE efficiency, or utilisation", "+2,500 – 4,800, +1,400 – 4,800 tokens/s", REFUTED, f"10 % of its own rates is {1533:,} – {5213:,} either way"),
        Claim("3.4.4", "10 % more of vLLM's multiplier", "of 1.15 – 1.74, +1,400 – 3,800 tokens/s", REFUTED, "3.4.3 multiplies by 1.08 – 1.55 and A.5 by 1.18 – 1.48; 10 % of a factor is 10 % of the rate, 1,533 – 5,213 of its own"),
        Claim("3.4.4", "10 % more of the network's efficiency", "of 85 – 95 %, +700 – 2,400 tokens/s", REFUTED, f"links 10 % faster: {change('network', 1.1)[0]:+.0%} of {written()[0]:,.0f}, {change('network', 1.1)[0] * written()[0]:,.0f} tokens/s (estimate); from 95 % there are no 10 to gain", (1550, change("network", 1.1)[0] * written()[0])),
        Claim("3.4.5", "best case", "45,076 tokens/s, 87 – 90 %, probability 85 %", REFUTED, f"its table says 45,412; 45,076 ÷ 50,000 = {45_076 / 50_000:.1%}; the bound of section 2 is below both", (45_076, 8_507)),
    ]  # fmt: skip


def _first_token() -> list[Claim]:
    counts = parameter_counts(CONFIG)
    alone = 4096 * (61 * 187_107_328 + 58 * 44_040_192 + 3 * 396_361_728) * 2 / 148e12
    away = 4096 * 58 * 2 * 2 * 7168 * hosts_of_a_token(CONFIG, 4) * 3 / 4 / PORT
    return [
        Claim("3.5.1", "a 4 K prompt", "4,096 × 37 B × 2 = 303 TFLOP, 2.05 s", REPRODUCED, f"{4096 * 37e9 * 2 / 1e12:.0f} TFLOP ÷ 148 = {4096 * 37e9 * 2 / 148e12:.2f} s; exact {4096 * 2 * (counts['active'] - counts['embedding']) / 1e12:.0f} and attention"),
        Claim("3.5.1", "on 32 GPUs", "64, 90, 115 ms", REFUTED, f"the quotients are right; but with TP=1 a prompt's attention and shared expert stay on one GPU: {alone:.2f} s at its peak", (0.09, alone)),
        Claim("3.5.1", "points of synchronisation", "61 all-reduces, 30 MoE layers", REFUTED, "TP=1 has no all-reduce; 58 layers have experts, with two exchanges each: 116", (91, 116)),
        Claim("3.5.2", "routing of a prompt", "30, 35, 45 ms", REFUTED, f"the sums are right (3 + 12 + 8 + 7, …); a 4 K prompt's rows from one host over one port take {away * 1e3:,.0f} ms alone (exact)", (0.035, away)),
        Claim("3.5.3", "scheduling and launches", "35, 40, 50 ms", OPEN, "the sums are right (15 + 8 + 3 + 9, …); assumed here: 4 ms (1 – 15) of a prefill step, 10 ms (3 – 30) for HTTP and tokenising"),
        Claim("3.5.4", "NVLink, RDMA, all-to-all", "2 + 10 + 50 + 20 = 82 ms", REFUTED, "its own 4.4.1 has 2 µs, 10 µs and 50 µs: µs became ms; and it is one exchange, of 116"),
        Claim("3.5.5", "TTFT", "211, 288, 374 ms", REFUTED, f"the sums are right, the terms not; see section 2 ({written()[2]:.1f} s)", (0.288, written()[2])),
        Claim("3.5.5", "margins below 1.2 s", "82, 76, 69 %", REFUTED, "1 - 0.211 ÷ 1.2 and so on are right, of the TTFTs above"),
    ]  # fmt: skip


def _network() -> list[Claim]:
    slowest = CLUSTER.hosts * PORT / 0.75 / 1e9
    return [
        Claim("4.1.1", "memory", "8 × 96 = 768 GB a host, 3,072 in all", REPRODUCED, "the vendor's 96 GB"),
        Claim("4.1.3", "ports of a host", "1, 25 and 10 Gb/s, each once; direct to three hosts, behind a switch", REFUTED, f"one port is {PORT / 1e9:.3f} GB/s and reaches one switch; direct links to three hosts are three ports, as 4.1.4 then counts"),
        Claim("4.1.4", "pairs", "992 = 224 + 768; 192 a host, 64 a link", REPRODUCED, "32 × 31; 8 × 7 × 4; 8 × 24; 192 ÷ 3"),
        Claim("4.1.4", "links between hosts", "6 × 25 Gb/s = 18.75 GB/s", REFUTED, f"4.1.3 gives a host one port: 4 × 3.125 = {4 * PORT / 1e9:.1f} GB/s", (18.75, 4 * PORT / 1e9)),
        Claim("4.1.4", "what a port carries", "22 – 23 of 25 Gb/s, and 95 % or more", REFUTED, f"22 ÷ 25 and 23 ÷ 25 are 88 and 92 %; a packet of RoCE v2 has 82 B beside its rows: {25 * 1024 / 1106:.1f} Gb/s with 1,024 B of them, {25 * 4096 / 4178:.1f} with 4,096"),
        Claim("4.1.4", "processor time of RDMA", "below 5 %", OPEN, "hangs on the host and on how the rows are handed to the card; DeepEP's low-latency kernels do it from the GPU"),
        Claim("4.1.4", "NVLink in all", "900 × 4 = 3,600 GB/s", REFUTED, f"900 is of a GPU, both ways: 32 × 450 = {32 * 450:,} GB/s each way", (3600, 14400)),
        Claim("4.1.4", "all-to-all", "2,896, 2,027, 1,620, 1,448 GB/s", REFUTED, f"the sums are right (2,027 - 20 % = {2027 * 0.8:,.0f}; 1,448 is -29 %, not -30); but an exchange ends with its slowest link: {slowest:.1f} GB/s in all over one port a host", (2027, slowest)),
        Claim("4.3.1", "latency between hosts", "below 5 µs; elsewhere 5 – 10, below 10, below 100", REFUTED, "four thresholds of one thing (3.1.4, 4.3.1, 4.6.1, A.7); the cluster file assumes 5 (3 – 20)"),
        Claim("4.4.1", "RDMA of 1 MB", "below 100 µs at more than 20 Gb/s", REFUTED, f"1 MB in 100 µs is {8e6 / 100:,.0f} Mb/s ÷ 1,000 = 80 Gb/s over a 25 Gb/s port; {8e6 / 25e9 * 1e6:.0f} µs at best", (100, 320)),
        Claim("4.4.1", "all-to-all of 1 KB and 1 MB", "50 µs and 5 GB/s; 500 µs and 15 GB/s", REFUTED, f"1 KB ÷ 50 µs = {1024 / 50e-6 / 1e9:.2f} GB/s, 1 MB ÷ 500 µs = {1e6 / 500e-6 / 1e9:.0f} GB/s: one of each pair can hold; and `all_reduce_perf -g 8` is neither all-to-all nor between hosts", (5, 1024 / 50e-6 / 1e9)),
        Claim("4.4.1", "NVLink of 1 MB", "below 10 µs, above 400 GB/s", REFUTED, f"1 MB at 400 GB/s is 2.5 µs, so both can hold; the second is {400 / 450:.0%} of the link for one MB, which no table reaches"),
        Claim("4.4.1", "NVLink of 64 B", "below 2 µs, as in 3.1.4", OPEN, "a criterion: `dsjax bench network` times pairs inside a host; 3.5.4 has it as 2 ms"),
        Claim("4.4.2", "between hosts", "100 Gb/s; all-to-all 80 – 90, experts 70 – 80", OPEN, "4 × 25 is right for one port a host; shares reached hang on the switch: `dsjax bench network` measures them"),
    ]  # fmt: skip


def _exchange() -> float:
    """Seconds in which the rows of the plan's 200 tokens leave a host for one layer, one way, through one port."""
    return SESSIONS / 4 * 8 * 2 * 7168 * 0.75 / PORT


def _busy() -> float:
    """Share of a decode step's time in which a host's one port sends, at its full rate."""
    return 116 * _exchange() * written()[0] / SESSIONS


def _mebibytes() -> float:
    """Seconds in which a host's eight GPUs send three quarters of a MiB each through one port."""
    return 8 * 0.75 * 2**20 / PORT


def _topology() -> list[Claim]:
    pairs = 1024 * 4096 * 2 * 8
    row = 1024 * 7168 * 2 * 8
    double = change("network", 2)[0]
    return [
        Claim("4.6.1", "links between hosts", "4 × 3 × 25 = 300 Gb/s", REFUTED, "each link counted at both of its ends: 6 × 25 = 150; 4.1.3 has 4 × 25 = 100", (300, 100)),
        Claim("4.6.1", "latency, 5 – 10 µs against 1 – 2", "+300 %", REFUTED, "5 ÷ 1 = 10 ÷ 2 = 7.5 ÷ 1.5 = 5 times: +400 %", (4, 5)),
        Claim("4.6.1", "bandwidth, 300 G against 800", "-62.5 %", REPRODUCED, "1 - 300 ÷ 800; of the 150 or 100 Gb/s that there are it would be -81 or -88 %"),
        Claim("4.6.2", "a batch inside and between hosts", "167.8 and 503.3 MB", REFUTED, f"1,024 × 8,192 × 0.25 × 8 = {pairs * 0.25 / 1e6:.1f} MB, × 0.75 = {pairs * 0.75 / 1e6:.1f}: ten times too large; the hidden size is 7,168 and not 4,096: {row * 0.75 / 1e6:.1f} MB a layer and way", (503.3, row * 0.75 / 1e6)),
        Claim("4.6.2", "bandwidth of a GPU", "75 ÷ 8 = 9.375 Gb/s", REPRODUCED, f"with three ports a host; with one {25 / 8:.3f}"),
        Claim("4.6.2", "rows that leave a host", "75 %", REPRODUCED, f"24 of 32 GPUs; sent once to each host, {hosts_of_a_token(CONFIG, 4) * 3 / 4:.2f} rows of a token's 8"),
        Claim("4.6.2", "a routing exchange", "20 – 50 µs", REFUTED, f"its 5 – 10 µs are one message's; 200 tokens' rows of a layer and way take {_exchange() * 1e3:.2f} ms over one port a host, {_exchange() / 3 * 1e6:.0f} µs over three (exact), without computing", (35, _exchange() * 1e6)),
        Claim("4.6.2", "TTFT by synchronisation", "+15 – 25 %", REFUTED, f"without a limit between hosts the 512-token prompt takes {written(CLUSTER.scaled('network', 1000))[2]:.2f} s instead of {written()[2]:.1f}", (1.2, written()[2] / written(CLUSTER.scaled("network", 1000))[2])),
        Claim("4.6.3", "twice the links", "+20 – 30 % for +40 % of the network's cost", REFUTED, f"{double:+.0%} tokens/s from one port to two (estimate); the cost is not given", (1.25, 1 + double)),
        Claim("4.6.3", "NVLink of tier 1", "600 GB/s", REFUTED, "900 in 3.1.4"),
        Claim("4.6.3", "tiers 2 and 3", "100 G × 4 and 25 G × 8", OPEN, f"no gain is said; four hosts are one rack, whose 400 Gb/s a host would give {change('network', 16)[0]:+.0%} tokens/s and 200 {change('network', 8)[0]:+.0%} (estimates)"),
        Claim("4.6.3", "experts placed by their use together", "-30 % between hosts, +15 %", OPEN, "needs a recording of this service's routing: `tools/coactivation.py` measures what one gives"),
        Claim("4.6.4", "latency between hosts", "below 10, to 20, above 20 µs", REFUTED, "4.4.1 warns above 15 and fails above 25, for the same; and `ping` measures both hosts' kernels, there and back"),
        Claim("4.6.4", "use of a link", "below 70, to 85, above 85 %", OPEN, f"a criterion, of seconds (`sar`): a decode step as written uses its port for {_busy():.0%} of its time (exact bytes ÷ 25 Gb/s ÷ estimate), in bursts that take all of it"),
        Claim("4.6.4", "all-to-all", "below 50, to 100, above 100 µs", REFUTED, f"by `all_to_all_perf -b 1M -g 32`, in which each GPU sends 1 MiB: 8 × 0.75 MiB ÷ 3.125 GB/s = {_mebibytes() * 1e3:.2f} ms at best; 4.4.1 has these thresholds for 1 KB", (50, _mebibytes() * 1e6)),
        Claim("4.6.4", "packets lost", "below 0.01, to 0.1, above 0.1 %", OPEN, f"a criterion: a lost packet has RoCE send again what follows it, {25e9 / 8 * 10e-6 / 4096:.0f} packets in 10 µs, so that 0.01 % cost 0.08 % of the bandwidth; configs/observability/alerts-h20-32.yml has these thresholds"),
        Claim("4.6.5", "before and after", "120 → 95 ms, 8,500 → 11,000 tokens/s, 45 → 32 µs, 75 → 52 %", REFUTED, "-21, +29, -29 and -31 % are right; 120 ms and 8,500 tokens/s are neither 3.5.5's 288 nor 2's 35,000"),
        Claim("4.6.5", "return on investment", "50,000, 80,000 a year, 7.5 months", OPEN, f"50,000 ÷ 80,000 × 12 = {50_000 / 80_000 * 12:.1f} is right; both amounts are without a source"),
    ]  # fmt: skip


def _sensitivity() -> list[Claim]:
    rows = []
    for more, rate, first in ((5, "-1 – 3 %", "+2 – 5 %"), (10, "-3 – 7 %", "+5 – 10 %"), (20, "-7 – 15 %", "+10 – 20 %"), (50, "-15 – 30 %", "+25 – 40 %"), (100, "-30 – 50 %", "+50 – 80 %")):  # fmt: skip
        found, waits = slower(more), 232 * more / 1e3 * _UNEVEN
        longer = found[1] * written()[2]
        decode = f"{116 * more / 1e3:.2f} s, {found[0]:+.0%} tokens/s"
        prompt = f"{waits:.2f} s, and {longer - waits:.2f} as two half batches no longer pay: + {longer:.2f} of {written()[2]:.1f} s, TTFT of 512 tokens {found[1]:+.0%}"
        why = (
            f"a decode step's 116 exchanges wait once: + {decode}; a prompt's twice, for counts and for rows: 232 × {more} ms × {_UNEVEN} (uneven prompts) = {prompt}"
            if more == 5
            else f"116 × {more} ms = {decode}; 232 × {more} ms × {_UNEVEN} = {prompt}"
        )
        rows.append(Claim("4.5.1", f"+ {more} ms", f"{rate}, TTFT {first}", REFUTED, why))
    for speed, rate in ((20, "-5 – 10 %"), (15, "-15 – 25 %"), (10, "-25 – 40 %"), (5, "-50 – 65 %")):
        found = change("network", speed / 25)
        rows.append(Claim("4.5.2", f"{speed} Gb/s", f"{rate} tokens/s", REFUTED, f"the links are what limits: {found[0]:+.0%} tokens/s, TTFT of 512 tokens {found[1]:+.0%}"))  # fmt: skip
    speeds = (20, 15, 10, 5)
    port = ", ".join(f"{speed / 25:.0%}" for speed in speeds)
    longer = ", ".join(f"{25 / speed - 1:+.0%}" for speed in speeds)
    congested = ", ".join(f"{load} %: {change('network', 1 - load / 100)[0]:+.0%}" for load in (10, 25, 50, 75, 90))
    return [
        *rows,
        Claim("4.5.2", "all-to-all at 20, 15, 10, 5 Gb/s", "85 – 90, 70 – 80, 50 – 65, 25 – 40 %", REFUTED, f"an exchange between hosts is as fast as the port that it goes through: {port}", (0.32, 0.2)),
        Claim("4.5.2", "routing at 20, 15, 10, 5 Gb/s", "+10 – 15, 20 – 30, 40 – 60, 80 – 120 %", REFUTED, f"its rows take 25 ÷ 20 and so on as long: {longer}", (1, 4)),
        Claim("4.5.3", "congestion of 10 – 90 %", "no figure", OPEN, f"a link that others use by so much: {congested} tokens/s (estimate, fair shares; queues and loss come on top)"),
        Claim("4.5.4", "one link lost", "-20 – 30 %", REFUTED, f"with three links of a host, the lost pair's rows go over another link: half the bandwidth there, {(1 + change('network', 1.5)[0]) / (1 + change('network', 3)[0]) - 1:+.0%}; with one port (4.1.3) the host is cut off"),
        Claim("4.5.4", "one host lost", "-25 %, 24 GPUs go on", REFUTED, f"64 of a layer's 256 experts are gone with it; 24 GPUs need 264 slots and {sum(weight_bytes(CONFIG, parse_layout('dp=24', 8, CONFIG), PRECISIONS['bf16']).values()) / 1e9:.1f} GB of weights each; `--tensor-parallel-size 24` does not divide 128 heads"),
        Claim("4.5.4", "hosts lost until it stops", "more than half", REFUTED, "one: experts that only it had are gone; 32 redundant ones are copies of 32 of the 64 at most, and vLLM's ranks wait for each other"),
        Claim("4.5.4", "recovery", "30 s", REFUTED, f"a host reads its weights again: {_cold().value:,.0f} s ({_cold().low:,.0f} – {_cold().high:,.0f}) at an assumed 3 GB/s (1 – 7)", (30, _cold().value)),
        Claim("4.5.5", "rules of thumb", "10 ms: TTFT +5 – 10 %; -20 % bandwidth: -10 – 15 %", REFUTED, f"{slower(10)[1]:+.0%} and {change('network', 0.8)[0]:+.0%}"),
        Claim("4.5.5", "all-to-all", "+50 %: routing +30 – 40 %", REFUTED, f"links a third slower (25 ÷ 1.5 Gb/s) are {change('network', 1 / 1.5)[0]:+.0%} tokens/s, as the exchanges are nearly all of a step"),
    ]  # fmt: skip


@cache
def _cold():
    layout = parse_layout("dp=32", 0, CONFIG)
    return cold_start(
        Instance(CONFIG, CLUSTER, layout, PlanOptions(PRECISIONS["bf16"]), Workload(Lengths(512), Lengths(1)))
    )


def _given() -> dict[str, str]:
    """The options of the plan's commands (6.1), as `configs/recipes` has them; those that only other sections name are left out."""
    found = tomllib.loads(
        (Path(str(resources.files("configs"))) / "recipes" / "vllm-h20-32.toml").read_text(encoding="utf-8")
    )
    return {name: value for name, value in found["sides"][0]["options"].items() if name not in found["elsewhere"]}


def _not_accepted() -> int:
    """How many of them vLLM's newest release does not know; variables of Gloo and NCCL are not its own."""
    path = Path(str(resources.files("configs"))) / "engines" / "options" / "vllm.json"
    known = json.loads(path.read_text(encoding="utf-8"))
    names = {*known["options"], *known["environment"], "--model"}
    return sum(name not in names for name in _given() if name.startswith(("--", "VLLM_")))


def _room() -> int:
    """Sessions of the plan's lengths that a rank has room for beside bf16 weights with 32 redundant experts."""
    layout, work = parse_layout("dp=32", 32, CONFIG), Workload(Lengths(CONTEXT - OUTPUT / 2), Lengths(OUTPUT))
    return Instance(CONFIG, CLUSTER, layout, PlanOptions(PRECISIONS["bf16"]), work).max_batch


def _commands() -> list[Claim]:
    fp8 = sum(weight_bytes(CONFIG, parse_layout("dp=32", 32, CONFIG), PRECISIONS["fp8"]).values()) / 1e9
    return [
        Claim("5.1", "vLLM with EPLB", "from 0.6.0", REFUTED, "0.6.0 is of September 2024; EPLB is pull request 18343 of June 2025"),
        Claim("5.1", "CUDA 12.1, PyTorch 2.1, NCCL 2.18, OFED 5.8", "at least", OPEN, "older than what an engine with EPLB asks for: vLLM 0.33 brings PyTorch 2.14 and its own NCCL"),
        Claim("5.1", "Python, transformers", "3.9 – 3.11, best 3.10; from 4.40", REFUTED, "vLLM 0.33, which is one from 0.6.0 on, asks in its package for Python from 3.11 and transformers from 5.16.1"),
        Claim("5.2", "`--eplb-rebalance-freq`", "100 steps", REFUTED, "no vLLM has had it; `--eplb-config` has step_interval, 3,000 by default"),
        Claim("6.1", "the commands", f"{len(_given())} options and variables", REFUTED, f"{_not_accepted()} of them are not accepted by vLLM 0.33, and nodes 1 to 3 have no address: [recipes.md](recipes.md), option by option"),
        Claim("6.1", "no quantisation (1), bf16 (3.3.2)", "`vllm serve deepseek-ai/DeepSeek-V3` without a dtype", REFUTED, f"that checkpoint is FP8 and stays so, and VLLM_USE_DEEP_GEMM is for FP8 weights: {fp8:.1f} GB a GPU with 32 redundant experts, 3.3.2's figure; in bf16 another checkpoint is needed"),
        Claim("6.1", "`--max-num-seqs`", "200", REFUTED, f"of a DP rank: 32 × 200 = {32 * 200:,} sessions; 7 are meant, and with 32 redundant experts in bf16 there is room for {_room()}", (200, 7)),
        Claim("6.2.1", "`--tensor-parallel-size`, `--pipeline-parallel-size`", "from 0.1.0 and 0.2.0", OPEN, "both are in 0.6.0; older packages are of models before DeepSeek-V3 and were not read"),
        Claim("6.2.1", "the other seven options", "from 0.1.0, 0.5.0 and 0.6.0", REFUTED, "0.6.0's package has none of them (`--data-parallel-size`, `--enable-expert-parallel`, `--enable-eplb`, `--num-redundant-experts`, `--eplb-…`), and no DeepSeek-V3"),
        Claim("6.2.2", "EP size", "TP × DP = 1 × 32", REPRODUCED, "vLLM's rule; that TP is fixed at 1 is refuted in section 2"),
        Claim("6.2.3", "VLLM_USE_DEEP_GEMM, VLLM_ALL2ALL_BACKEND, VLLM_ENABLE_V1_MULTIPROCESSING", "from 0.6.0, 0.5.0, 0.6.0", REFUTED, "0.6.0's package has none of them, and 0.33 no longer the second: `--all2all-backend` says it"),
        Claim("6.2.4", "EPLB", "+3 – 12 % tokens/s", REPRODUCED, f"{balanced(ONE_PORT):+.0%}, as in 3.4.3"),
        Claim("6.2.4", "EPLB: P99, utilisation", "-10 – 20 %, +3 – 8 %", OPEN, "needs the service's own routing: `dsjax bench serve` with and without measures it"),
        Claim("7.1", "thresholds", "35,000 tokens/s, P99 below 3 s, …", OPEN, "criteria, which a running cluster meets or misses; the first is above the bound of section 2"),
        Claim("7.1", "TTFT thresholds", "P50 0.8, P95 1.2, P99 1.5 s at 512; 2.0 s at 4 K", REFUTED, f"as written, over one port a host, {written()[2]:.1f} s at 512 tokens (estimate); `dsjax accept` holds a server to them"),
        Claim("7.1.3", "all-to-all of 32 GPUs", "below 20 µs, above 80 Gb/s", REFUTED, "50 µs in 4.4.1; two hops of 5 µs and 31 messages leave no 20; 4 × 25 = 100 Gb/s in all"),
    ]  # fmt: skip


@cache
def _rebalance() -> float:
    """Seconds in which a rank receives the experts that a rebalance gives it, over one port a host, in bf16."""
    layout = parse_layout("dp=32", 32, CONFIG)
    work = Workload(Lengths(512), Lengths(1))
    (model, *_) = Instance(CONFIG, ONE_PORT, layout, PlanOptions(PRECISIONS["bf16"], overlap="off"), work).step_models()
    return model.moving()["moving experts"].value * STEP_INTERVAL


def _wider() -> str:
    """What 64 and 128 GPUs hold of the plan's sessions, in its own layout."""
    found = []
    for gpus in (64, 128):
        layout, options = parse_layout(f"dp={gpus}", 0, CONFIG), PlanOptions(PRECISIONS["bf16"])
        work = Workload(Lengths(CONTEXT - OUTPUT / 2), Lengths(OUTPUT))
        instance = Instance(CONFIG, CLUSTER.resized(gpus // 8), layout, options, work)
        found.append((gpus * instance.max_batch, instance.memory.weights_total / 1e9))
    (sessions, weights), (more, fewer) = found
    return (
        f"not in proportion, as 32 hold 160 of the 200 (3.3.5); but `dp=64` and `dp=128` hold {sessions:,} and {more:,} of 32 K in bf16, "
        f"with {weights:.1f} and {fewer:.1f} GB of weights a GPU"
    )


def _conclusions() -> list[Claim]:
    step = SESSIONS * 61 * 8 * 2 * 2 * 7168
    over = SESSIONS / 4 * 58 * 8 * 2 * 2 * 7168 * 0.75 / PORT
    wire = (7168 * PRECISIONS["fp8"].wire + 14336) / (2 * 14336)
    return [
        Claim("7.2.1", "rebalances", "1 – 3 in 1,000 steps", REFUTED, f"step_interval is {STEP_INTERVAL:,} in 6.1: {1000 / STEP_INTERVAL:.2f} in 1,000 steps", (2, 1000 / STEP_INTERVAL)),
        Claim("7.2.1", "a rebalance", "below 100 ms", REFUTED, f"the experts that a rank gets travel over the port that its host's eight share: {_rebalance():.1f} s in bf16 (estimate, loads that drift as published)", (0.1, _rebalance())),
        Claim("7.2.1", "experts' use", "variance below 20 %", OPEN, "a criterion, of the service's own routing"),
        Claim("8.1", "routing of 200 × 32 K", "2.8 GB, 9.77 s", REFUTED, f"200 × 61 × 8 × 2 × 2 × 7,168 = {step / 1e9:.2f} GB is one decode step, of 58 layers and not 61; over one port {over:.2f} s; the prompts are 32,768 times that", (9.77, over)),
        Claim("8.1", "of the TTFT's budget", "48.9 times", REFUTED, f"9.77 ÷ 48.9 = {9.77 / 48.9:.2f} s, a budget that stands nowhere else (1.2 s)"),
        Claim("8.1", "synchronisation", "TTFT +47.9 %: 115 → 170 ms; 122 after", REFUTED, f"170 ÷ 115 = {170 / 115 - 1:+.1%}; 122 ms is below the 211 that 3.5.5 calls ideal"),
        Claim("8.2", "operations against the simple estimate", "7.5 times", REFUTED, f"553.5 (A.3) ÷ (2 × 37) = {553.5 / 74:.2f}: the quotient is right, of a numerator that is not; {_linear() / 1e9:.1f} G without attention are {_linear() / 74e9:.2f} times, 69.5 T (3.4.1) {69.5e12 / 74e9:,.0f}"),
        Claim("8.3", "chunks of 4,096", "9.77 → 1.22 s, -87.5 %", REFUTED, "÷ 8 is the first of eight chunks; all eight send the same rows"),
        Claim("8.3", "FP8 rows", "half", REFUTED, f"rows back stay bf16: {wire - 1:.0%}", (0.5, wire)),
        Claim("8.3.2", "better predictions, steadier TTFT", "+30 %, -47.9 %", OPEN, "of which prediction is not said; 47.9 % is the growth from 115 to 170 ms, of which taking all away would be -32 %"),
        Claim("8.3.3", "asynchronous exchanges, predicted routing", "-50 %, +15 – 20 %", OPEN, "neither is described; `dsjax plan --two-batch-overlap` prices the overlap that engines have"),
        Claim("8.3.4", "margin of memory", "15 %", REFUTED, f"85 % of 96 GB are {0.85 * 96:.1f}, and 3.3.5 needs 83.9 – 92.3", (81.6, 88.1)),
        Claim("A.1", "the model", "671 B, 37 B, 256 experts, 8 of them, 61 layers, 2,048", REPRODUCED, "its configuration"),
        Claim("A.3", "shared parts", "146.4 + 6.6 + 64.05 = 217.05 B", REFUTED, f"{61 * 187_107_328 / 1e9:.1f} + {2 * 0.92668:.1f} + {58 * 0.04404:.1f} = {61 * 0.187107 + 1.853 + 2.554:.1f} B", (217.05, 15.8)),
        Claim("A.3", "an expert over the layers", "1.79 B; 8 are 14.3 B", REFUTED, f"gate, up and down are three matrices, in 58 layers: {58 * 0.044040192:.2f} B; 8 are {8 * 58 * 0.044040192:.1f} B", (1.79, 2.554)),
        Claim("A.3", "operations", "434.1 + 118.4 + 1.0 = 553.5 G", REFUTED, f"2 × 14.3 is 28.6 and not 118.4; {_linear() / 1e9:.1f} G and attention", (553.5, (_linear() + _attention()) / 1e9)),
        Claim("A.3", "what sparsity saves", "(1,342 - 553.5) ÷ 1,342 = 58.7 %", REFUTED, f"{1 - 553.5 / 1342:.1%} by its terms; of 2 × 671 G, {1 - _linear() / 1342e9:.1%} without attention", (58.7, 100 * (1 - _linear() / 1342e9))),
        Claim("A.4", "EPLB", "0.6 – 0.8 + 3.5 – 6 + 2.3 – 3.2 = 6.4 – 9.8 GB", REFUTED, f"the terms give {0.6 + 3.5 + 2.3:.1f} – {0.8 + 6 + 3.2:.1f}"),
        Claim("A.4", "activations", "6 – 10 GB", REFUTED, "8 – 12 in 3.3.2"),
        Claim("A.5", "all gains", "1.15 × 1.10 × 1.05 × 1.08 = 1.43; 1.18, 1.32, 1.48", REFUTED, f"{1.15 * 1.10 * 1.05 * 1.08:.2f} is right; 3.4.3 uses 1.35, 1.55, 1.12 and 1.08 instead"),
        Claim("A.6", "overhead of parallel prompts", "40 – 80 %", REFUTED, "3.5.1's factors 1.4 and 1.8, of a quotient that TP=1 does not have"),
        Claim("A.6", "routing, scheduling, network", "30 – 45, 35 – 50, 82 – 164 ms", REFUTED, "the same as 3.5.2 to 3.5.4"),
        Claim("A.7", "NVLink, all-to-all", "above 400 GB/s, below 50 µs", OPEN, "criteria; 7.1.3 has 20 µs"),
        Claim("A.8", "confidence", "± 5, ± 15, ± 25 %", REFUTED, "of its figures that can be compared with one worked out, more than half are off by more than a factor of two"),
        Claim("B.2", "mixed optimisation", "9.77 → 0.122 s, 0.61 of the TTFT", REFUTED, f"chunks send the same rows and FP8 halves one way: {9.77 / 1.22:.0f} × 2 is not {9.77 / 0.122:.0f}; 0.122 ÷ 0.61 = {0.122 / 0.61:.1f} s again"),
        Claim("B.4", "what the 55 ms are", "39.5 + 33.8 + 26.7 %", OPEN, f"they add up to {39.5 + 33.8 + 26.7:.0f} %; nothing says how one was told from another"),
        Claim("B.5", "OOM probability, accuracy, bias", "> 90 %, +695 %, > 30 %", OPEN, "no event, quantity or method is given"),
        Claim("B.5", "communication", "+98.8 %", REPRODUCED, f"1 - 0.122 ÷ 9.77 = {1 - 0.122 / 9.77:.1%}, of the times above"),
        Claim("end", "64 and 128 GPUs", "400 and 800 sessions", REPRODUCED, _wider()),
        Claim("end", "throughput to watch", "above 100 tokens/s", REFUTED, "50,000 in section 1"),
        Claim("C", "EP fixes TP at 1, so the cache cannot be cut", "vLLM 0.6.4", REFUTED, "TP above 1 works with EP; MLA's latent has no heads to cut under any TP, so that the sizes stand"),
    ]  # fmt: skip


def table(every: list[Claim] | None = None) -> str:
    """Markdown: how many of each verdict, then every claim."""
    every = every or claims()
    counts = {verdict: sum(claim.verdict == verdict for claim in every) for verdict in (REPRODUCED, REFUTED, OPEN)}
    lines = [
        f"{len(every)} figures: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) + ".",
        "",
        "| section | figure | the plan | | arithmetic, or why not |",
        "|---|---|---|---|---|",
        *(f"| {c.section} | {c.what} | {c.said} | {c.verdict} | {c.why} |" for c in every),
    ]
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def draw(path: Path, every: list[Claim] | None = None) -> None:
    """How many times too large or too small each figure is that can be compared, in the plan's order."""
    from matplotlib import pyplot

    compared = [claim for claim in every or claims() if claim.compared]
    ratios = [claim.compared[0] / claim.compared[1] for claim in compared]
    figure, axes = pyplot.subplots(figsize=(10, 0.26 * len(compared) + 1.2), dpi=110)
    rows = range(len(compared))
    colours = ["#c0392b" if max(r, 1 / r) > 2 else "#d98c2b" if max(r, 1 / r) > 1.1 else "#2d7d46" for r in ratios]
    axes.barh(rows, [math.log10(r) for r in ratios], color=colours)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(
        rows,
        [f"{c.section}  {c.what}: {_number(c.compared[0])} | {_number(c.compared[1])}" for c in compared],
        fontsize=7,
    )
    axes.invert_yaxis()
    ticks = range(-3, 4)
    axes.set_xticks(ticks, [f"{10.0**t:g} ×" for t in ticks], fontsize=8)
    axes.set_xlabel(
        "the plan's figure ÷ the one worked out (red: off by more than 2, orange: by more than 1.1)", fontsize=8
    )
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
