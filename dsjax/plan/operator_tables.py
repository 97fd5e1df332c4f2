"""`OperatorTables`: measured seconds of single operations by device, interpolated between the sizes that were timed.

The bundled tables are `configs/operators` (their sources are in `SOURCES.md` there); a user's folder with files of the same names
and columns replaces the rows of the devices that it names. Every lookup is monotone (`curves.py`).
"""

from __future__ import annotations

import csv
import functools
import importlib.resources
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dsjax.errors import UserError, why_unreadable
from dsjax.hardware import Hardware, load_hardware
from dsjax.plan.curves import Curve

GEMM, PREFILL, DECODE = "gemm", "mla_context", "mla_generation"
WIDE, FUSED, LOW_LATENCY, NORMAL = "experts_wide_ep", "experts_fused", "deepep_low_latency", "deepep_normal_h200"
SPREAD = "experts_spread"
"""Whole experts spread over an EP group, as an engine without DeepEP computes them: a table that only folders of such engines have."""
_SPREAD_COLUMNS = ("device", "kernel_source", "moe_dtype", "moe_ep_size", "distribution", "num_tokens", "latency_ms")
_SIZES = (
    "m", "n", "k", "num_heads", "batch_size", "isl", "context", "num_tokens", "num_token", "num_experts", "moe_tp_size", "moe_ep_size",
    "node_num", "dispatch_sms", "combine_sms",
)  # fmt: skip
"""Columns of all tables that say how large an operation was: whole numbers of 1 or more."""
NORMAL_DEVICE = "h200"
"""The device that DeepEP's normal kernels were timed on."""
TABLES = (GEMM, PREFILL, DECODE, WIDE, FUSED, LOW_LATENCY, NORMAL)

AICONFIGURATOR = "operator tables of aiconfigurator, configs/operators/SOURCES.md"
_BUNDLED = Path(str(importlib.resources.files("configs"))) / "operators"
REPACKING = 4 * 2e-6
"""Seconds of each block-FP8 product of the bundled table on Blackwell in which the weights' scales are repacked.

The table's program (aiconfigurator, collector/sglang/collect_gemm.py) gives DeepGEMM the scales in float32. On SM100 DeepGEMM needs
them packed, and packs them on every call with four kernels (its csrc/apis/layout.hpp: arange, division, index_select, packing), of
2 µs each as a layer's other small ones (`configs/assumptions.toml`). A server packs them once, when it loads. Without them no product is
taken to be faster than the same one in FP4, which was timed with packed scales.
"""
_WEIGHT_BYTES = {"fp8_block": 1.0, "bfloat16": 2.0, "nvfp4": 0.5625}


@dataclass(frozen=True)
class Grouped:
    """Seconds of a rank's routed experts in a prefill step: row × rows + token × tokens + slot × slots + fixed, at least `least`.

    Fitted by least squares to the table's evenly routed points, relative errors; `error` is their mean.
    """

    row: float
    token: float
    slot: float
    fixed: float
    least: float
    error: float


