"""The static modes: one batch, the same for every layout; prefill alone, decode alone, or one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from dsjax.plan.figure import TWO_LINES, as_json, spread
from dsjax.plan.instance import Instance
from dsjax.plan.question import Question
from dsjax.plan.search import NO_LAYOUT, Shown, instances


@dataclass(frozen=True)
class StaticResult:
    """A batch of each DP rank on one instance. ttft: its prompts, one after another in steps of `--prefill-tokens`; tpot: of
    its decode; rate: tokens a second a device, prompt tokens in `static_ctx`, output tokens otherwise. None: not part of the mode.
    """

    instance: Instance
    mode: str
    batch: int
    ttft: float | None
    tpot: float | None
    rate: float

    def to_json(self) -> dict[str, Any]:
        """Stable fields; figures as `Figure.to_json`."""
        layout = self.instance.layout
        return {
            "mesh": str(layout.mesh),
            "expert_mesh": f"ep={layout.experts}" if layout.experts else None,
            "kind": layout.kind,
            "redundant_experts": layout.redundant,
            "devices": layout.devices,
            "batch_per_dp_rank": self.instance.requests(self.batch),
            "max_batch_per_dp_rank": self.instance.requests(self.instance.max_batch),
            "cache_tokens_per_dp_rank": self.instance.cache_tokens.to_json(),
            "ttft_s": self.ttft and as_json(self.ttft),
            "tpot_s": self.tpot and as_json(self.tpot),
            "tokens_per_s_device": as_json(self.rate),
        }


def static(question: Question, mode: str, batch: int | None) -> list[StaticResult]:
    """Every layout with room for the batch, most tokens a second a device first; batch None: as many as each holds."""
    return static_of(instances(question)[1], mode, batch)


def static_of(fitting: list[Instance], mode: str, batch: int | None) -> Sequence[StaticResult]:
    """Compute the results of instances that are known to fit."""
    # Of several stages, a batch of a DP rank is in as many parts, which they take in turn.
    sizes = [(i, -(-batch // i.layout.mesh.pp_size) if batch else i.max_batch) for i in fitting]
    results = [_result(i, mode, size) for i, size in sizes if max(size, 1) <= i.max_batch]
    return Shown(sorted(results, key=lambda r: -r.rate), _with_intervals)


def _with_intervals(result: StaticResult) -> StaticResult:
    names = [name for name in ("ttft", "tpot", "rate") if getattr(result, name) is not None]

    def compute() -> list[float]:
        again = _result(result.instance.on(result.instance.cluster, {}), result.mode, result.batch)
        return [getattr(again, name) for name in names]

    return dataclasses.replace(result, **dict(zip(names, spread(compute), strict=True)))


def _result(instance: Instance, mode: str, batch: int) -> StaticResult:
    work = instance.workload
    tokens = min(batch * work.computed, instance.options.prefill_tokens)
    ttft = tpot = None
    users = batch * instance.replicas / instance.layout.devices
    if mode != "static_gen":
        ttft = instance.prompt_seconds(tokens) * batch
    if mode != "static_ctx":
        tpot = instance.tpot(batch)
    if tpot is None:
        rate = users * work.computed / ttft
    elif ttft is None:
        rate = users / tpot
    else:
        rate = users * work.output.mean / (ttft + tpot * max(work.output.mean - 1, 0))
    return StaticResult(instance, mode, batch, ttft, tpot, rate)


def no_room(fitting: list[Instance], too_large: list[Instance], batch: int | None) -> str:
    """How much is missing where no layout holds the batch, and what would fit."""
    if not fitting and not too_large:
        return NO_LAYOUT
    if not fitting:
        least = min(too_large, key=lambda i: i.memory.weights_total)
        missing = -least.memory.cache + least.workload.held * least.memory.cache_per_token
        return (
            f"no layout has room for one request: the smallest, {least.layout}, lacks {missing / 1e9:.1f} GB a device; its weights are "
            f"{least.memory.weights_total / 1e9:.1f} of {least.memory.device / 1e9:.1f} GB"
        )
    most = max(fitting, key=lambda i: i.max_batch)
    missing = (batch or 1) * most.workload.held * most.memory.cache_per_token - most.memory.cache
    return (
        f"no layout has room for {batch} requests of a DP rank: {most.layout} holds most, {most.max_batch}, and lacks "
        f"{missing / 1e9:.1f} GB a device; give --batch {most.max_batch} or less, or shorter --input and --output"
    )


def show_static(console: Console, results: list[StaticResult], mode: str, rows: int, missing: str) -> None:
    """The table, or what is missing."""
    table = Table(title=f"{mode}: most tokens a second a device first", title_justify="left")
    table.add_column("layout")
    for name in (
        "devices",
        "batch",
        "of at most",
        "TTFT s",
        "TPOT ms",
        "prompt tokens/s" if mode == "static_ctx" else "tokens/s",
    ):
        table.add_column(name + (" a device" if name.endswith("tokens/s") else ""), justify="right", no_wrap=True)
    for result in results[:rows]:
        layout = result.instance.layout
        table.add_row(
            f"{layout}\n{layout.kind}",
            str(layout.devices),
            str(result.instance.requests(result.batch)),
            str(result.instance.requests(result.instance.max_batch)),
            result.ttft.text(1, 2, TWO_LINES) if result.ttft else "",
            result.tpot.text(1e3, 1, TWO_LINES) if result.tpot else "",
            result.rate.text(1, 0, TWO_LINES),
        )
    console.print(table if results else missing)
