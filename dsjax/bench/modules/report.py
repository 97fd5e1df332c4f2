"""A run as tables, and as JSON."""

import datetime
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from dsjax.bench.modules.one_rank import Extrapolation, OneRankPlan
from dsjax.bench.modules.run import ModuleRow
from dsjax.bench.modules.setting import Ceilings, Device, Setting
from dsjax.bench.processes import Results
from dsjax.config import ModelConfig
from dsjax.plan.measured import FORMAT, widths
from dsjax.tables import table
from dsjax.versions import installed_version


def show(console: Console, results: Results, ceilings: Ceilings, device: Device) -> None:
    """A table for each module, and what was left out."""
    console.print(
        f"[bold]{device.name}[/bold]: {ceilings.bytes_per_s / 1e9:,.1f} GB/s, {ceilings.flops_per_s / 1e9:,.0f} GFLOP/s "
        f"({ceilings.source})",
        highlight=False,
    )
    for module in dict.fromkeys(row.case.module for row in results.rows):
        console.print(_table(module, [row for row in results.rows if row.case.module == module], ceilings))
    for case, reason in results.skipped:
        console.print(f"left out: {case.title}: {reason}", highlight=False)
    console.print(
        "ms: one application in one layer, median, in a loop on the device (*: called from the host); 10th to 90th "
        "percentile; +once: what a call costs beside, the first time. Shares are of the ceilings above; above 100 %: caches.",
        style="dim",
    )


def _table(module: str, rows: list[ModuleRow], ceilings: Ceilings) -> Table:
    names = [name for name in dict.fromkeys(n for row in rows for n in row.case.sizes) if name != "mesh"]
    variants = any(row.case.variant for row in rows)
    cells = []
    for row in rows:
        times, work = row.times, row.case.work
        bandwidth, rate = work.bytes / times.median, work.flops / times.median
        cells.append(
            [
                *[row.case.variant] * variants,
                *(str(row.case.sizes.get(name, "")) for name in names),
                f"{times.median * 1e3:.4g}{'' if row.in_device_loop else '*'}",
                f"{times.low * 1e3:.3g}–{times.high * 1e3:.3g}",
                f"{times.once * 1e6:.0f}",
                f"{bandwidth / 1e9:.3g}",
                f"{bandwidth / ceilings.bytes_per_s:.0%}",
                f"{rate / 1e9:.3g}" if work.flops else "",
                f"{rate / ceilings.flops_per_s:.1%}" if work.flops else "",
            ]
        )
    figures = ("ms", "10–90 %", "+once µs", "GB/s", "of max", "GFLOP/s", "of max")
    return table(module, (*["<"] * variants, *names, *figures), cells)


def show_extrapolation(console: Console, steps: list[Extrapolation], plan: OneRankPlan, config: ModelConfig) -> None:
    """A step of the whole model, layer by layer."""
    title = (
        f"a decode step of one rank of {plan.ranks}: {plan.batch} requests, {plan.experts} of "
        f"{config.n_routed_experts} experts a layer; {plan.layers} MoE layers timed, {config.num_moe_layers} reckoned"
    )
    rows = []
    for step in steps:
        terms = " + ".join(f"{count} × {each * 1e3:.4g} {name}" for name, count, each in step.parts)
        rate = plan.batch / step.seconds
        rows.append((step.variant, str(step.context), terms, f"{step.seconds * 1e3:.4g}", f"{rate:,.1f}"))
    console.print(table(title, ("routing", "context", "<<sum", "ms", "tokens/s of the rank"), rows))
    console.print(
        "Without the exchanges between ranks: --only dispatch --mesh times those.", style="dim", highlight=False
    )


def to_json(
    results: Results,
    setting: Setting,
    model: str,
    ceilings: Ceilings,
    device: Device,
    command: str,
    *,
    processes: Sequence[Mapping[str, Any]] = (),
    **more: Any,
) -> dict[str, Any]:
    """Stable fields. processes: `Processes.members` of a group.

    `skipped` has cases that were left out, each with its `reason`. A row has `module`, `variant`, `sizes`, `flops` (a multiply-add is two),
    `weight_bytes`, `other_bytes` (cache, inputs and results, or what leaves a device), `in_device_loop`, `median_s`, `min_s`, `low_s` and
    `high_s` (10th and 90th percentile; of fewer than ten samples the extremes), `once_s` (what a call costs beside its applications),
    `applications`, and `samples_s` as [empty, short, long] calls.
    """
    step = setting.step
    return {
        **origin(FORMAT, command, device),
        "ceilings": vars(ceilings),
        "model": model,
        "widths": widths(setting.config),
        "dtype": str(setting.dtype),
        "weights": setting.weights,
        "activation_scheme": str(step.scheme),
        "kv_cache_dtype": str(step.cache_dtype),
        "kernels": step.implementations,
        "page_size": step.page_size,
        "max_model_len": setting.max_model_len,
        "seed": setting.seed,
        "processes": list(processes),
        "partial": results.partial,
        "skipped": [
            {"module": case.module, "variant": case.variant, "sizes": dict(case.sizes), "reason": reason}
            for case, reason in results.skipped
        ],
        "rows": [row.to_json() for row in results.rows],
        **more,
    }


def origin(form: str, command: str, device: Device) -> dict[str, Any]:
    """What every file of `dsjax bench` begins with."""
    return {
        "format": form,
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {
            **{package: installed_version(package) for package in ("dsjax", "jax", "jaxlib")},
            "python": platform.python_version(),
            "system": platform.platform(),
        },
        "device": vars(device),
    }
