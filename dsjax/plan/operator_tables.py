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
GEMM, PREFILL, DECODE = "gemm", "mla_context", "mla_generation"
WIDE, FUSED, LOW_LATENCY, NORMAL = "experts_wide_ep", "experts_fused", "deepep_low_latency", "deepep_normal_h200"
SPREAD = "experts_spread"
"""Whole experts spread over an EP group, as an engine without DeepEP computes them: the bundled table has no rows."""
TABLES = (GEMM, PREFILL, DECODE, WIDE, FUSED, LOW_LATENCY, NORMAL, SPREAD)
NORMAL_DEVICE = "h200"
"""The device that DeepEP's normal kernels were timed on."""
_BUNDLED = Path(str(importlib.resources.files("configs"))) / "operators"
_SIZES = (
    "m", "n", "k", "num_heads", "batch_size", "isl", "context", "num_tokens", "num_token", "num_experts", "moe_tp_size", "moe_ep_size",
    "node_num", "dispatch_sms", "combine_sms",
)  # fmt: skip
"""Columns of all tables with sizes of an operation: whole numbers of at least 1."""
_UNITS = {"ms": 1e-3, "us": 1e-6}
"""Suffix of a time column → its unit in seconds."""
PROMPTS = (1, 2, 4, 8)
"""Numbers of prompts in a step for which `OperatorTables.prefill_attention` has seconds."""


class Grouped(NamedTuple):
    """Seconds of a rank's routed experts in a prefill step: the sum of those per row, token and slot and of the step, but at least `least`.
    Fitted by least squares of relative errors (mean: `error`) to the table's evenly routed points."""

    row: float
    token: float
    slot: float
    fixed: float
    least: float
    error: float


def kept(store: str) -> Callable[[Callable], Callable]:
    """Cache a method's results in its object's dict `store`, by the arguments, which must be positional."""

    def decorate(method: Callable) -> Callable:
        @functools.wraps(method)
        def once(self, *args):
            results, key = getattr(self, store), (method.__name__, *args)
            if key not in results:
                results[key] = method(self, *args)
            return results[key]

        return once

    return decorate


