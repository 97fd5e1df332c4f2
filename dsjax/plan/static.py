"""`dsjax plan step`: the time of one batch, the same for every layout: prefill (`static_ctx`), decode (`static_gen`) or both (`static`)."""

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
    """Predicted times of one batch on one instance."""

    instance: Instance
    mode: str
    batch: int  # requests per DP rank and pipeline stage
    ttft: float | None  # seconds to prefill all its prompts, in steps of `--prefill-tokens`; None in `static_gen`
    tpot: float | None  # seconds between two tokens of a request; None in `static_ctx`
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


def static_results(fitting: list[Instance], mode: str, batch: int | None) -> Sequence[StaticResult]:
    """Return results of the instances whose cache holds `batch` requests per DP rank (None: as many as fit), highest rate first."""
    sizes = [(i, -(-batch // i.layout.mesh.pp_size) if batch else i.max_batch) for i in fitting]
    results = [_result(i, mode, size) for i, size in sizes if max(size, 1) <= i.max_batch]
    return Shown(sorted(results, key=lambda r: -r.rate), lambda rows: [_with_intervals(row) for row in rows])


def _with_intervals(result: StaticResult) -> StaticResult:
    instance = result.instance
    names = [name for name in ("ttft", "tpot", "rate") if getattr(result, name) is not None]

    def compute() -> list[float]:
        # `on` drops the cached prices, so that they are computed in this draw.
        drawn = _result(instance.on(instance.cluster, {}), result.mode, result.batch)
        return [getattr(drawn, name) for name in names]

    return dataclasses.replace(result, **dict(zip(names, spread(compute), strict=True)))


def _result(instance: Instance, mode: str, batch: int) -> StaticResult:
    work = instance.workload
    requests_per_device = batch * instance.replicas / instance.layout.devices
    step_tokens = min(batch * work.computed, instance.options.prefill_tokens)
    ttft = None if mode == "static_gen" else instance.prompt_seconds(step_tokens) * batch
    tpot = None if mode == "static_ctx" else instance.tpot(batch)
    if tpot is None:
        rate = requests_per_device * work.computed / ttft
    elif ttft is None:
        rate = requests_per_device / tpot
    else:
        rate = requests_per_device * work.output.mean / (ttft + tpot * max(work.output.mean - 1, 0))
    return StaticResult(instance, mode, batch, ttft, tpot, rate)


def no_room(fitting: list[Instance], too_large: list[Instance], batch: int | None) -> str:
    """Return the message that no layout holds the batch: how many bytes are missing, and what would fit."""
    least = min(too_large, key=lambda i: i.memory.weights_total, default=None)
    most = max(fitting, key=lambda i: i.max_batch, default=None)
    return filled("texts", "no_room.txt", least=least, most=most, batch=batch or 1, no_layout=NO_LAYOUT)


def show_static(console: Console, results: Sequence[StaticResult], mode: str, rows: int, no_results: str) -> None:
    """Print the table of the first rows, or `no_results` if it is empty."""
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
    console.print(table(f"{mode}: most tokens a second a device first", names, cells) if results else no_results)
