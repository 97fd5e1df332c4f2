"""Work of operations, scaling of times from one device to another, and published times of DeepGEMM, FlashMLA, DeepEP and all-reduce.

Times of DeepGEMM, FlashMLA and DeepEP are of an H800 (DeepEP over ConnectX-7, 400 Gb/s). No figure here comes from a serving benchmark.
"""

import csv
import functools
import math
import statistics
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from dsjax.hardware import Hardware, load_hardware
from dsjax.hardware.description import UNITS
from dsjax.plan.curves import Curve
from dsjax.plan.figure import assumption, measured
from dsjax.plan.precision import BF16, TABLE_FORMATS, operand_bytes
from dsjax.toml_files import bundled_text

H800_SMS = 132

DEEPGEMM = "DeepGEMM README, April 2025 (H800)"
# (N, K) -> M -> TFLOP/s of a dense FP8 product with bf16 results. These are V3's own shapes.
_DENSE = {
    (2112, 7168): {64: 206, 128: 352, 4096: 1127},
    (24576, 1536): {64: 289, 128: 535, 4096: 1212},
    (32768, 512): {64: 219, 128: 358, 4096: 775},
    (7168, 16384): {64: 336, 128: 645, 4096: 1520},
    (4096, 7168): {64: 287, 128: 533, 4096: 1410},
    (7168, 2048): {64: 295, 128: 510, 4096: 1168},
}
# The same for grouped products in decode's masked layout, by rows of each group: of four, two and one group.
_MASKED = {(4096, 7168): {256: 932, 512: 1040, 1024: 1233}, (7168, 2048): {256: 815, 512: 916, 1024: 925}}

FP8_MLA = "lmsys.org, 2025-09-26, H20: FP8 queries, keys and values in FlashMLA (pull request 82) are about 70 % faster than bf16"
FP8_MLA_GAIN = 1.7
"""Speedup of FlashMLA's FP8 pipeline on an H20, where it is compute-bound (1.6 to 1.8: "about 70 %")."""
FLASH_MLA = "FlashMLA README (H800, dense decode, bf16)"
FLASH_MLA_FLOPS = 660e12

DEEPEP = "DeepEP v1 README (H800, ConnectX-7 400 Gb/s)"
_NVLINK, _NETWORK = 200e9, 50e9
# Ranks -> (dispatch, combine) microseconds: 128 tokens a rank, 7,168 wide, 8 experts, FP8 dispatch and bf16 combine.
_LOW_LATENCY_US = {
    8: (77, 114), 16: (118, 195), 32: (155, 273), 64: (173, 314), 128: (192, 369), 256: (194, 360),
}  # fmt: skip
ROW_BYTES = (7168 + 56 * 4, 2 * 7168)
"""Bytes of a row that DeepEP was timed with: dispatched in FP8, and combined in bf16."""
# Normal kernels, bytes a second (dispatch, combine): NVLink inside a host; RDMA between hosts by the share of the rows that leave the host
# (32 and 64 ranks; a token goes to at most the 4 hosts of its 4 expert groups). The RDMA rates also count the rows that stay.
_NORMAL_NVLINK = (153e9, 158e9)
_NORMAL_RDMA = {3 / 4: (58e9, 57e9), 3.5 / 4: (51e9, 50e9)}

FLASHINFER_FP8 = (
    "FlashInfer's block-FP8 product on a B200, marginal rate per further row (1,024 to 4,096 rows, K = 7,168): 447 TFLOP/s with 24,576 "
    "columns, 759 with 576; DeepGEMM's: 3,200 with 24,576 (sgl-project/sglang pull request 13528)"
)
FLASHINFER_FP8_RATE = (583e12, 447e12, 759e12)
"""Operations a second (value, low, high) of that product: the geometric mean of the two shapes, and each of them."""
ALL_REDUCE = (
    "vLLM 0.20's own all-reduce and FlashInfer's with residual and norm in the same kernel, in CUDA graphs "
    "(ai-dynamo/aiconfigurator, campaign_checkpoints/*/custom_allreduce_perf.txt and allreduce_rms_perf.txt)"
)

CEILING = 0.95
"""Largest share of a device's peak that an operation is assumed to reach."""
LAUNCH = 3e-6
"""Seconds of a kernel's start and end, independent of the device's peak."""