@dataclass(frozen=True, eq=False)
class OperatorTables:
    """All tables. Lookups are None for a device without such rows."""

    folder: Path | None = None  # a user's, laid over the bundled ones
    left_out: frozenset[str] = frozenset()  # names of ignored tables
    own_hardware: tuple[Hardware, ...] = ()  # the user's devices that tables name, besides the bundled ones
    _found: dict = field(default_factory=dict, repr=False)

    @kept("_found")
    def without(self, name: str) -> OperatorTables:
        """Return the tables without one, for what the planner would predict without it."""
        return dataclasses.replace(self, left_out=self.left_out | {name}, _found={})

    @kept("_found")
    def of_version(self, name: str) -> OperatorTables:
        """Return the bundled tables, except those left out, overlaid with those of another version such as `sglang-0.5.9`."""
        return dataclasses.replace(self, folder=_BUNDLED / name, _found={})

    def device(self, key: str) -> Hardware:
        """Return a device that tables name, as described in its file."""
        return next((device for device in self.own_hardware if device.key == key), None) or bundled_device(key)

    @functools.cached_property
    def devices(self) -> set[str]:
        """Devices that a table names."""
        return {device for name in TABLES if name != NORMAL for (device,) in self._rows(name, "device")}

    @kept("_found")
    def _table(self, name: str) -> dict[str, np.ndarray]:
        return _read(self.folder, name)

    def _rows(self, table: str, *columns: str, **wanted: object) -> list[tuple]:
        """Return these columns (sizes as int, times in seconds) of a table's rows that have the `wanted` values."""
        if table in self.left_out:
            return []
        data = self._table(table)
        found = np.logical_and.reduce([data[name] == value for name, value in wanted.items()]) if wanted else ...
        return list(zip(*(data[column][found].tolist() for column in columns), strict=True))

    @kept("_found")
    def _products(self, device: str, dtype: str) -> dict[tuple[int, int], dict[int, float]]:
        times: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
        for n, k, rows, seconds in self._rows(GEMM, "n", "k", "m", "latency_ms", device=device, gemm_dtype=dtype):
            times[n, k][rows] = seconds
        return times

    @kept("_found")
    def product(self, device: str, dtype: str, n: int, k: int, without: tuple[int, int] | None = None) -> Curve | None:
        """Return the seconds of `[rows, k] × [k, n]` over rows; for an untimed shape, from the shares of the nearest timed ones."""
        shapes = {shape: times for shape, times in self._products(device, dtype).items() if shape != without}
        if not shapes:
            return None

        def best(rows: float, n: int = n, k: int = k) -> float:
            return product_work(rows, n, k, dtype).seconds(self.device(device), 1.0)

        near = nearness(n, k, shapes)
        points = []
        for rows in set.intersection(*(set(shapes[shape]) for shape in near)):
            share = sum(weight * best(rows, *shape) / shapes[shape][rows] for shape, weight in near.items())
            points.append((rows, best(rows) / share))
        return Curve(points, best)

    @kept("_found")
    def product_error(self, device: str, dtype: str) -> float:
        """Return the mean relative error for an untimed shape, by leaving out each timed one in turn; from 64 rows on."""
        errors = []
        for shape, times in self._products(device, dtype).items():
            guess = self.product(device, dtype, *shape, shape)
            errors += [abs(guess(rows) / time - 1) for rows, time in times.items() if guess and rows >= 64]
        return statistics.mean(errors) if errors else 0.0

    @kept("_found")
    def prefill_attention(self, device: str, cache: str, heads: int) -> dict[float, dict[int, float]] | None:
        """Return the seconds by prompt length and number of `PROMPTS` in a step; with more prompts, each never takes longer."""
        rows = self._rows(PREFILL, "num_heads", "isl", "batch_size", "latency_ms", device=device, kv_cache_dtype=cache)
        each: dict[float, dict[int, float]] = defaultdict(dict)
        for length, prompts, seconds in _of_heads(rows, heads):
            each[length][prompts] = seconds / prompts
        # A length that was timed with few prompts takes as long for each prompt with more.
        return {
            length: {wanted: wanted * min(t for n, t in times.items() if n <= wanted) for wanted in PROMPTS}
            for length, times in each.items()
        }

    @kept("_found")
    def decode_attention(self, device: str, cache: str, heads: int) -> tuple[dict[float, Curve], float] | None:
        """Return (rows → seconds over cached positions of each, the relative spread between engines)."""
        columns = ("num_heads", "batch_size", "context", "latency_ms", "software")
        rows = self._rows(DECODE, *columns, device=device, kv_cache_dtype=cache)
        # SGLang's FP8 cache on Hopper is converted before use, 10 times slower; an engine would not choose it.
        rows = [times for *times, software in rows if cache == "bfloat16" or software.startswith("TensorRT-LLM")]
        engines: dict[tuple[float, float], list[float]] = defaultdict(list)
        for batch, context, seconds in _of_heads(rows, heads):
            engines[batch, context].append(seconds)
        curves: dict[float, list[tuple[float, float]]] = defaultdict(list)
        for (batch, context), times in engines.items():
            curves[batch].append((context, statistics.mean(times)))
        both = [max(times) / min(times) - 1 for times in engines.values() if len(times) > 1]
        found = {batch: Curve(points, float) for batch, points in curves.items()}
        return (found, statistics.mean(both) if both else 0.05) if found else None

    def _wide(self, device: str, phase: str) -> list[tuple[int, int, float]]:
        """Return (tokens of the whole group, its ranks, seconds of one rank) of each row."""
        columns = ("num_tokens", "moe_ep_size", "latency_ms")
        return self._rows(WIDE, *columns, device=device, phase=phase, distribution="uniform")

    @kept("_found")
    def grouped_decode(self, device: str) -> dict[float, Curve] | None:
        """Return number of a rank's experts with rows → seconds of its routed experts in decode over the rows of each."""
        table: dict[float, dict[float, float]] = defaultdict(dict)
        for tokens, ep, seconds in self._wide(device, "generation"):
            rows = 8 * tokens / ep
            used = min(256 / ep, rows)
            table[used][rows / used] = min(seconds, table[used].get(rows / used, math.inf))
        return {used: Curve(table[used].items(), float) for used in sorted(table)}

    @kept("_found")
    def grouped_prefill(self, device: str) -> Grouped | None:
        """Return the seconds of a rank's routed experts in prefill."""
        rows = self._wide(device, "context")
        # Below 0.8 ms, launches dominate.
        points = [(8 * tokens / ep, tokens, 256 / ep, 1.0, seconds) for tokens, ep, seconds in rows if seconds > 0.8e-3]
        if not points:
            return None
        work, time = np.array(points)[:, :4], np.array(points)[:, 4]
        terms = np.linalg.lstsq(work / time[:, None], np.ones_like(time), rcond=None)[0]
        error = float(np.mean(np.abs(work @ terms / time - 1)))
        return Grouped(*np.maximum(terms, 0.0).tolist(), min(row[-1] for row in rows), error)

    @kept("_found")
    def experts(self, device: str, dtype: str, ep: int, tp: int | None = None) -> tuple[Curve, bool] | None:
        """Return (seconds of a rank's experts over all tokens of its group, whether they were routed evenly).

        With `tp`: the fused kernel, experts `tp` times narrower and spread over `ep`. Without: whole experts spread over a group. Times of
        power-law routing are of the rank with most rows, and are used only if there are no even ones. dtype: one of `TABLED`.
        """
        wanted = {"device": device, "moe_dtype": dtype, "moe_ep_size": ep} | ({"moe_tp_size": tp} if tp else {})
        rows = self._rows(FUSED if tp else SPREAD, "distribution", "num_tokens", "latency_ms", **wanted)
        even = any(distribution == "balanced" for distribution, *_ in rows)
        points = [point for distribution, *point in rows if (distribution == "balanced") == even]
        return (Curve(points), even) if points else None

    @kept("_found")
    def deepep(self, device: str, combine: bool, low_latency: bool) -> Curve | None:
        """Return the seconds of a dispatch or combine within one host over tokens of a rank, of the newer software; normal kernels use 24
        multiprocessors of an H200."""
        way = "combine" if combine else "dispatch"
        if low_latency:
            wanted = {"device": device, "node_num": 1, "num_experts": 256, "sglang": "0.5.12"}
            points = self._rows(LOW_LATENCY, "num_token", f"{way}_avg_t_us", **wanted)
        else:
            wanted = {"num_experts": 256, "dispatch_sms": 24, "combine_sms": 24}
            points = self._rows(NORMAL, "num_token", f"{way}_transmit_us", **wanted)
        return Curve(points) if points else None


