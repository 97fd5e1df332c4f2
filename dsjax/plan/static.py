"""The static modes: one batch, the same for every layout; prefill alone, decode alone, or one after the other."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from dsjax.plan.figure import TWO_LINES, as_json, spread
from dsjax.plan.instance import Instance
from dsjax.plan.search import NO_LAYOUT, Shown
from dsjax.tables import table
from dsjax.texts import filled


@dataclass(frozen=True)
class StaticResult:
    """Result of one batch per DP rank on one instance."""

    instance: Instance
    mode: str
    batch: int
    ttft: float | None  # of all its prompts, computed in steps of `--prefill-tokens`; None: not part of the mode
    tpot: float | None  # of its decode steps; None: not part of the mode
    rate: float  # tokens/s per device; prompt tokens in `static_ctx`, output tokens otherwise

    def to_json(self) -> dict[str, Any]:
        """Return stable JSON fields; figures as `Figure.to_json`."""
        instance = self.instance
        layout = instance.layout
        return {
            "mesh": str(layout.mesh),
            "expert_mesh": f"ep={layout.experts}" if layout.experts else None,
            "kind": layout.kind,
            "redundant_experts": layout.redundant,
            "devices": layout.devices,
            "batch_per_dp_rank": instance.requests(self.batch),
            "max_batch_per_dp_rank": instance.requests(instance.max_batch),
            "cache_tokens_per_dp_rank": instance.cache_tokens.to_json(),
            "ttft_s": self.ttft and as_json(self.ttft),
            "tpot_s": self.tpot and as_json(self.tpot),
            "tokens_per_s_device": as_json(self.rate),
        }


def static_of(fitting: list[Instance], mode: str, batch: int | None) -> Sequence[StaticResult]:
    """Return results for all instances that hold the batch, most tokens/s per device first. batch None: as many as each holds."""
    # With several pipeline stages, a DP rank's batch is split into as many micro-batches.
    sizes = [(i, -(-batch // i.layout.mesh.pp_size) if batch else i.max_batch) for i in fitting]
    results = [_result(i, mode, size) for i, size in sizes if max(size, 1) <= i.max_batch]
    return Shown(sorted(results, key=lambda r: -r.rate), lambda rows: [_with_intervals(row) for row in rows])


def _with_intervals(result: StaticResult) -> StaticResult:
    names = [name for name in ("ttft", "tpot", "rate") if getattr(result, name) is not None]

    def compute() -> list[float]:
        again = _result(result.instance.on(result.instance.cluster, {}), result.mode, result.batch)
        return [getattr(again, name) for name in names]

    return dataclasses.replace(result, **dict(zip(names, spread(compute), strict=True)))


def _result(instance: Instance, mode: str, batch: int) -> StaticResult:
    work = instance.workload
    users = batch * instance.replicas / instance.layout.devices
    tokens = min(batch * work.computed, instance.options.prefill_tokens)
    ttft = None if mode == "static_gen" else instance.prompt_seconds(tokens) * batch
    tpot = None if mode == "static_ctx" else instance.tpot(batch)
    if tpot is None:
        rate = users * work.computed / ttft
    elif ttft is None:
        rate = users / tpot
    else:
        rate = users * work.output.mean / (ttft + tpot * max(work.output.mean - 1, 0))
    return StaticResult(instance, mode, batch, ttft, tpot, rate)


def no_room(fitting: list[Instance], too_large: list[Instance], batch: int | None) -> str:
    """Return a message: how much is missing if no layout holds the batch, and what would fit."""
    least = min(too_large, key=lambda i: i.memory.weights_total, default=None)
    most = max(fitting, key=lambda i: i.max_batch, default=None)
    return filled("texts", "no_room.txt", least=least, most=most, batch=batch or 1, no_layout=NO_LAYOUT)


def show_static(console: Console, results: list[StaticResult], mode: str, rows: int, missing: str) -> None:
    """Print the table, or `missing` if there are no results."""
    rate = ("prompt tokens/s" if mode == "static_ctx" else "tokens/s") + " a device"
    names = ("<layout", "devices", "batch", "of at most", "TTFT s", "TPOT ms", rate)
    cells = [
        (
            f"{result.instance.layout}\n{result.instance.layout.kind}",
            str(result.instance.layout.devices),
            str(result.instance.requests(result.batch)),
            str(result.instance.requests(result.instance.max_batch)),
            result.ttft.text(1, 2, TWO_LINES) if result.ttft else "",
            result.tpot.text(1e3, 1, TWO_LINES) if result.tpot else "",
            result.rate.text(1, 0, TWO_LINES),
        )
        for result in results[:rows]
    ]
    console.print(table(f"{mode}: most tokens a second a device first", names, cells) if results else missing)
