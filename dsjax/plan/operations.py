"""Measured operations: the published tables of DeepGEMM, FlashMLA and DeepEP, and the efficiencies read from them.

All on an H800 (DeepEP over ConnectX-7, 400 Gb/s). An efficiency is the roofline time of the operation on that device ÷
the time measured. No figure here comes from a serving benchmark.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics

from dsjax.plan.curves import Curve
from dsjax.plan.figure import measured

H800_FP8_FLOPS = 1979e12
H800_BF16_FLOPS = 989e12
H800_BANDWIDTH = 3.35e12
H800_NVLINK = 200e9
H800_NETWORK = 50e9

DEEPGEMM = "DeepGEMM README, April 2025 (H800)"
# (N, K) -> M -> TFLOP/s of a dense FP8 product with bf16 results. These are V3's own shapes.
DENSE_TFLOPS: dict[tuple[int, int], dict[int, float]] = {
    (2112, 7168): {64: 206, 128: 352, 4096: 1127},
    (24576, 1536): {64: 289, 128: 535, 4096: 1212},
    (32768, 512): {64: 219, 128: 358, 4096: 775},
    (7168, 16384): {64: 336, 128: 645, 4096: 1520},
    (4096, 7168): {64: 287, 128: 533, 4096: 1410},
    (7168, 2048): {64: 295, 128: 510, 4096: 1168},
}
# (N, K) -> (groups, rows of each) -> TFLOP/s; masked is decode's layout, contiguous is prefill's.
MASKED_TFLOPS = {
    (4096, 7168): {(1, 1024): 1233, (2, 512): 1040, (4, 256): 932},
    (7168, 2048): {(1, 1024): 925, (2, 512): 916, (4, 256): 815},
}
CONTIGUOUS_TFLOPS = {
    (4096, 7168): {(4, 8192): 1346, (8, 4096): 1346},
    (7168, 2048): {(4, 8192): 1214, (8, 4096): 1214},
}

FP8_MLA = "lmsys.org, 2025-09-26, H20: FP8 queries, keys and values in FlashMLA (pull request 82) are about 70 % faster than bf16"
FP8_MLA_GAIN = 1.7
"""How much faster FlashMLA's FP8 pipeline computes on an H20, whose operations bound it (1.6 to 1.8: "about 70 %")."""
FLASH_MLA = "FlashMLA README (H800, dense decode, bf16)"
FLASH_MLA_BANDWIDTH = 3000e9
FLASH_MLA_FLOPS = 660e12

DEEPEP = "DeepEP v1 README (H800, ConnectX-7 400 Gb/s)"
# ranks -> (dispatch, combine) seconds: 128 tokens a rank, 7,168 wide, 8 experts, FP8 there and bf16 back.
LOW_LATENCY_SECONDS = {
    8: (77e-6, 114e-6),
    16: (118e-6, 195e-6),
    32: (155e-6, 273e-6),
    64: (173e-6, 314e-6),
    128: (192e-6, 369e-6),
    256: (194e-6, 360e-6),
}
LOW_LATENCY_TOKENS, LOW_LATENCY_TOP_K = 128, 8
DISPATCH_ROW_BYTES, COMBINE_ROW_BYTES = 7168 + 56 * 4, 2 * 7168
# Normal kernels, bytes a second (dispatch, combine): NVLink inside a host; RDMA between hosts, where rows that stay on
# the sender's host are counted too, and a token goes to the 4 hosts of its 4 expert groups at most.
NORMAL_NVLINK = (153e9, 158e9)
NORMAL_RDMA = {32: (58e9, 57e9), 64: (51e9, 50e9)}
NORMAL_SMS, H800_SMS = 24, 132


