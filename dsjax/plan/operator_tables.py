"""`OperatorTables`: measured seconds of single operations by device, interpolated between the sizes that were timed.

The bundled tables are `configs/operators` (their sources are in `SOURCES.md` there); a user's folder with files of the same names
and columns replaces the rows of the devices that it names. Every lookup is monotone (`curves.py`).
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import importlib.resources
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dsjax.errors import UserError, why_unreadable
from dsjax.hardware import Hardware
from dsjax.plan.curves import Curve
from dsjax.plan.operations import bundled_device, nearness, product_work

AICONFIGURATOR = "operator tables of aiconfigurator, configs/operators/SOURCES.md"
GEMM = "gemm"
PREFILL, DECODE = "mla_context", "mla_generation"
LOW_LATENCY, NORMAL = "deepep_low_latency", "deepep_normal_h200"
WIDE_EP, FUSED = "experts_wide_ep", "experts_fused"
SPREAD = "experts_spread"
"""Whole experts spread over an EP group, as an engine without DeepEP computes them: the bundled table has no rows."""
TABLES = (GEMM, PREFILL, DECODE, WIDE_EP, FUSED, LOW_LATENCY, NORMAL, SPREAD)
NORMAL_DEVICE = "h200"
"""The device that DeepEP's normal kernels were timed on."""
BUNDLED_FOLDER = Path(str(importlib.resources.files("configs"))) / "operators"
"""The bundled tables, and one folder for each other version of an engine, such as `sglang-0.5.9`."""
_SIZES = (
    "m", "n", "k", "num_heads", "batch_size", "isl", "context", "num_tokens", "num_token", "num_experts", "moe_tp_size", "moe_ep_size",
    "node_num", "dispatch_sms", "combine_sms",
)  # fmt: skip
"""Columns of all tables with sizes of an operation: whole numbers of at least 1."""
_UNITS = {"ms": 1e-3, "us": 1e-6}
"""Suffix of a time column → its unit in seconds."""
PROMPTS = (1, 2, 4, 8)
"""Numbers of prompts in a step for which `OperatorTables.prefill_attention` has seconds."""


class PrefillExperts(NamedTuple):
    """Seconds of a rank's routed experts in a prefill step: the sum of the first four terms, but at least `least`.

    Fitted by least squares of relative errors to the table's evenly routed points.
    """

    row: float  # per row of the rank
    token: float  # per token of the group
    slot: float  # per expert of the rank
    fixed: float  # per step
    least: float
    error: float  # mean relative error of the fit


def cached_in(name: str) -> Callable[[Callable], Callable]:
    """Cache a method's results in its object's dict `name`, by the arguments, which must be positional."""

    def decorate(method: Callable) -> Callable:
        @functools.wraps(method)
        def cached(self, *args):
            cache = getattr(self, name)
            key = (method.__name__, *args)
            if key not in cache:
                cache[key] = method(self, *args)
            return cache[key]

        return cached

    return decorate


