"""`Measured` and `MeasuredNetwork`: files of `dsjax bench modules` and of `dsjax bench network`, interpolated between the sizes timed."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dsjax.config import ModelConfig
from dsjax.errors import UserError, why_unreadable
from dsjax.hardware import Hardware
from dsjax.plan.curves import Curve
from dsjax.plan.figure import Figure, Kind, drawn

FORMAT = "dsjax modules 1"
_WIDTHS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group",
    "topk_group",
)  # fmt: skip
_SECONDS = ("median_s", "low_s", "high_s")
_FIELDS = {"date": str, "device": dict, "rows": list}
"""What every file of measurements has."""


def widths(config: ModelConfig) -> dict[str, int | None]:
    """The numbers of a configuration that a module's time depends on. Layers are not among them: they are counted, not timed."""
    return {name: getattr(config, name) for name in _WIDTHS}


class TimedSize(NamedTuple):
    """One timed size: seconds of one application (middle, low, high) and what a call costs once."""

    at: float
    seconds: np.ndarray
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

    def rows(self, module: str, variant: str = "", **sizes: float | str) -> list[Mapping[str, Any]]:
        """Rows of a module whose sizes have these values."""
        rows = (row for row in self.body["rows"] if (row["module"], row["variant"]) == (module, variant))
        return [row for row in rows if sizes.items() <= row["sizes"].items()]

    def seconds(
        self,
        module: str,
        tokens: float,
        *,
        variant: str = "",
        times: int = 1,
        places: int = 1,
        scale: Callable[[float], float] = float,
        **sizes: float | str,
    ) -> float | None:
        """Seconds of `times` applications in one call, interpolated in tokens; None where the file has no such rows.

        places: how often the module stands in the program, each of which costs `once`. scale: what of the tokens to interpolate
        in, growing with them, if not the tokens themselves.
        """
        points = _points(self.rows(module, variant, **sizes), lambda row: scale(row["tokens"]))
        return self._figure(module, points, scale(tokens), times, places)

    def attention(
        self, form: str, rows: float, chunk: float, cached: float, *, times: int, places: int, verify: bool = False
    ) -> float | None:
        """Seconds of attention for `rows` of `chunk` tokens behind `cached` positions: between contexts, then between rows.

        verify: decode rows with drafts; timed with that many drafts, or else as rows of a token each.
        The context is counted in the blocks that the model reads it in, of which it reads whole ones.
        """
        decode = verify or chunk == 1
        found = self.rows("attention", f"{form} verify", chunk=chunk) if verify else []
        if verify and not found:
            rows, chunk = rows * chunk, 1
        found = found or self.rows("attention", f"{form} {'decode' if decode else 'prefill'}")
        size, at = ("rows", rows) if decode else ("chunk", chunk)
        points, outside = [], False
        for number in sorted({row["sizes"][size] for row in found}):
            same = [row for row in found if row["sizes"][size] == number]
            contexts = _points(same, lambda s: _reach(s["context"] + s["chunk"], s["block"]))
            seconds, beyond = _at(contexts, _reach(cached + chunk, same[0]["sizes"]["block"]))
            points.append(TimedSize(number, seconds, contexts[0].once))
            outside |= beyond
        # Rows timed at different contexts are not compared: the common ones decide what lies between.
        return self._figure("attention", points, at, times, places, outside)

    def _figure(
        self, module: str, points: Sequence[TimedSize], at: float, times: int, places: int, outside: bool = False
    ) -> float | None:
        if not points:
            return None
        seconds, beyond = _at(points, at)
        # Setting up does not depend on the tokens, and is told apart best where there are few of them.
        ends = (seconds * times + points[0].once * places).tolist()
        name, kinds = f"{module}, measured", Kind.MEASURED
        if beyond or outside:
            name, kinds = f"{name}, and beyond what was timed", Kind.MEASURED | Kind.ASSUMPTION
        partial = ", interrupted" if self.body.get("partial") else ""
        source = f"{self.path}: {self.body['date']}, {self.device['name']}{partial}"
        return drawn(Figure(*ends, kinds, name=name, unit="s", source=source))


def _reach(positions: float, block: int) -> float:
    return math.ceil(positions / block) * block


def _points(rows: Sequence[Mapping[str, Any]], size: Callable[[Mapping[str, Any]], float]) -> list[TimedSize]:
    """Ascending; one for each size."""
    points = {size(row["sizes"]): (np.array([row[name] for name in _SECONDS]), row["once_s"]) for row in rows}
    return [TimedSize(at, *points[at]) for at in sorted(points)]