@functools.cache
def bundled_device(key: str) -> Hardware:
    """Return a bundled device, read once."""
    return load_hardware(key)


class OperationWork(NamedTuple):
    """Work of an operation: FLOPs, the bits of its numbers, which select the unit, and bytes of memory moved."""

    flops: float
    bits: int
    moved: float

    def seconds(self, chip: Hardware, share: float = CEILING) -> float:
        """Return the roofline seconds at this share of a device's peak: compute or memory, whichever takes longer."""
        peak = getattr(chip, UNITS[self.bits]) or chip.fp8_flops  # without a 4-bit unit, products run in FP8
        return max(self.flops / peak, self.moved / chip.memory_bandwidth) / share


def product_work(rows: float, n: int, k: int, dtype: str) -> OperationWork:
    """Return the work of a product `[rows, k] × [k, n]` with bf16 results. dtype: of the weights, one of `TABLE_FORMATS`."""
    bits, itemsize = TABLE_FORMATS[dtype]
    return OperationWork(2.0 * rows * n * k, bits, n * k * itemsize + rows * (k * itemsize + 2 * n))


def experts_work(used: float, rows: float, width: int, inner: int, itemsize: float, bits: int) -> OperationWork:
    """Return the work of both products of routed experts: `rows` in total, the weights of `used` experts.

    itemsize: bytes of a weight. bits: of the operands that the device multiplies.
    """
    operand = operand_bytes(bits / 8)
    # A row: an operand of `width` read, gate and up written in bf16, an operand of `inner` read, the output written in bf16.
    num_bytes = used * 3 * width * inner * itemsize + rows * (width * (operand + BF16) + inner * (2 * BF16 + operand))
    return OperationWork(6.0 * rows * width * inner, bits, num_bytes)


def convert_seconds(
    seconds: float, work: OperationWork, timed_on: Hardware, device: Hardware, fixed: float = LAUNCH
) -> float:
    """Scale the seconds of an operation from device `timed_on` to device `device`.

    Time beyond the roofline bound is loss. Its fixed part (starting the kernel) stays as it is. The rest is waiting for data and
    shrinks as memory gets faster. The bound is that of the new device. A device with few operations for each byte (H20) thus
    reaches a larger share of its peak, because its products take longer for the same waiting; and more of any resource never makes
    an operation slower.
    """
    bound = work.seconds(timed_on)
    if seconds <= bound:
        return seconds * work.seconds(device) / bound if seconds > 0 else seconds
    loss = seconds - bound
    fixed = min(fixed, loss)
    return work.seconds(device) + fixed + (loss - fixed) * timed_on.memory_bandwidth / device.memory_bandwidth


def nearness(n: int, k: int, shapes: Collection[tuple[int, int]]) -> dict[tuple[int, int], float]:
    """Return weights (sum 1) of timed product shapes for another shape: itself alone, or all by their nearness in log n and log k."""
    if (n, k) in shapes:
        return {(n, k): 1.0}
    near = {shape: 1 / (math.log(n / shape[0]) ** 2 + math.log(k / shape[1]) ** 2) for shape in shapes}
    return {shape: weight / sum(near.values()) for shape, weight in near.items()}


@functools.cache
def _shares(shape: tuple[int, int], masked: bool = False) -> tuple[list[float], list[float]]:
    """Return (logarithms of the timed rows, shares of an H800's peak)."""
    rates = (_MASKED if masked else _DENSE)[shape]
    works = [product_work(rows, *shape, "fp8_block") for rows in rates]
    shares = [
        work.seconds(bundled_device("h800"), 1.0) * tflops * 1e12 / work.flops
        for work, tflops in zip(works, rates.values(), strict=True)
    ]
    return [math.log(rows) for rows in rates], shares


def _dense_share(rows: float, n: int, k: int) -> float:
    """Return the share of an H800's peak: linear in the logarithm of the rows, constant beyond the timed ones."""
    near = nearness(n, k, _DENSE)
    return sum(weight * np.interp(math.log(rows), *_shares(shape)) for shape, weight in near.items())


