"""`Measured`: a file of `dsjax bench modules`: seconds of the model's parts, interpolated between the sizes that were timed."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsjax.config import ModelConfig
from dsjax.errors import UserError, why_unreadable
from dsjax.plan.figure import Figure, Kind, drawn

FORMAT = "dsjax modules 1"
_WIDTHS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "moe_intermediate_size",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
)


def widths(config: ModelConfig) -> dict[str, int | None]:
    """The numbers of a configuration that a module's time hangs on. Layers are not among them: they are counted, not timed."""
    return {name: getattr(config, name) for name in _WIDTHS}


@dataclass(frozen=True)
class TimedSize:
    """One timed size: seconds of one application (middle, low, high) and what a call costs once."""

    at: float
    value: float
    low: float
    high: float
    once: float


@dataclass(frozen=True, eq=False)
class Measured:
    """The rows of a file, and what they were taken on."""

    path: str
    body: Mapping[str, Any]

    @property
    def device(self) -> Mapping[str, Any]:
        """`name`, `platform`, `memory_bytes`, `hardware`, `count`."""
        return self.body["device"]

    @property
    def source(self) -> str:
        """For derivations."""
        partial = ", interrupted" if self.body.get("partial") else ""
        return f"{self.path}: {self.body['date']}, {self.device['name']}{partial}"

    def rows(self, module: str, variant: str = "", **sizes: float | str) -> list[Mapping[str, Any]]:
        """Rows of a module whose sizes have these values."""
        return [
            row
            for row in self.body["rows"]
            if row["module"] == module
            and row["variant"] == variant
            and all(row["sizes"].get(name) == value for name, value in sizes.items())
        ]

    def seconds(
        self,
        module: str,
        tokens: float,
        *,
        variant: str = "",
        times: int = 1,
        places: int = 1,
        scale: Callable[[float], float] | None = None,
        **sizes: float | str,
    ) -> float | None:
        """Seconds of `times` applications in one call, interpolated in tokens; None where the file has no such rows.

        places: how often the module stands in the program, each of which costs `once`. scale: what of the tokens to interpolate
        in, growing with them, if not the tokens themselves.
        """
        points = _points(self.rows(module, variant, **sizes), "tokens")
        if scale is not None:
            points = [dataclasses.replace(point, at=scale(point.at)) for point in points]
        return self._figure(module, points, tokens if scale is None else scale(tokens), times, places)

    def attention(
        self, form: str, rows: float, chunk: float, cached: float, *, times: int, places: int, verify: bool = False
    ) -> float | None:
        """Seconds of attention for `rows` of `chunk` tokens behind `cached` positions: between contexts, then between rows.

        verify: decode rows with drafts; timed with that many drafts, or else as rows of a token each.
        The context is counted in the blocks that the model reads it in, of which it reads whole ones.
        """
        decode = verify or chunk == 1
        verified = self.rows("attention", f"{form} verify") if verify else []
        verified = [row for row in verified if row["sizes"]["chunk"] == chunk]
        if verify and not verified:
            rows, chunk = rows * chunk, 1
        verified = verified or self.rows("attention", f"{form} {'decode' if decode else 'prefill'}")
        size, at = ("rows", rows) if decode else ("chunk", chunk)
        points = []
        for number in sorted({row["sizes"][size] for row in verified}):
            same = [row for row in verified if row["sizes"][size] == number]
            by_reach = _points(same, lambda s: _reach(s["context"] + s["chunk"], s["block"]))
            points.append(_at(by_reach, _reach(cached + chunk, same[0]["sizes"]["block"]), number))
        # Rows timed at different contexts are not compared: the common ones decide what lies between.
        return self._figure("attention", [point for point, _ in points], at, times, places, any(f for _, f in points))

    def _figure(
        self, module: str, points: Sequence[TimedSize], tokens: float, times: int, places: int, outside: bool = False
    ) -> float | None:
        if not points:
            return None
        point, beyond = _at(points, tokens, tokens)
        # Setting up does not hang on the tokens, and is told apart best where there are few of them.
        once = min(points, key=lambda p: p.at).once * places
        ends = [end * times + once for end in (point.value, point.low, point.high)]
        kinds = Kind.MEASURED | Kind.ASSUMPTION if beyond or outside else Kind.MEASURED
        name = f"{module}, measured" + (", and beyond what was timed" if beyond or outside else "")
        return drawn(Figure(*ends, kinds, name=name, unit="s", source=self.source))


def _reach(positions: float, block: int) -> float:
    return math.ceil(positions / block) * block


def _points(rows: Sequence[Mapping[str, Any]], size: Any) -> list[TimedSize]:
    """Ascending; one for each size."""
    read = size if callable(size) else (lambda sizes: sizes[size])
    points = {
        read(row["sizes"]): TimedSize(read(row["sizes"]), row["median_s"], row["low_s"], row["high_s"], row["once_s"])
        for row in rows
    }
    return [points[at] for at in sorted(points)]