@dataclass(frozen=True, eq=False)
class OperatorTables:
    """All tables. Lookups are None for a device without such rows."""

    folder: Path | None = None  # a user's, laid over the bundled ones
    left_out: frozenset[str] = frozenset()  # names of ignored tables
    own_hardware: tuple[Hardware, ...] = ()  # the user's devices that tables name, besides the bundled ones
    _cache: dict = field(default_factory=dict, repr=False)

    @cached_in("_cache")
    def without(self, name: str) -> OperatorTables:
        """Return the tables without one, for what the planner would predict without it."""
        return dataclasses.replace(self, left_out=self.left_out | {name}, _cache={})

    def device(self, key: str) -> Hardware:
        """Return a device that tables name, as described in its file."""
        return next((device for device in self.own_hardware if device.key == key), None) or bundled_device(key)

    @functools.cached_property
    def devices(self) -> set[str]:
        """Devices that a table names."""
        return {device for name in TABLES if name != NORMAL for (device,) in self._rows(name, "device")}

    @cached_in("_cache")
    def _table(self, name: str) -> dict[str, np.ndarray]:
        return _read(self.folder, name)

    def _rows(self, table: str, *columns: str, **conditions: object) -> list[tuple]:
        """Return these columns (sizes as int, times in seconds) of a table's rows that have the values of `conditions`."""
        if table in self.left_out:
            return []
        data = self._table(table)
        matches = np.ones(len(data[columns[0]]), bool)
        for name, value in conditions.items():
            matches &= data[name] == value
        return list(zip(*(data[column][matches].tolist() for column in columns), strict=True))

    @cached_in("_cache")
    def _products(self, device: str, dtype: str) -> dict[tuple[int, int], dict[int, float]]:
        times: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
        for n, k, rows, seconds in self._rows(GEMM, "n", "k", "m", "latency_ms", device=device, gemm_dtype=dtype):
            times[n, k][rows] = seconds
        return times

    @cached_in("_cache")
    def product(self, device: str, dtype: str, n: int, k: int, without: tuple[int, int] | None = None) -> Curve | None:
        """Return the seconds of `[rows, k] × [k, n]` over rows; for an untimed shape, from the efficiency of the nearest timed ones."""
        shapes = {shape: times for shape, times in self._products(device, dtype).items() if shape != without}
        if not shapes:
            return None

        def roofline(rows: float, n: int = n, k: int = k) -> float:
            return product_work(rows, n, k, dtype).seconds(self.device(device), 1.0)

        weights = nearness(n, k, shapes)
        points = []
        for rows in set.intersection(*(set(shapes[shape]) for shape in weights)):
            efficiency = sum(weight * roofline(rows, *shape) / shapes[shape][rows] for shape, weight in weights.items())
            points.append((rows, roofline(rows) / efficiency))
        return Curve(points, roofline)

    @cached_in("_cache")
    def product_error(self, device: str, dtype: str) -> float:
        """Return the mean relative error for an untimed shape, by leaving out each timed one in turn; from 64 rows on."""
        errors = []
        for shape, times in self._products(device, dtype).items():
            if predict := self.product(device, dtype, *shape, shape):
                errors += [abs(predict(rows) / time - 1) for rows, time in times.items() if rows >= 64]
        return statistics.mean(errors) if errors else 0.0

    @cached_in("_cache")
    def prefill_attention(self, device: str, cache: str, heads: int) -> dict[float, dict[int, float]] | None:
        """Return the seconds by prompt length and number of `PROMPTS` in a step; with more prompts, each never takes longer."""
        rows = self._rows(PREFILL, "num_heads", "isl", "batch_size", "latency_ms", device=device, kv_cache_dtype=cache)
        times_by_length: dict[float, dict[int, float]] = defaultdict(dict)
        for length, prompts, seconds in _scaled_to_heads(rows, heads):
            times_by_length[length][prompts] = seconds / prompts
        # A length that was timed with few prompts takes as long for each prompt with more.
        return {
            length: {prompts: prompts * min(t for n, t in times.items() if n <= prompts) for prompts in PROMPTS}
            for length, times in times_by_length.items()
        }

    @cached_in("_cache")
    def decode_attention(self, device: str, cache: str, heads: int) -> tuple[dict[float, Curve], float] | None:
        """Return (number of rows → seconds over the context of each, relative spread between engines)."""
        columns = ("num_heads", "batch_size", "context", "latency_ms", "software")
        rows = self._rows(DECODE, *columns, device=device, kv_cache_dtype=cache)
        # SGLang's FP8 cache on Hopper is converted before use, 10 times slower; an engine would not choose it.
        rows = [times for *times, software in rows if cache == "bfloat16" or software.startswith("TensorRT-LLM")]
        engines: dict[tuple[float, float], list[float]] = defaultdict(list)  # seconds of each engine
        for batch, context, seconds in _scaled_to_heads(rows, heads):
            engines[batch, context].append(seconds)
        if not engines:
            return None
        points: dict[float, list[tuple[float, float]]] = defaultdict(list)
        for (batch, context), times in engines.items():
            points[batch].append((context, statistics.mean(times)))
        spreads = [max(times) / min(times) - 1 for times in engines.values() if len(times) > 1]
        curves = {batch: Curve(batch_points, float) for batch, batch_points in points.items()}
        return curves, statistics.mean(spreads) if spreads else 0.05

    def _wide_ep(self, device: str, phase: str) -> list[tuple[int, int, float]]:
        """Return (tokens of the whole group, its ranks, seconds of one rank) of each row."""
        columns = ("num_tokens", "moe_ep_size", "latency_ms")
        return self._rows(WIDE_EP, *columns, device=device, phase=phase, distribution="uniform")

    @cached_in("_cache")
    def grouped_decode(self, device: str) -> dict[float, Curve] | None:
        """Return number of a rank's experts with rows → seconds of its routed experts in decode over the rows of each."""
        points: dict[float, dict[float, float]] = defaultdict(dict)
        for tokens, ep, seconds in self._wide_ep(device, "generation"):
            rows = 8 * tokens / ep
            used = min(256 / ep, rows)
            points[used][rows / used] = min(seconds, points[used].get(rows / used, math.inf))
        return {used: Curve(points[used].items(), float) for used in sorted(points)}

    @cached_in("_cache")
    def grouped_prefill(self, device: str) -> PrefillExperts | None:
        """Return the seconds of a rank's routed experts in prefill."""
        rows = self._wide_ep(device, "context")
        timed = [row for row in rows if row[-1] > 0.8e-3]  # below, launches dominate
        if not timed:
            return None
        sizes = np.array([(8 * tokens / ep, tokens, 256 / ep, 1.0) for tokens, ep, _ in timed])
        times = np.array([seconds for *_, seconds in timed])
        terms = np.linalg.lstsq(sizes / times[:, None], np.ones_like(times), rcond=None)[0]
        error = float(np.mean(np.abs(sizes @ terms / times - 1)))
        least = min(seconds for *_, seconds in rows)
        return PrefillExperts(*np.maximum(terms, 0.0).tolist(), least, error)

    @cached_in("_cache")
    def experts(self, device: str, dtype: str, ep: int, tp: int | None = None) -> tuple[Curve, bool] | None:
        """Return (seconds of a rank's experts over all tokens of its group, whether they were routed evenly).

        With `tp`: the fused kernel, experts `tp` times narrower and spread over `ep`. Without: whole experts spread over a group. Times of
        power-law routing are of the rank with most rows, and are used only if there are no even ones. dtype: one of `TABLE_FORMATS`.
        """
        conditions = {"device": device, "moe_dtype": dtype, "moe_ep_size": ep} | ({"moe_tp_size": tp} if tp else {})
        rows = self._rows(FUSED if tp else SPREAD, "distribution", "num_tokens", "latency_ms", **conditions)
        even = any(distribution == "balanced" for distribution, *_ in rows)
        points = [point for distribution, *point in rows if (distribution == "balanced") == even]
        return (Curve(points), even) if points else None

    @cached_in("_cache")
    def deepep(self, device: str, combine: bool, low_latency: bool) -> Curve | None:
        """Return the seconds of a dispatch or combine within one host over tokens of a rank, of the newer software; normal kernels use 24
        multiprocessors of an H200."""
        operation = "combine" if combine else "dispatch"
        if low_latency:
            conditions = {"device": device, "node_num": 1, "num_experts": 256, "sglang": "0.5.12"}
            points = self._rows(LOW_LATENCY, "num_token", f"{operation}_avg_t_us", **conditions)
        else:
            conditions = {"num_experts": 256, "dispatch_sms": 24, "combine_sms": 24}
            points = self._rows(NORMAL, "num_token", f"{operation}_transmit_us", **conditions)
        return Curve(points) if points else None