@dataclass(frozen=True, eq=False)
class OperatorTables:
    """All tables. folder: a user's, laid over the bundled ones. left_out: names of tables that are not looked at. own: devices of the
    user's that tables name, beside the bundled ones.
    """

    folder: Path | None = None
    left_out: frozenset[str] = frozenset()
    own_hardware: tuple[Hardware, ...] = ()
    _found: dict = field(default_factory=dict, repr=False)

    def without(self, *names: str) -> OperatorTables:
        """Leave some tables out: what the planner would say without them."""
        left_out = self.left_out | set(names)
        return self._once(("without", left_out), lambda: OperatorTables(self.folder, left_out, self.own_hardware))

    def of_version(self, name: str) -> OperatorTables:
        """The bundled tables with those of another version over them, such as `sglang-0.5.9`; a folder of the user's own is not in it,
        `left_out` is.
        """
        return self._once(("version", name), lambda: OperatorTables(_BUNDLED / name, self.left_out, self.own_hardware))

    def device(self, key: str) -> Hardware:
        """A device that tables name, as its file has it."""
        return next((device for device in self.own_hardware if device.key == key), None) or as_filed(key)

    @property
    def devices(self) -> set[str]:
        """Devices that a table names."""
        return self._once(
            ("devices",),
            lambda: {row["device"] for t in (*TABLES, SPREAD) for row in self._rows(t) if "device" in row},
        )

    def _once(self, key: tuple, make: Callable[[], object]):
        if key not in self._found:
            self._found[key] = make()
        return self._found[key]

    def _rows(self, table: str) -> list[dict[str, str]]:
        return [] if table in self.left_out else self._once(("rows", table), lambda: _read(self.folder, table))

    # Dense products -----------------------------------------------------------------------------------------------------------

    def _products(self, device: str, dtype: str) -> dict[tuple[int, int], dict[int, float]]:
        def make():
            times: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
            for row in self._rows(GEMM):
                if row["device"] == device and row["gemm_dtype"] == dtype:
                    times[int(row["n"]), int(row["k"])][int(row["m"])] = float(row["latency_ms"]) * 1e-3
            return dict(times)

        return self._once((GEMM, device, dtype), make)

    def product(self, device: str, dtype: str, n: int, k: int) -> Curve | None:
        """Seconds of `[rows, k] × [k, n]` over rows; of a shape that was not timed, from the shares of the nearest that were."""
        return self._once(("product", device, dtype, n, k), lambda: self._product(device, dtype, n, k))

    def _product(self, device: str, dtype: str, n: int, k: int, without: tuple[int, int] | None = None) -> Curve | None:
        shapes = {shape: times for shape, times in self._products(device, dtype).items() if shape != without}
        if not shapes:
            return None

        def best(rows: float, shape: tuple[int, int] = (n, k)) -> float:
            return best_product(self.device(device), dtype, rows, *shape)

        if (n, k) in shapes:
            return Curve(shapes[n, k].items(), best)
        near = {shape: math.log(n / shape[0]) ** 2 + math.log(k / shape[1]) ** 2 for shape in shapes}
        grid = sorted(set.intersection(*(set(times) for times in shapes.values())))
        points = []
        for rows in grid:
            share = sum(best(rows, s) / shapes[s][rows] / d for s, d in near.items()) / sum(
                1 / d for d in near.values()
            )
            points.append((rows, best(rows) / share))
        return Curve(points, best)

    def product_error(self, device: str, dtype: str) -> float:
        """Mean relative error of a shape that is not in the table: each that is left out in turn, from 64 rows on."""

        def make():
            errors = []
            for shape, times in self._products(device, dtype).items():
                guess = self._product(device, dtype, *shape, without=shape)
                errors += [abs(guess(rows) / time - 1) for rows, time in times.items() if rows >= 64]
            return statistics.mean(errors) if errors else 0.0

        return self._once(("product error", device, dtype), make)

    # Attention ----------------------------------------------------------------------------------------------------------------

    def prefill_attention(self, device: str, cache: str, heads: int) -> dict[float, dict[float, float]] | None:
        """Seconds by length of a prompt and number of prompts (1, 2, 4, 8) in a step; more prompts never take longer each."""
        key = (PREFILL, device, cache)

        def make():
            times: dict[int, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
            for row in self._rows(PREFILL):
                if row["device"] == device and row["kv_cache_dtype"] == cache:
                    each = times[int(row["num_heads"])][int(row["isl"])]
                    each[int(row["batch_size"])] = float(row["latency_ms"]) * 1e-3
            return {h: {i: dict(b) for i, b in rows.items()} for h, rows in times.items()}

        tables = self._once(key, make)
        if not tables:
            return None

        def times():
            at, scale = _nearest_heads(tables, heads)
            # A length that was timed with few prompts takes as long for each of more.
            return {
                float(length): {
                    float(wanted): wanted * min(times[count] / count for count in times if count <= wanted) * scale
                    for wanted in (1, 2, 4, 8)
                }
                for length, times in tables[at].items()
            }

        return self._once((*key, heads), times)

    def decode_attention(self, device: str, cache: str, heads: int) -> tuple[dict[float, Curve], float] | None:
        """(rows → seconds over cached positions of each, the relative spread between engines)."""
        key = (DECODE, device, cache)

        def make():
            times: dict[int, dict[int, dict[int, list[float]]]] = defaultdict(
                lambda: defaultdict(lambda: defaultdict(list))
            )
            for row in self._rows(DECODE):
                # SGLang's FP8 cache on Hopper is converted before use, 10 times slower; an engine would not choose it.
                known = row["software"].startswith("TensorRT-LLM") or cache == "bfloat16"
                if row["device"] == device and row["kv_cache_dtype"] == cache and known:
                    each = times[int(row["num_heads"])][int(row["batch_size"])][int(row["context"])]
                    each.append(float(row["latency_ms"]) * 1e-3)
            return times

        tables = self._once(key, make)
        if not tables:
            return None

        def curves():
            at, scale = _nearest_heads(tables, heads)
            table = tables[at]
            by_heads = {
                float(rows): Curve(
                    ((context, statistics.fmean(times) * scale) for context, times in contexts.items()), _in_proportion
                )
                for rows, contexts in table.items()
            }
            both = [max(t) / min(t) - 1 for contexts in table.values() for t in contexts.values() if len(t) > 1]
            return by_heads, statistics.mean(both) if both else 0.05

        return self._once((*key, heads), curves)

    # Experts ------------------------------------------------------------------------------------------------------------------

    def grouped_decode(self, device: str) -> dict[float, Curve] | None:
        """Experts of a rank that have rows → seconds of its routed experts in decode over the rows of each of them."""

        def make():
            table: dict[float, list[tuple[float, float]]] = defaultdict(list)
            for row in self._rows(WIDE):
                if row["device"] == device and row["phase"] == "generation" and row["distribution"] == "uniform":
                    tokens, slots = int(row["num_tokens"]), 256 / int(row["moe_ep_size"])
                    rows = 8 * tokens / 256 * slots
                    used = min(slots, rows)
                    table[used].append((rows / used, float(row["latency_ms"]) * 1e-3))
            if not table:
                return None
            return {used: Curve(_least_of_each(points), _in_proportion) for used, points in sorted(table.items())}

        return self._once((WIDE, "generation", device), make)

    def grouped_prefill(self, device: str) -> Grouped | None:
        """Seconds of a rank's routed experts in prefill."""

        def make():
            points, least = [], math.inf
            for row in self._rows(WIDE):
                if row["device"] == device and row["phase"] == "context" and row["distribution"] == "uniform":
                    tokens, ep, time = (
                        int(row["num_tokens"]), int(row["moe_ep_size"]), float(row["latency_ms"]) * 1e-3
                    )  # fmt: skip
                    least = min(least, time)
                    if time > 0.8e-3:  # below, launches are all that is seen
                        points.append((8 * tokens / ep, tokens, 256 / ep, 1.0, time))
            if not points:
                return None
            table = np.asarray(points)
            work, time = table[:, :4], table[:, 4]
            answer = np.linalg.lstsq(work / time[:, None], np.ones_like(time), rcond=None)[0]
            error = float(np.mean(np.abs(work @ answer / time - 1)))
            return Grouped(*(max(0.0, float(a)) for a in answer), least, error)

        return self._once((WIDE, "context", device), make)

    def fused(self, device: str, dtype: str, tp: int, ep: int) -> Curve | None:
        """Seconds of the fused kernel over all tokens, routed evenly, with experts `tp` times narrower and spread over `ep`.

        dtype: of the experts' weights, as the table has it: `fp8_block` or `nvfp4`.
        """

        def make():
            table: dict[tuple[str, str, int, int], list[tuple[int, float]]] = defaultdict(list)
            for row in self._rows(FUSED):
                if row["distribution"] == "balanced":
                    key = row["device"], row["moe_dtype"], int(row["moe_tp_size"]), int(row["moe_ep_size"])
                    table[key].append((int(row["num_tokens"]), float(row["latency_ms"]) * 1e-3))
            return {key: Curve(points) for key, points in table.items()}

        return self._once((FUSED,), make).get((device, dtype, tp, ep))

    def spread(self, device: str, dtype: str, ep: int) -> tuple[Curve, bool] | None:
        """(seconds of a rank's whole experts over all tokens of an EP group of `ep`, whether they were routed evenly).

        Routed by a power law the rank was timed that has most rows; such rows count where there are no others.
        dtype: of the experts' weights, as of `fused`.
        """

        def make():
            table: dict[tuple[str, str, int], dict[bool, list[tuple[int, float]]]] = defaultdict(
                lambda: defaultdict(list)
            )
            for row in self._rows(SPREAD):
                key = row["device"], row["moe_dtype"], int(row["moe_ep_size"])
                point = int(row["num_tokens"]), float(row["latency_ms"]) * 1e-3
                table[key][row["distribution"] == "balanced"].append(point)
            return {key: (Curve(kinds[max(kinds)]), max(kinds)) for key, kinds in table.items()}

        return self._once((SPREAD,), make).get((device, dtype, ep))

    # Exchanges ----------------------------------------------------------------------------------------------------------------

    def low_latency(self, device: str, combine: bool) -> Curve | None:
        """Seconds of a low-latency dispatch or combine within one host over tokens of a rank; the newer software."""

        def make():
            column = "combine_avg_t_us" if combine else "dispatch_avg_t_us"
            points = [
                (int(row["num_token"]), float(row[column]) * 1e-6)
                for row in self._rows(LOW_LATENCY)
                if row["device"] == device and row["node_num"] == "1" and row["num_experts"] == "256"
                and row["sglang"] == "0.5.12"
            ]  # fmt: skip
            return Curve(points) if points else None

        return self._once((LOW_LATENCY, device, combine), make)

    def normal(self, combine: bool) -> Curve | None:
        """Seconds of a normal dispatch or combine within one host of H200 over tokens of a rank, on 24 multiprocessors."""

        def make():
            way = "combine" if combine else "dispatch"
            points = [
                (int(row["num_token"]), float(row[f"{way}_transmit_us"]) * 1e-6)
                for row in self._rows(NORMAL)
                if row["num_experts"] == "256" and row["dispatch_sms"] == "24" and row["combine_sms"] == "24"
            ]
            return Curve(points) if points else None

        return self._once((NORMAL, combine), make)


def best_product(chip: Hardware, dtype: str, rows: float, n: int, k: int) -> float:
    """Seconds of a product that a device's ceilings allow at best: operations, or bytes of weights, input and bf16 result."""
    itemsize = _WEIGHT_BYTES[dtype]
    peak = {"fp8_block": chip.fp8_flops, "bfloat16": chip.bf16_flops, "nvfp4": chip.fp4_flops or math.inf}[dtype]
    moved = n * k * itemsize + rows * (k * itemsize + 2 * n)
    return max(2.0 * rows * n * k / peak, moved / chip.memory_bandwidth)


def _in_proportion(size: float) -> float:
    return size


def _least_of_each(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    least: dict[float, float] = {}
    for size, time in points:
        least[size] = min(time, least.get(size, math.inf))
    return sorted(least.items())


def _nearest_heads(tables: dict, heads: int) -> tuple[int, float]:
    """(a number of heads that was timed, the share of its time): with fewer heads than the least, as the least."""
    known = sorted(tables)
    at = next((h for h in known if h >= heads), known[-1])
    return at, max(1.0, heads / at)


@functools.cache
def as_filed(key: str) -> Hardware:
    """A bundled device, read once."""
    return load_hardware(key)


def _as_served(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """The bundled products without what was timed with them and no server does: see `REPACKING`."""
    fp4 = {(r["device"], r["m"], r["n"], r["k"]): float(r["latency_ms"]) for r in rows if r["gemm_dtype"] == "nvfp4"}
    for row in rows:
        if row["gemm_dtype"] == "fp8_block":
            least = fp4.get((row["device"], row["m"], row["n"], row["k"]))
            if least is not None:
                time = float(row["latency_ms"])
                row["latency_ms"] = str(min(time, max(least, time - REPACKING * 1e3)))
    return rows


def _read(folder: Path | None, table: str) -> list[dict[str, str]]:
    if table == SPREAD:
        columns, rows = list(_SPREAD_COLUMNS), []
    else:
        bundled = importlib.resources.files("configs") / "operators" / f"{table}.csv"
        columns, *lines = csv.reader(bundled.read_text(encoding="utf-8").splitlines())
        rows = [dict(zip(columns, line, strict=True)) for line in lines]
        rows = _as_served(rows) if table == GEMM else rows
    users_file = None if folder is None else Path(folder) / f"{table}.csv"
    if users_file is None or not users_file.exists():
        return rows
    try:
        given = list(csv.DictReader(users_file.read_text(encoding="utf-8").splitlines()))
        missing = [name for name in columns if not given or given[0].get(name) is None]
        if missing:
            raise ValueError(f"column {', '.join(missing)} is missing")
        for number, row in enumerate(given, start=2):
            empty = [name for name in columns if not row[name]]
            if empty:
                raise ValueError(f"line {number} has no {', '.join(empty)}")
            times = [float(row[name]) for name in columns if name.endswith(("_ms", "_us"))]
            if not all(0 <= time < math.inf for time in times) or max(times) == 0:
                raise ValueError(f"line {number} has no time above 0")
            wrong = [name for name in _SIZES if name in columns and not (row[name].isdecimal() and int(row[name]) > 0)]
            if wrong:
                raise ValueError(f"line {number}: {wrong[0]} is {row[wrong[0]]!r}, not a whole number above 0")
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"--operators {users_file}: {why_unreadable(error)}; expected the columns {', '.join(columns)}"
        ) from error
    devices = {row.get("device") for row in given}
    return [row for row in rows if row.get("device") not in devices] + given


def operator_tables(folder: str | Path | None = None) -> OperatorTables:
    """The bundled tables, or with a user's folder over them.

    Raises:
        UserError: it is no folder, or holds none of the tables.
    """
    if folder is None:
        return BUNDLED
    path = Path(os.path.expanduser(folder))
    names = (*TABLES, SPREAD)
    if not any((path / f"{name}.csv").exists() for name in names):
        raise UserError(
            f"--operators {folder}: no table there; expected a folder with one of {', '.join(f'{t}.csv' for t in names)}"
        )
    tables = OperatorTables(path)
    for table in names:
        tables._rows(table)
    return tables


BUNDLED = OperatorTables()