def _at(points: Sequence[TimedSize], x: float) -> tuple[np.ndarray, bool]:
    """(seconds at `x`: middle, low, high; whether it lies beyond the points).

    Between two points: halfway between the straight line, which is right where a constant and a part for each token add up, and
    the straight line of logarithms, right for powers; the interval has both. Below the first: between no less than it and in
    proportion. Above the last: along the last two, and at least half in proportion (two noisy points may even fall); from half
    of that growth to in proportion and a quarter more.
    """
    for point in points:
        if point.at == x:
            return point.seconds, False
    first, last = points[0], points[-1]
    if x < first.at:
        return first.seconds * ((1 + x / first.at) / 2, x / first.at, 1.0), True
    if x > last.at:
        value, low, high = last.seconds
        before = points[-2] if len(points) > 1 else TimedSize(0.0, np.zeros(3), 0.0)
        grown = max(value / last.at / 2, (value - before.seconds[0]) / (last.at - before.at)) * (x - last.at)
        value += grown
        return np.array([value, min(low + grown / 2, value), max(1.25 * high * x / last.at, value)]), True
    above = next(k for k, point in enumerate(points) if point.at > x)
    a, b = points[above - 1], points[above]
    share = (x - a.at) / (b.at - a.at)
    ways = np.array([(1 - share) * a.seconds + share * b.seconds] * 2)
    if a.at > 0:
        share = math.log(x / a.at) / math.log(b.at / a.at)
        ways[1] = a.seconds ** (1 - share) * b.seconds**share
    return np.array([ways[:, 0].mean(), ways.min(), ways.max()]), False


def opened(
    path: str | Path, flag: str, command: str, form: str, fields: Mapping[str, type], of_row: Mapping[str, type]
) -> dict[str, Any]:
    """The JSON object that `command --json` wrote, whose `format` is `form`; flag: the option that gave the file.

    Raises:
        UserError: it cannot be read, is of another kind, or lacks one of `_FIELDS` and `fields` or, in a row, of `of_row` or the times.
    """
    try:
        body = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = f"{why_unreadable(error)}; expected a file that {command} --json wrote"
        raise UserError(f"{flag} {path}: {why}") from error
    given = body.get("format") if isinstance(body, dict) else type(body).__name__
    if not isinstance(body, dict) or given != form:
        raise UserError(f"{flag} {path}: its format is {given!r}, expected {form!r}, of {command} --json")

    def is_row(row: Any) -> bool:
        kinds = {**of_row, **dict.fromkeys(_SECONDS, int | float)}
        whole = isinstance(row, dict) and all(isinstance(row.get(name), kind) for name, kind in kinds.items())
        return whole and 0 < row["low_s"] <= row["median_s"] <= row["high_s"] and row.get("ranks", 1) >= 1

    fields = {**_FIELDS, **fields}
    wrong = [f"no {name}" for name in fields if name not in body]
    wrong = wrong or [f"{name} is {body[name]!r}" for name, kind in fields.items() if not isinstance(body[name], kind)]
    wrong = wrong or [f"row {number} is incomplete" for number, row in enumerate(body["rows"]) if not is_row(row)]
    if wrong or not body["rows"]:
        what = wrong[0] if wrong else "it has no rows"
        raise UserError(f"{flag} {path}: {what}; write it anew with {command} --json")
    return body


def read_measured(path: str | Path, config: ModelConfig) -> Measured:
    """A file of `dsjax bench modules --json`.

    Raises:
        UserError: it cannot be read, is of another kind, or was taken at another model's widths.
    """
    fields = {"model": str, "widths": dict, "weights": str, "dtype": str, "kv_cache_dtype": str, "ceilings": dict}
    of_row = {"module": str, "variant": str, "sizes": dict, "once_s": int | float}
    body = opened(path, "--measured", "dsjax bench modules", FORMAT, fields, of_row)
    there = body["widths"]
    named = [f"{n} {there.get(n)} (here {here})" for n, here in widths(config).items() if there.get(n) != here]
    if named:
        why = f"taken at the widths of {body['model']}: {', '.join(named)}; give a file of this model's widths"
        raise UserError(f"--measured {path}: {why}")
    return Measured(str(path), body)


NETWORK_FORMAT = "dsjax network 1"
COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "ragged_all_to_all", "all_reduce")
"""All that a step's program sends, by `jax.lax`'s names (`psum_scatter` is a reduce-scatter, `psum` an all-reduce)."""
SEND_RECEIVE = "send_receive"
"""A message from one device to another, which no step sends; `dsjax bench network` times it beside the collectives."""


