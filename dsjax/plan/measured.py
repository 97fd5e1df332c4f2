"""`Measured` and `MeasuredNetwork`: files of `dsjax bench modules` and `dsjax bench network`, interpolated between measured sizes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from dsjax.config import ModelConfig
from dsjax.errors import UserError
from dsjax.plan.curves import Curve
from dsjax.plan.figure import Figure, Kind, drawn
from dsjax.plan.files import read_json
from dsjax.toml_files import AboveZero, Count

FORMAT = "dsjax modules 1"
_WIDTHS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group",
    "topk_group", "head_dim", "o_groups", "o_lora_rank", "sliding_window", "hc_mult",
)  # fmt: skip


def widths(config: ModelConfig) -> dict[str, int | None]:
    """Return the config fields that a module's time depends on. The number of layers is not among them: times are per layer."""
    return {name: getattr(config, name, getattr(config.attention, name, None)) for name in _WIDTHS}


class _Times(msgspec.Struct, frozen=True):
    """Seconds of one application."""

    median_s: AboveZero
    low_s: AboveZero
    high_s: AboveZero

    def __post_init__(self):
        if not self.low_s <= self.median_s <= self.high_s:
            raise ValueError(
                f"median_s is {self.median_s:g}, not between low_s {self.low_s:g} and high_s {self.high_s:g}"
            )

    @property
    def ends(self) -> tuple[float, float, float]:
        """Median, low, high."""
        return self.median_s, self.low_s, self.high_s


class _Device(msgspec.Struct, frozen=True):
    name: str
    hardware: str | None = None
    platform: str = ""
    memory_bytes: int = 0
    count: int = 1


class _Ceilings(msgspec.Struct, frozen=True):
    bytes_per_s: AboveZero
    flops_per_s: AboveZero
    source: str


class ModuleTimes(_Times, frozen=True):
    """A row: one module at one size. once_s: overhead of a loop in seconds, besides its applications."""

    module: str
    variant: str
    sizes: dict[str, Any]
    once_s: float


class Measured(msgspec.Struct, frozen=True, eq=False):
    """A file of `dsjax bench modules`: its rows, and the device, model and formats that were measured."""

    format: Literal["dsjax modules 1"]
    date: str
    device: _Device
    ceilings: _Ceilings
    model: str
    widths: dict[str, int | None]
    weights: str
    dtype: str
    kv_cache_dtype: str
    rows: Annotated[list[ModuleTimes], msgspec.Meta(min_length=1)]
    partial: bool = False
    path: str = ""

    def of(self, module: str, variant: str = "", **sizes: float | str) -> list[ModuleTimes]:
        """Return the rows of a module with these sizes."""
        rows = (row for row in self.rows if (row.module, row.variant) == (module, variant))
        return [row for row in rows if sizes.items() <= row.sizes.items()]

    def seconds(
        self,
        module: str,
        tokens: float,
        *,
        variant: str = "",
        applications: int = 1,
        loops: int = 1,
        scale: Callable[[float], float] = float,
        **sizes: float | str,
    ) -> float | None:
        """Return the seconds of a module's applications in one program, interpolated in tokens; None if the file lacks the module.

        loops: loops of the program that apply the module; each costs `once_s`. scale: increasing function of the tokens; seconds are
        interpolated over its values.
        """
        rows = sorted(self.of(module, variant, **sizes), key=lambda row: row.sizes["tokens"])
        if not rows:
            return None
        seconds, beyond = _at({scale(row.sizes["tokens"]): row.ends for row in rows}, scale(tokens))
        return self._figure(module, seconds * applications + rows[0].once_s * loops, beyond)

    def attention(
        self,
        form: str,
        rows: float,
        chunk: float,
        cached: float,
        *,
        applications: int,
        loops: int,
        verify: bool = False,
    ) -> float | None:
        """Return the seconds of attention for `rows` of `chunk` tokens after `cached` positions, interpolated in contexts, then in rows.

        verify: decode rows with drafts; uses rows with the same number of drafts if the file has them, else rows of one token. Contexts
        are rounded up to whole blocks, as the model reads them. applications, loops: as in `seconds`.
        """
        is_decode = verify or chunk == 1
        found = self.of("attention", f"{form} verify", chunk=chunk) if verify else []
        if verify and not found:
            rows = rows * chunk
            chunk = 1
        found = found or self.of("attention", f"{form} {'decode' if is_decode else 'prefill'}")
        if not found:
            return None
        size, at = ("rows", rows) if is_decode else ("chunk", chunk)
        points = {}
        is_outside = False
        for number in sorted({row.sizes[size] for row in found}):
            same = [row for row in found if row.sizes[size] == number]
            contexts = {_reach(r.sizes["context"] + r.sizes["chunk"], r.sizes["block"]): r.ends for r in same}
            points[number], beyond = _at(contexts, _reach(cached + chunk, same[0].sizes["block"]))
            is_outside |= beyond
        seconds, beyond = _at(points, at)
        # The cost of a loop does not depend on the tokens, and is measured best with few of them.
        once = min(found, key=lambda row: (row.sizes[size], row.sizes["context"])).once_s
        return self._figure("attention", seconds * applications + once * loops, beyond or is_outside)

    def _figure(self, module: str, ends: np.ndarray, beyond: bool) -> float:
        name = f"{module}, measured"
        kinds = Kind.MEASURED
        if beyond:
            name = f"{name}, and beyond what was timed"
            kinds = Kind.MEASURED | Kind.ASSUMPTION
        source = f"{self.path}: {self.date}, {self.device.name}{', interrupted' * self.partial}"
        return drawn(Figure(*ends.tolist(), kinds, name=name, unit="s", source=source))