FLASHINFER_FP8 = (
    "FlashInfer's block-FP8 product on a B200 with 256 rows and more: 447 TFLOP/s with 24,576 columns and 759 with 576 for each further "
    "row, where DeepGEMM has 3,200 (sgl-project/sglang pull request 13528)"
)
FLASHINFER_FP8_RATE = (583e12, 447e12, 759e12)
"""Operations a second (value, low, high) of that product: the geometric mean of the two shapes, and each of them."""
ALL_REDUCE = (
    "vLLM 0.20's own all-reduce and FlashInfer's with residual and norm in the same kernel, in CUDA graphs "
    "(ai-dynamo/aiconfigurator, campaign_checkpoints/*/custom_allreduce_perf.txt and allreduce_rms_perf.txt)"
)
# Devices of a host that have it -> ranks -> 1,024 bf16 values -> microseconds of a sum.
ALL_REDUCE_US: dict[str, dict[int, dict[float, float]]] = {
    "h200": {
        2: {4: 4.53, 64: 4.80, 256: 6.32, 1024: 12.47, 4096: 43.0, 16384: 144.8, 65536: 463.3, 524288: 3255.6},
        4: {4: 4.70, 16: 4.92, 64: 5.84, 128: 7.02, 256: 10.52, 512: 11.99, 1024: 17.69, 2048: 29.86, 4096: 52.0,
            16384: 171.4, 65536: 609.3, 524288: 4523.1},
        8: {4: 5.02, 8: 5.27, 16: 5.71, 32: 6.52, 64: 8.0, 128: 9.92, 256: 11.04, 512: 14.08, 1024: 18.38, 2048: 28.74,
            4096: 48.64, 8192: 87.26, 16384: 165.8, 65536: 562.7, 524288: 4000.2},
    },
    "b200": {
        2: {4: 7.35, 64: 7.77, 256: 9.81, 512: 13.47, 1024: 25.7, 4096: 44.9, 16384: 86.8, 65536: 281.8, 524288: 1897.3},
        4: {4: 7.41, 64: 8.22, 128: 8.62, 256: 18.15, 1024: 23.74, 2048: 29.78, 4096: 43.38, 16384: 123.5, 65536: 354.5,
            524288: 2532.4},
        8: {4: 7.94, 8: 8.18, 32: 8.64, 64: 9.46, 128: 25.4, 512: 16.56, 1024: 19.94, 2048: 26.05, 4096: 38.18, 8192: 62.33,
            16384: 110.7, 65536: 395.9, 524288: 2596.2},
    },
}  # fmt: skip
FUSED_ALL_REDUCE_US = {7: 6.28, 14: 6.41, 21: 6.45, 35: 6.58, 70: 7.27, 133: 8.55, 259: 11.8, 518: 17.9}
"""1,024 values -> microseconds of a sum over 8 B300 together with the residual and the norm that follow it, V3's width."""


@functools.cache
def all_reduce_curves(device: str, ranks: int) -> tuple[Curve, Curve | None]:
    """Seconds over bytes of a sum over at most so many devices of one host; on Blackwell also with the norm in the same kernel."""
    tables = ALL_REDUCE_US[device]
    plain = tables[min((known for known in tables if known >= ranks), default=max(tables))]
    curves = [
        Curve((2048.0 * size, time * 1e-6) for size, time in times.items()) for times in (plain, FUSED_ALL_REDUCE_US)
    ]
    return curves[0], curves[1] if device == "b200" else None


def roofline(flops: float, read_and_written: float, peak: float, bandwidth: float) -> float:
    """Seconds that the device's ceilings allow at best."""
    return max(flops / peak, read_and_written / bandwidth)


def product_bytes(rows: float, n: int, k: int, weight_itemsize: float = 1, input_itemsize: float = 1) -> float:
    """Bytes of one product: weights and input read, bf16 result written."""
    return n * k * weight_itemsize + rows * (k * input_itemsize + 2 * n)


def _efficiency(rows: float, n: int, k: int, tflops: float, groups: int = 1) -> float:
    flops = 2.0 * groups * rows * n * k
    best = roofline(flops, groups * product_bytes(rows, n, k), H800_FP8_FLOPS, H800_BANDWIDTH)
    return best / (flops / (tflops * 1e12))


_DENSE = {shape: {m: _efficiency(m, *shape, t) for m, t in row.items()} for shape, row in DENSE_TFLOPS.items()}
_MASKED = {s: {g: _efficiency(g[1], *s, t, g[0]) for g, t in row.items()} for s, row in MASKED_TFLOPS.items()}
_CONTIGUOUS = {s: {g: _efficiency(g[1], *s, t, g[0]) for g, t in row.items()} for s, row in CONTIGUOUS_TFLOPS.items()}


_SHARE_OF_MANY_ROWS = {
    decode: {shape: statistics.mean(shares.values()) for shape, shares in table.items()}
    for decode, table in ((True, _MASKED), (False, _CONTIGUOUS))
}


def _between(points: dict[int, float], m: float) -> float:
    """Piecewise linear in log m, constant outside."""
    known = sorted(points)
    if m <= known[0]:
        return points[known[0]]
    for low, high in itertools.pairwise(known):
        if m <= high:
            share = math.log(m / low) / math.log(high / low)
            return points[low] + share * (points[high] - points[low])
    return points[known[-1]]


def _dense(m: float, n: float, k: float) -> float:
    """Mean over the measured shapes, weighted by their nearness in log N and log K."""
    total = weight = 0.0
    for (n0, k0), points in _DENSE.items():
        distance = math.log(n / n0) ** 2 + math.log(k / k0) ** 2
        if distance == 0:
            return _between(points, m)
        total += _between(points, m) / distance
        weight += 1 / distance
    return total / weight