def _at(points: Sequence[TimedSize], x: float, name: float) -> tuple[TimedSize, bool]:
    """(the point at `x`, called `name`; whether it lies beyond the points).

    Between two points: halfway between the straight line, which is right where a constant and a part for each token add up, and
    the straight line of logarithms, right for powers; the interval has both. Below the first: between no less than it and in
    proportion. Above the last: along the last two, and at least half in proportion (two noisy points may even fall); from half
    of that growth to in proportion and a quarter more.
    """
    first, last = points[0], points[-1]
    once = first.once
    if x < first.at:
        share = x / first.at if first.at else 1.0
        return TimedSize(name, first.value * (1 + share) / 2, first.low * share, first.high, once), True
    if x > last.at:
        ratio = x / last.at if last.at else 1.0
        before = points[-2] if len(points) > 1 else TimedSize(0.0, 0.0, 0.0, 0.0, 0.0)
        slope = max(last.value / last.at / 2, (last.value - before.value) / (last.at - before.at)) if last.at else 0.0
        value = last.value + slope * (x - last.at)
        low = min(last.low + slope * (x - last.at) / 2, value)
        return TimedSize(name, value, low, max(1.25 * last.high * ratio, value), once), True
    for a, b in itertools.pairwise(points):
        if a.at < x < b.at:
            straight = _mix(a, b, (x - a.at) / (b.at - a.at))
            powers = _mix(a, b, math.log(x / a.at) / math.log(b.at / a.at), logarithms=True) if a.at > 0 else straight
            ends = [*straight, *powers]
            return TimedSize(name, (straight[0] + powers[0]) / 2, min(ends), max(ends), once), False
    exact = next(point for point in points if point.at == x)
    return TimedSize(name, exact.value, exact.low, exact.high, once), False


def _mix(a: TimedSize, b: TimedSize, share: float, logarithms: bool = False) -> tuple[float, float, float]:
    """(value, low, high) at a share of the way."""
    pairs = ((a.value, b.value), (a.low, b.low), (a.high, b.high))
    if logarithms:
        return tuple(math.exp((1 - share) * math.log(p) + share * math.log(q)) for p, q in pairs)
    return tuple((1 - share) * p + share * q for p, q in pairs)


def opened(path: str | Path, flag: str, command: str, form: str) -> dict[str, Any]:
    """The JSON object that `command --json` wrote, whose `format` is `form`; flag: the option that gave the file.

    Raises:
        UserError: it cannot be read, or is of another kind.
    """
    try:
        body = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{flag} {path}: {why_unreadable(error)}; expected a file that {command} --json wrote"
        ) from error
    if not isinstance(body, dict) or body.get("format") != form:
        given_format = body.get("format") if isinstance(body, dict) else type(body).__name__
        raise UserError(f"{flag} {path}: its format is {given_format!r}, expected {form!r}, of {command} --json")
    return body


def read_measured(path: str | Path, config: ModelConfig) -> Measured:
    """A file of `dsjax bench modules --json`.

    Raises:
        UserError: it cannot be read, is of another kind, or was taken at another model's widths.
    """
    body = opened(path, "--measured", "dsjax bench modules", FORMAT)
    _check_rows(path, body)
    different = {
        name: (value, body["widths"].get(name))
        for name, value in widths(config).items()
        if body["widths"].get(name) != value
    }
    if different:
        named = ", ".join(f"{name} {there} (here {here})" for name, (here, there) in different.items())
        raise UserError(
            f"--measured {path}: taken at the widths of {body['model']}: {named}; give a file of this model's widths"
        )
    return Measured(str(path), body)


def _check_rows(path: str | Path, body: Mapping[str, Any]) -> None:
    needed = {"date", "device", "model", "widths", "weights", "dtype", "kv_cache_dtype", "rows", "ceilings"}
    missing = sorted(needed - body.keys())
    kinds = {"device": dict, "widths": dict, "ceilings": dict, "rows": list}
    wrong = [name for name, kind in kinds.items() if not isinstance(body.get(name, kind()), kind)]
    rows = [] if "rows" in wrong else body.get("rows", [])
    bad = [number for number, row in enumerate(rows) if not _is_row(row)]
    if missing or wrong or bad:
        fields = ", ".join(sorted({*_ROW, "sizes"}))
        what = (
            f"no {', '.join(missing)}"
            if missing
            else f"{wrong[0]} is {body[wrong[0]]!r}"
            if wrong
            else f"row {bad[0]} has not all of {fields}"
        )
        raise UserError(f"--measured {path}: {what}; write it anew with dsjax bench modules --json")


_ROW = {
    "module": str,
    "variant": str,
    "median_s": int | float,
    "low_s": int | float,
    "high_s": int | float,
    "once_s": int | float,
}


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("sizes"), dict):
        return False
    return all(isinstance(row.get(name), kind) for name, kind in _ROW.items()) and row["median_s"] > 0
