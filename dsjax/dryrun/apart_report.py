"""`ApartReport`: the results of a dry run of disaggregated attention and experts, and the fields of its JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsjax.dryrun.apart_compilation import ApartStep
from dsjax.dryrun.apart_memory import SideMemory
from dsjax.dryrun.apart_timeline import ApartTimeline
from dsjax.dryrun.report import memory_json
from dsjax.dryrun.side_program import SideProgram
from dsjax.hardware import Hardware
from sharding.dispatch import even_routing_rows
from sharding.dispatch.between import Between


@dataclass(frozen=True)
class Links:
    """Bytes sent between the sides in a step."""

    # number of connections from all attention processes to all expert processes, through host memory; 0 where rows and answers go from
    # device to device
    connections: int
    rows: int  # an attention device's rows in the first pass
    capacity: int  # an attention device's room for rows to one expert device
    chosen: str  # the compiled format
    needed: float  # fraction of the rows that even routing sends to one expert device
    wires: Mapping[str, Mapping[str, int]]  # row format (`bfloat16` or another compute dtype, and `fp8`) → bytes

    @classmethod
    def of(cls, compiled: ApartStep, connections: int) -> Links:
        """Add up the exchanges of all passes."""
        step = compiled.step
        exchanges = []
        for passes, compiled_pass in compiled.experts.passes:
            exchanges += [(program.way.between, passes[0].num_layers) for program in compiled_pass.programs]
        plain = str(step.dtype)
        wires = {}
        for name, fp8 in ((plain, False), ("fp8", True)):
            sizes: dict[str, int] = {}
            for between, layers in exchanges:
                for key, size in exchange_bytes(between, fp8, connections).items():
                    sizes[key] = sizes.get(key, 0) + layers * size
            wires[name] = sizes
        first = exchanges[0][0]
        chosen = "fp8" if step.dispatch.wire == "fp8" else plain
        return cls(connections, first.rows, first.capacity, chosen, needed_share(first), wires)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**dataclasses.asdict(self), "wires": {name: dict(sizes) for name, sizes in self.wires.items()}}


def needed_share(between: Between) -> float:
    """Return the fraction of a device's rows that even routing sends to one expert device."""
    return even_routing_rows(1, between.wire.top_k, between.group.size)


def exchange_bytes(between: Between, fp8: bool, connections: int) -> dict[str, int]:
    """Return the bytes of one exchange per device and direction, and per connection (no empty rows; even routing)."""
    wire = dataclasses.replace(between.wire, fp8=fp8)
    row = wire.row_bytes
    answer = between.bytes_back
    senders, receivers, cells = between.senders, between.group.size, between.capacity
    sizes = {
        "attention_device_sends": receivers * cells * row,
        "expert_device_receives": senders * cells * row,
        "expert_device_sends": senders * cells * answer,
        "attention_device_receives": receivers * cells * answer,
    }
    if connections:
        rows = senders * between.rows * needed_share(between) * receivers / connections
        sizes |= {"connection_there": round(rows * row), "connection_back": round(rows * answer)}
    return sizes


@dataclass(frozen=True, kw_only=True)
class ApartReport:
    """All figures of one dry run. Bytes and operations are per device."""

    request: dict[str, Any]  # the compiled options, with defaults filled in
    hardware: tuple[Hardware | None, Hardware | None]  # of the two sides; None on the CPU target
    parameters: dict[str, int]
    attention: SideMemory  # memory of an attention device
    experts: SideMemory  # memory of an expert device
    cache_tokens: int  # usable slots of a DP rank's cache
    programs: tuple[SideProgram, ...]  # all programs of a step, on both sides
    links: Links
    timeline: ApartTimeline | None  # the simulated step of both sides; None if not requested
    assumptions: dict[str, str]
    notes: tuple[str, ...]
    seconds: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """Fields of `dsjax dryrun --attention-mesh … --expert-mesh … --json`.

        The resolved options come first: `dispatch` is `apart`; `processes` is 1, or the number on both sides; `micro_batches`;
        `capacity` is the number of rows from an attention device to an expert device in a round, `answers_of_a_row` the number of answers
        that an expert device returns per row. Then:

        - `parameters`, `cache_tokens`, `assumptions`, `notes`, `seconds`: as in `DryRunReport.to_json`
        - `device_bytes`: `attention` and `experts`, each with the fields of `SideMemory`, `weights_total`, `total` and `memory`
        - `programs`: `SideProgram.to_json`
        - `links`: `Links`; each format in `wires` has the bytes that a device of either side sends and receives in a step, and the bytes
          per connection, `connection_there` and `connection_back`
        - `timeline`: `ApartTimeline.to_json`, or null
        """
        sides = zip(("attention", "experts"), (self.attention, self.experts), self.hardware, strict=True)
        return {
            **self.request,
            "parameters": {**self.parameters, "total": sum(self.parameters.values())},
            "device_bytes": {name: memory_json(memory, hardware) for name, memory, hardware in sides},
            "cache_tokens": self.cache_tokens,
            "programs": [program.to_json() for program in self.programs],
            "links": self.links.to_json(),
            "timeline": self.timeline.to_json() if self.timeline else None,
            "assumptions": self.assumptions,
            "notes": list(self.notes),
            "seconds": self.seconds,
        }