def _scaled_to_heads(rows: Sequence[Sequence[float]], heads: int) -> list[tuple[float, ...]]:
    """Return (sizes, seconds) of rows (heads, sizes, seconds) with the next timed number of heads, or with the largest, scaled up."""
    timed_heads = {row[0] for row in rows}
    nearest = min((timed for timed in timed_heads if timed >= heads), default=max(timed_heads, default=heads))
    return [(*sizes, seconds * max(1.0, heads / nearest)) for timed, *sizes, seconds in rows if timed == nearest]


def _read(folder: Path | None, table: str) -> dict[str, np.ndarray]:
    """Return the columns of a bundled table; a user's rows replace those of the same devices (all, if the table names no devices)."""
    columns, *rows = csv.reader((BUNDLED_FOLDER / f"{table}.csv").read_text(encoding="utf-8").splitlines())
    if folder is not None and (path := folder / f"{table}.csv").exists():
        users_rows = _users_rows(path, columns)
        if "device" in columns:
            device = columns.index("device")
            users_devices = {row[device] for row in users_rows}
            users_rows = [row for row in rows if row[device] not in users_devices] + users_rows
        rows = users_rows
    data = dict(zip(columns, np.array(rows, dtype=str).reshape(-1, len(columns)).T, strict=True))
    for name in columns:
        if unit := _UNITS.get(name.rpartition("_")[2]):
            data[name] = data[name].astype(float) * unit
        elif name in _SIZES:
            data[name] = data[name].astype(int)
    return data


def _users_rows(path: Path, columns: Sequence[str]) -> list[list[str]]:
    """Return the rows of a user's file, in the order of the bundled table's columns."""
    try:
        records = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
        missing = [name for name in columns if not records or records[0].get(name) is None]
        if missing:
            raise ValueError(f"column {', '.join(missing)} is missing")
        for number, row in enumerate(records, start=2):
            empty = [name for name in columns if not row[name]]
            if empty:
                raise ValueError(f"line {number} has no {', '.join(empty)}")
            times = [float(row[name]) for name in columns if name.rpartition("_")[2] in _UNITS]
            if not all(0 <= time < math.inf for time in times) or max(times) == 0:
                raise ValueError(f"line {number} has no time above 0")
            for name in _SIZES:
                if name in columns and not (row[name].isdecimal() and int(row[name]) > 0):
                    raise ValueError(f"line {number}: {name} is {row[name]!r}, not a whole number above 0")
    except (OSError, ValueError) as error:
        expected = f"expected the columns {', '.join(columns)}"
        raise UserError(f"--operators {path}: {why_unreadable(error)}; {expected}") from error
    return [[row[name] for name in columns] for row in records]


def operator_tables(folder: str | Path | None = None) -> OperatorTables:
    """Return the bundled tables, overlaid with a user's folder if given. Raises `UserError`: no folder, or no tables in it."""
    if folder is None:
        return BUNDLED
    tables = OperatorTables(Path(os.path.expanduser(folder)))
    if not any((tables.folder / f"{name}.csv").exists() for name in TABLES):
        names = ", ".join(f"{name}.csv" for name in TABLES)
        raise UserError(f"--operators {folder}: no table there; expected a folder with one of {names}")
    for name in TABLES:
        tables._table(name)
    return tables


BUNDLED = OperatorTables()