def _reach(positions: float, block: int) -> float:
    return math.ceil(positions / block) * block


def _at(points: Mapping[float, Sequence[float]], size: float) -> tuple[np.ndarray, bool]:
    """Return (seconds at a size: middle, low, high; whether the size is outside the points)."""
    ends = zip(*points.values(), strict=True)
    seconds = np.array([Curve(zip(points, end, strict=True))(size) for end in ends])
    return seconds, not min(points) <= size <= max(points)


def read_measured(path: str | Path, config: ModelConfig) -> Measured:
    """Read a file of `dsjax bench modules --json`.

    Raises:
        UserError: the file cannot be read, is of another kind, or was measured at another model's widths.
    """
    found = read_json("--measured", path, Measured, "dsjax bench modules --json")
    there = found.widths
    named = [f"{n} {there.get(n)} (here {here})" for n, here in widths(config).items() if there.get(n) != here]
    if named:
        why = f"taken at the widths of {found.model}: {', '.join(named)}; give a file of this model's widths"
        raise UserError(f"--measured {path}: {why}")
    return msgspec.structs.replace(found, path=str(path))


NETWORK_FORMAT = "dsjax network 1"
COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "ragged_all_to_all", "all_reduce")
"""Collectives of a step's program, by `jax.lax`'s names (`psum_scatter` is a reduce-scatter, `psum` an all-reduce)."""
SEND_RECEIVE = "send_receive"
"""A message from one device to another; `dsjax bench network` measures it too, but no step sends one."""


class CollectiveCurves(NamedTuple):
    """One collective over groups of `ranks` devices: seconds (middle, low, high) over the bytes that leave a device."""

    ranks: int
    ends: Sequence[Curve]


class _CollectiveTimes(_Times, frozen=True):
    collective: str
    between_hosts: bool
    ranks: Count
    sent_bytes: Annotated[float, msgspec.Meta(ge=0)]
    correct: bool | None = None


class _Network(msgspec.Struct, frozen=True):
    """A file of `dsjax bench network`."""

    format: Literal["dsjax network 1"]
    date: str
    device: _Device
    rows: Annotated[list[_CollectiveTimes], msgspec.Meta(min_length=1)]


@dataclass(frozen=True, eq=False)
class MeasuredNetwork:
    """Collective times of a file as curves, for `Cluster.measured`."""

    source: str  # the file, its date and device
    device: _Device
    # (collective, whether its groups span hosts) → curves for each number of ranks
    curves: Mapping[tuple[str, bool], Sequence[CollectiveCurves]]
    inside_host: float = 1.0  # factor on the measured bandwidth
    between_hosts: float = 1.0  # factor on the measured bandwidth
    latency: float = 1.0  # divisor of the measured latency (`Cluster.scaled`)

    def scaled(self, resource: str, factor: float) -> MeasuredNetwork:
        """Scale one of the planner's resources by a factor."""
        name = {"scale-up": "inside_host", "network": "between_hosts", "latency": "latency"}.get(resource)
        return dataclasses.replace(self, **{name: getattr(self, name) * factor}) if name else self

    def seconds(self, collective: str, between_hosts: bool, ranks: int, sent: float) -> float | None:
        """Return the seconds of one collective in which a device sends `sent` bytes; None if the file lacks the collective.

        An unmeasured group size takes the times of the nearest one, with an interval that includes times proportional to the ranks. An
        unmeasured `ragged_all_to_all` takes the times of `all_to_all`.
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
        return drawn(Figure(value, min(low, value), max(high, value), kinds, name=name, unit="s", source=self.source))


def read_network(path: str | Path) -> MeasuredNetwork:
    """Read a file of `dsjax bench network --json`, given with `--network`.

    Raises:
        UserError: the file cannot be read, is of another kind, lacks fields, or is from a run that received wrong data.
    """
    found = read_json("--network", path, _Network, "dsjax bench network --json")
    if any(row.correct is False for row in found.rows):
        raise UserError(f"--network {path}: data arrived wrong in that run (correct: false); repair the network first")
    timed: dict[tuple[str, bool], dict[int, dict[float, tuple[float, float, float]]]] = {}
    for row in found.rows:
        sizes = timed.setdefault((row.collective, row.between_hosts), {}).setdefault(row.ranks, {})
        # Two groups may have equally many ranks (all devices of a host, or one of each host): plan with the slower one.
        sizes[row.sent_bytes] = max(row.ends, sizes.get(row.sent_bytes, row.ends))
    curves = {
        key: [
            CollectiveCurves(ranks, [Curve((size, times[end]) for size, times in sizes.items()) for end in range(3)])
            for ranks, sizes in sorted(of_ranks.items())
        ]
        for key, of_ranks in timed.items()
    }
    return MeasuredNetwork(f"{path}: {found.date}, {found.device.name}", found.device, curves)