def _of_heads(rows: Sequence[Sequence[float]], heads: int) -> list[tuple[float, ...]]:
    """Return (sizes, seconds) of the least timed number of heads that is at least `heads`, or else of the largest, scaled by heads."""
    known = {row[0] for row in rows}
    at = min((one for one in known if one >= heads), default=max(known, default=heads))
    return [(*sizes, seconds * max(1.0, heads / at)) for timed, *sizes, seconds in rows if timed == at]


def _read(folder: Path | None, table: str) -> dict[str, np.ndarray]:
    """Return the columns of a bundled table; a user's rows replace those of the same devices (all, if the table names no devices)."""
    columns, *rows = csv.reader((_BUNDLED / f"{table}.csv").read_text(encoding="utf-8").splitlines())
    if folder is not None and (path := folder / f"{table}.csv").exists():
        given = _users_rows(path, columns)
        device = columns.index("device") if "device" in columns else None
        named = {row[device] for row in given} if device is not None else set()
        rows = [row for row in rows if device is not None and row[device] not in named] + given
    data = {}
    for name, column in zip(columns, np.array(rows, dtype=str).reshape(-1, len(columns)).T, strict=True):
        unit = _UNITS.get(name.rpartition("_")[2])
        data[name] = column.astype(float) * unit if unit else column.astype(int) if name in _SIZES else column
    return data


def _users_rows(path: Path, columns: Sequence[str]) -> list[list[str]]:
    """Return the rows of a user's file, in the order of the bundled table's columns."""
    try:
        given = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
        missing = [name for name in columns if not given or given[0].get(name) is None]
        if missing:
            raise ValueError(f"column {', '.join(missing)} is missing")
        for number, row in enumerate(given, start=2):
            empty = [name for name in columns if not row[name]]
            if empty:
                raise ValueError(f"line {number} has no {', '.join(empty)}")
            times = [float(row[name]) for name in columns if name.rpartition("_")[2] in _UNITS]
            if not all(0 <= time < math.inf for time in times) or max(times) == 0:
                raise ValueError(f"line {number} has no time above 0")
            wrong = [name for name in _SIZES if name in columns and not (row[name].isdecimal() and int(row[name]) > 0)]
            if wrong:
                raise ValueError(f"line {number}: {wrong[0]} is {row[wrong[0]]!r}, not a whole number above 0")
    except (OSError, ValueError) as error:
        wanted = f"expected the columns {', '.join(columns)}"
        raise UserError(f"--operators {path}: {why_unreadable(error)}; {wanted}") from error
    return [[row[name] for name in columns] for row in given]


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