_ROWS = (1, 8, 32, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


@functools.cache
def dense_curve(n: int, k: int, itemsize: float = 1.0) -> Curve:
    """Seconds on an H800 of a dense product `[rows, k] × [k, n]` over rows; bf16 (`itemsize` 2) at FP8's shares of its ceilings."""
    peak = H800_FP8_FLOPS if itemsize < 2 else H800_BF16_FLOPS

    def best(rows: float) -> float:
        return roofline(2.0 * rows * n * k, product_bytes(rows, n, k, itemsize, itemsize), peak, H800_BANDWIDTH)

    # The table's own sizes exactly; between them its share of the ceilings is straight in the logarithm of the rows.
    return Curve([(rows, best(rows) / _dense(rows, n, k)) for rows in _ROWS], best)


def grouped_seconds(used: float, rows: float, decode: bool) -> float:
    """Seconds on an H800 of both of V3's expert products, `rows` over `used` experts, by the masked or contiguous table.

    Up to 192 rows an expert a product reaches what a dense one of as many rows does.
    """
    total, each = 0.0, rows / max(used, 1e-9)
    for n, k in ((4096, 7168), (7168, 2048)):
        share = _SHARE_OF_MANY_ROWS[decode][n, k]
        if each < 192:
            share = min(share, _dense(max(each, 1.0), n, k))
        moved = used * n * k + rows * (k + 2 * n)
        total += roofline(2.0 * rows * n * k, moved, H800_FP8_FLOPS, H800_BANDWIDTH) / share
    return total


def decode_attention_seconds(flops: float, read: float) -> float:
    """Seconds on an H800 of absorbed attention in decode; the README says "up to", of which 95 % is taken."""
    return roofline(flops, read, 0.95 * FLASH_MLA_FLOPS, 0.95 * FLASH_MLA_BANDWIDTH)


def prefill_attention_seconds(flops: float, context: float) -> float:
    """Seconds on an H800 of naive causal attention, for want of a table: at most FlashMLA's share, less at short prompts.

    The tiles of 128 on the diagonal are computed whole, so that a prompt of `2 × context` tokens costs that of one tile more.
    """
    return flops / (0.6 * H800_BF16_FLOPS) * (1 + 64 / max(context, 1.0))


def low_latency_fit(combine: bool) -> tuple[float, float, float]:
    """(fixed seconds, share of the network's rate, share of NVLink's rate) of DeepEP's low-latency kernels.

    Least squares over 16 to 256 ranks of time = fixed + bytes to other hosts ÷ rate; eight ranks then give NVLink's. Ranges
    are the slopes between neighbouring points' extremes and ± the residual.
    """
    row_bytes = COMBINE_ROW_BYTES if combine else DISPATCH_ROW_BYTES
    payload = LOW_LATENCY_TOKENS * LOW_LATENCY_TOP_K * row_bytes
    points = [(payload * (1 - 8 / r), t[combine]) for r, t in LOW_LATENCY_SECONDS.items() if r > 8]
    slope, fixed = statistics.linear_regression(*zip(*points, strict=True))
    residual = max(abs(fixed + slope * sent - seconds) for sent, seconds in points)
    share = 1 / slope / H800_NETWORK
    spread = residual / (slope * points[-1][0])
    inside = payload * 7 / 8 / (LOW_LATENCY_SECONDS[8][combine] - fixed) / H800_NVLINK
    what = "combine" if combine else "dispatch"
    return (
        measured(fixed, max(fixed - residual, 5e-6), fixed + residual, f"{what}, fixed part", DEEPEP, "s"),
        measured(share, share * (1 - spread), min(share * (1 + spread), 0.98), f"{what}, share of network", DEEPEP),
        measured(inside, inside * 0.9, min(inside * 1.1, 0.95), f"{what}, share of scale-up link", DEEPEP),
    )


def normal_shares() -> tuple[float, float]:
    """(share of the network's rate, share of NVLink's) of DeepEP's normal kernels, rows to the own host taken out."""
    network = [
        rate * remote / H800_NETWORK for ranks, remote in ((32, 3 / 4), (64, 3.5 / 4)) for rate in NORMAL_RDMA[ranks]
    ]
    inside = statistics.mean(NORMAL_NVLINK) / H800_NVLINK
    value = statistics.mean(network)
    return (
        measured(value, min(network), max(network), "normal kernels, share of network", DEEPEP),
        measured(inside, 0.95 * inside, 1.05 * inside, "normal kernels, share of scale-up link", DEEPEP),
    )
