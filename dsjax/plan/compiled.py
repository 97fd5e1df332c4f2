"""`DryRun`: what `dsjax dryrun --json` read from a compiled step."""

import datetime
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsjax.config import ModelConfig
from dsjax.errors import UserError, why_unreadable
from dsjax.plan.figure import Figure, Kind, drawn
from dsjax.plan.layout import InstanceLayout
from sharding.mesh import MeshSpec

_METHODS = {"ragged-all-to-all": "ragged", "all-to-all": "padded", "reduce-scatter": "gather"}
"""Kind of a collective to the dispatch that has it."""
_WHOLES = {"rows": "batch", "row_tokens": "chunk", "context": "context"}
_TEXTS = {name: name for name in ("target", "step", "weights", "kv_cache_dtype")}
_TEXTS |= {"form": "mla", "wire": "dispatch_wire"}
"""Fields of `DryRun` to those of the JSON."""


@dataclass(frozen=True)
class Sent:
    """A collective of the program: bytes that a device sends to the others each time, and how often a step has it."""

    kind: str
    ranks: int
    size: float  # all of them
    inside: float  # those that stay in the scale-up domain
    times: float
    dispatches: bool  # it belongs to the experts' dispatch or combine


@dataclass(frozen=True)
class DryRun:
    """One JSON of `dsjax dryrun`; all figures are one device's, in one run of the step.

    temporaries: bytes beside weights and cache: temporaries, outputs that are no cache, and code where it was read. halves: the step is
    computed in two halves that overlap, so that its collectives and operations are of half batches.
    """

    file: str
    provenance: str
    parameters: int
    weight_bytes: int
    mesh: MeshSpec
    physical_experts: int
    target: str
    step: str
    rows: int  # of a DP rank
    row_tokens: int  # tokens of a row
    context: int  # positions of a row's page table
    tokens: float  # of a device
    weights: str
    kv_cache_dtype: str
    form: str
    wire: str
    dispatch: str
    temporaries: int
    collectives: tuple[Sent, ...]
    flops: Mapping[str, float]  # dtype → operations of matrix products
    timeline: Figure | None = None  # its predicted seconds, where the file has them
    halves: bool = False

    @property
    def step_tokens(self) -> int:
        """Tokens of a DP rank in this step."""
        return self.rows * self.row_tokens

    @property
    def exchanges(self) -> tuple[Sent, ...]:
        """The dispatch's collectives, in the program's order: sizes or rows there, and last the way back."""
        return tuple(c for c in self.collectives if c.dispatches)

    @property
    def method(self) -> str | None:
        """Name of the dispatch that was compiled; None where experts are not spread."""
        if self.dispatch == "hierarchical":
            return self.dispatch
        kinds = {c.kind for c in self.exchanges}
        return next((method for kind, method in _METHODS.items() if kind in kinds), None)

    @property
    def shape(self) -> str:
        """`decode of 128 rows at context 4,096`."""
        rows = f"{self.rows} rows" if self.row_tokens == 1 else f"{self.rows} × {self.row_tokens} tokens"
        return f"{self.step} of {rows} at context {self.context:,}" + (", in two halves" if self.halves else "")

    def layout(self, config: ModelConfig) -> InstanceLayout:
        """One copy of the experts: what a plan prices."""
        return InstanceLayout(self.mesh, self.physical_experts - config.n_routed_experts).unit

    def figure(self, value: float, name: str, unit: str = "") -> float:
        """A number that was read from this program."""
        source = f"{self.provenance}: {self.shape}"
        return drawn(Figure(value, kinds=Kind.COMPILED, name=name, unit=unit, source=source))


def read_dry_run(path: str | Path) -> DryRun:
    """Read one file. Raises `UserError`: it cannot be read, or is not what `dsjax dryrun --json` writes."""
    path = Path(path)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        written = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC).date().isoformat()
        return _from_json(path, written, values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"no field {error}" if isinstance(error, KeyError) else why_unreadable(error)
        raise UserError(
            f"--compiled {path}: {reason}; expected a file that `dsjax dryrun --model … --mesh … --target … --json FILE` wrote"
        ) from error


def _from_json(path: Path, written: str, values: Mapping[str, Any]) -> DryRun:
    if "expert_mesh" in values:
        raise ValueError("it is of attention and experts apart, and a plan takes dry runs of one mesh")
    if "stages" in values:
        raise ValueError("it is of several stages, of which a plan takes no dry run yet")
    memory, timeline, step = values["device_bytes"], values.get("timeline"), values["step"]
    if step not in ("decode", "prefill"):
        raise ValueError(f"its step is {step!r}, expected decode or prefill")
    outputs = _whole(memory, "outputs") - _whole(memory, "aliased")
    code = _whole(memory, "code") if memory.get("code") is not None else 0
    flops = values["costs"]["flops_by_dtype"]
    versions = values.get("versions")
    made = [f"{name} {version}" for name, version in versions.items()] if isinstance(versions, dict) else []
    target = f"{path.name}, dsjax dryrun --target {_text(values, 'target')}"
    return DryRun(
        file=str(path),
        provenance=", ".join([target, *made, written]),
        parameters=_whole(values["parameters"], "total", 1),
        weight_bytes=_whole(memory, "weights_total", 1),
        mesh=MeshSpec.parse(_text(values, "mesh")),
        physical_experts=_whole(values, "physical_experts"),
        **{field: _whole(values, name, 1) for field, name in _WHOLES.items()},
        **{field: _text(values, name) for field, name in _TEXTS.items()},
        tokens=_number(values, "tokens_per_device", above=True),
        dispatch=_text(values, "dispatch") if "dispatch" in values else "",
        temporaries=_whole(memory, "temporaries") + max(0, outputs) + code,
        collectives=tuple(_sent(one) for one in values["collectives"]),
        flops={dtype: _number(flops, dtype) for dtype in flops},
        timeline=_predicted(timeline["step"]) if timeline else None,
        halves=bool(values.get("halves", False)),
    )


def _sent(one: Mapping[str, Any]) -> Sent:
    kind, inside = _text(one, "kind"), _number(one, "bytes_inside")
    dispatches = kind == "ragged-all-to-all" or "/dispatch/" in _text(one, "op_name")
    size = inside + _number(one, "bytes_between")
    return Sent(kind, _whole(one, "ranks", 2), size, inside, _number(one, "times"), dispatches)


def _predicted(step: Mapping[str, Any]) -> Figure:
    value, low, high = (_number(step, end, above=True) for end in ("value", "low", "high"))
    if not low <= value <= high:
        raise ValueError(
            f"its timeline takes {value:g} s, between {low:g} and {high:g}; expected a value within its range"
        )
    return Figure(value, low, high, Kind.COMPILED | Kind.ASSUMPTION, name="timeline", unit="s")


def _whole(values: Mapping[str, Any], name: str, least: int = 0) -> int:
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}, expected a whole number of at least {least}")
    return value


def _number(values: Mapping[str, Any], name: str, above: bool = False) -> float:
    value = values[name]
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 <= value < math.inf
        or (above and value == 0)
    ):
        raise ValueError(f"{name} is {value!r}, expected a number {'above' if above else 'of at least'} 0")
    return float(value)


def _text(values: Mapping[str, Any], name: str) -> str:
    if not isinstance(values[name], str):
        raise ValueError(f"{name} is {values[name]!r}, expected text")
    return values[name]