@functools.cache
def dense_curve(n: int, k: int, dtype: str) -> Curve:
    """Return the H800 seconds of a dense product `[rows, k] × [k, n]` over rows; bf16 reaches FP8's shares of the peak."""

    def best(rows: float) -> float:
        return product_work(rows, n, k, dtype).seconds(bundled_device("h800"), 1.0)

    # Exact at the table's sizes; between them the share of the peak is linear in the logarithm of the rows.
    sizes = (1, 8, 32, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
    return Curve([(rows, best(rows) / _dense_share(rows, n, k)) for rows in sizes], best)


def grouped_seconds(used: float, rows: float) -> float:
    """Return the H800 seconds of both of V3's expert products, `rows` over `used` experts, in decode's layout.

    Below 192 rows an expert, a product reaches at most the share of a dense one with as many rows.
    """
    total = 0.0
    rows_per_expert = rows / max(used, 1e-9)
    for n, k in _MASKED:
        share = statistics.mean(_shares((n, k), masked=True)[1])
        if rows_per_expert < 192:
            share = min(share, _dense_share(max(rows_per_expert, 1.0), n, k))
        work = OperationWork(2.0 * rows * n * k, 8, used * n * k + rows * (k + 2 * n))
        total += work.seconds(bundled_device("h800"), share)
    return total


@functools.cache
def all_reduce_curves(device: str, ranks: int) -> list[Curve]:
    """Return curves (seconds over bytes) of all-reduces in one H200 or B200 host.

    They are of the smallest timed number of devices that is at least `ranks`, or else of the largest. On Blackwell, a second curve is of
    the all-reduce fused with the residual and norm that follow it (8 B300, at V3's width).
    """
    text = bundled_text("all_reduce.csv")
    times: dict[tuple[bool, int], list[tuple[float, float]]] = {}
    for row in csv.DictReader(text.splitlines()):
        if row["device"] == device:
            point = 2.0 * int(row["bf16_values"]), float(row["latency_us"]) * 1e-6
            times.setdefault((row["with_norm"] == "yes", int(row["ranks"])), []).append(point)
    timed = [known for with_norm, known in times if not with_norm]
    plain = times[False, min((known for known in timed if known >= ranks), default=max(timed))]
    return [Curve(plain), *(Curve(points) for (with_norm, _), points in times.items() if with_norm)]


def low_latency_fit(combine: bool) -> tuple[float, float, float]:
    """Return DeepEP's low-latency (fixed seconds, share of the network's rate, share of NVLink's rate), within the largest residual.

    Least squares over 16 to 256 ranks of time = fixed + bytes to other hosts ÷ rate; eight ranks then give NVLink's share.
    """
    payload = 128 * 8 * ROW_BYTES[combine]
    seconds = {r: us[combine] * 1e-6 for r, us in _LOW_LATENCY_US.items()}
    points = [(payload * (1 - 8 / r), time) for r, time in seconds.items() if r > 8]
    slope, fixed = statistics.linear_regression(*zip(*points, strict=True))
    residual = max(abs(fixed + slope * sent - time) for sent, time in points)
    share = 1 / slope / _NETWORK
    spread = residual / (slope * points[-1][0])
    inside = payload * 7 / 8 / (seconds[8] - fixed) / _NVLINK
    way = "combine" if combine else "dispatch"
    # The intervals stay physical: at least 5 µs to start, at most 98 % of the network's rate and 95 % of the scale-up link's.
    return (
        measured(fixed, max(fixed - residual, 5e-6), fixed + residual, f"{way}, fixed part", DEEPEP, "s"),
        measured(share, share * (1 - spread), min(share * (1 + spread), 0.98), f"{way}, share of network", DEEPEP),
        measured(inside, inside * 0.9, min(inside * 1.1, 0.95), f"{way}, share of scale-up link", DEEPEP),
    )


def normal_network_share() -> float:
    """Return the share of the network's rate that DeepEP's normal kernels reach, excluding rows that stay on the host."""
    shares = [rate * remote / _NETWORK for remote, rates in _NORMAL_RDMA.items() for rate in rates]
    return measured(statistics.mean(shares), min(shares), max(shares), "normal kernels, share of network", DEEPEP)


def normal_fit() -> tuple[float, float, float]:
    """Return the values of `low_latency_fit` for DeepEP's normal kernels."""
    share = statistics.mean(_NORMAL_NVLINK) / _NVLINK
    return (
        assumption("normal kernels, fixed part"),
        normal_network_share(),
        measured(share, 0.95 * share, 1.05 * share, "normal kernels, share of scale-up link", DEEPEP),
    )