class CollectiveCurves(NamedTuple):
    """One collective over groups of `ranks` devices: seconds (middle, low, high) over the bytes that leave a device."""

    ranks: int
    ends: Sequence[Curve]


@dataclass(frozen=True, eq=False)
class MeasuredNetwork:
    """The rows of a file as curves, for a planner's `Cluster.measured`.

    curves: (collective, whether its groups span hosts) → curves for each number of ranks. inside_host, between_hosts, latency: how many
    times as much of a link's bandwidth, or as short a latency, is asked about than was measured (a planner's sweep).
    """

    path: str
    body: Mapping[str, Any]
    curves: Mapping[tuple[str, bool], Sequence[CollectiveCurves]]
    inside_host: float = 1.0
    between_hosts: float = 1.0
    latency: float = 1.0

    def scaled(self, resource: str, factor: float) -> MeasuredNetwork:
        """As it would be with `factor` times as much of one of the planner's resources."""
        name = {"scale-up": "inside_host", "network": "between_hosts", "latency": "latency"}.get(resource)
        return dataclasses.replace(self, **{name: getattr(self, name) * factor}) if name else self

    def seconds(self, collective: str, between_hosts: bool, ranks: int, sent: float) -> float | None:
        """One collective in which a device sends so many bytes; None where the file has none like it.

        Of groups of another size than was timed, the nearest size tells, and the interval reaches to time in proportion to the ranks.
        An exchange of several messages of other sizes (`ragged`) is told by `all_to_all` where it was not timed itself.
        """
        if collective == "ragged_all_to_all" and (collective, between_hosts) not in self.curves:
            collective = "all_to_all"
        if (collective, between_hosts) not in self.curves:
            return None
        timed, curves = min(
            self.curves[collective, between_hosts], key=lambda found: abs(math.log(found.ranks / ranks))
        )
        wire, latency = (self.between_hosts, self.latency) if between_hosts else (self.inside_host, 1.0)
        ends = []
        for curve in curves:
            whole = curve(sent)
            fixed = min(curves[0].seconds[0], whole)
            ends.append(fixed / latency + (whole - fixed) / wire)
        value, low, high = ends
        low, high = low * min(1.0, ranks / timed), high * max(1.0, ranks / timed)
        told = timed == ranks and sent <= curves[0].sizes[-1] and wire == latency == 1.0
        kinds = Kind.MEASURED if told else Kind.MEASURED | Kind.ASSUMPTION
        name = f"{collective} {'between hosts' if between_hosts else 'inside a host'}, measured"
        source = f"{self.path}: {self.body['date']}, {self.body['device']['name']}"
        return drawn(Figure(value, min(low, value), max(high, value), kinds, name=name, unit="s", source=source))


def read_network(path: str | Path, option: str = "--network") -> MeasuredNetwork:
    """A file of `dsjax bench network --json`, which was given with `option`.

    Raises:
        UserError: it cannot be read, is of another kind, lacks fields, or was a run whose data arrived wrong.
    """
    of_row = {"collective": str, "between_hosts": bool, "ranks": int, "sent_bytes": int | float}
    body = opened(path, option, "dsjax bench network", NETWORK_FORMAT, {}, of_row)
    rows = body["rows"]
    if any(row.get("correct") is False for row in rows):
        raise UserError(f"{option} {path}: data arrived wrong in that run (correct: false); repair the network first")
    timed: dict[tuple[str, bool], dict[int, dict[float, tuple[float, float, float]]]] = {}
    for row in rows:
        sizes = timed.setdefault((row["collective"], row["between_hosts"]), {}).setdefault(row["ranks"], {})
        times = (row["median_s"], row["low_s"], row["high_s"])
        # Two groups of as many ranks (every device of a host; one of each host in turn): the slower one is what a plan must bear.
        sizes[row["sent_bytes"]] = max(times, sizes.get(row["sent_bytes"], times))
    curves = {
        key: [
            CollectiveCurves(ranks, [Curve((size, times[end]) for size, times in sizes.items()) for end in range(3)])
            for ranks, sizes in sorted(of_ranks.items())
        ]
        for key, of_ranks in timed.items()
    }
    return MeasuredNetwork(str(path), body, curves)


def check_device(network: MeasuredNetwork, hardware: Hardware, cluster: str) -> None:
    """Make sure that a file speaks of a cluster's devices. Raises `UserError`: it was taken on others."""
    device = network.body["device"]
    if hardware.key != device.get("hardware") and hardware.name != device.get("name"):
        raise UserError(
            f"--network {network.path} was taken on {device.get('name')}, and {cluster} has {hardware.name}; measure on the "
            "cluster's devices, or leave --network out"
        )
