"""The results of `dsjax bench modules` as tables and as JSON."""

import datetime
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from dsjax.bench.modules.one_rank import Extrapolation, OneRankPlan
from dsjax.bench.modules.run import ModuleRow
from dsjax.bench.modules.setting import Ceilings, Device, Setting
from dsjax.bench.modules.timing import spread
from dsjax.bench.processes import Results
from dsjax.config import ModelConfig
from dsjax.plan.measured import FORMAT, widths
from dsjax.tables import table
from dsjax.versions import installed_version


def show(console: Console, results: Results, ceilings: Ceilings, device: Device) -> None:
    """Print a table for each module, then the skipped cases."""
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
        "percentile; +once: cost of a call beyond its applications. Shares are of the ceilings above; above 100 %: caches.",
        style="dim",
    )


def _table(module: str, rows: list[ModuleRow], ceilings: Ceilings) -> Table:
    """Return the table of a module's rows, with a column for each size, and one of variants if there are any."""
    size_names = [name for name in dict.fromkeys(n for row in rows for n in row.case.sizes) if name != "mesh"]
    columns = [*size_names, "ms", "10–90 %", "+once µs", "GB/s", "of max", "GFLOP/s", "of max"]
    cells = [[*(str(row.case.sizes.get(name, "")) for name in size_names), *_figures(row, ceilings)] for row in rows]
    if any(row.case.variant for row in rows):
        columns.insert(0, "<")
        cells = [[row.case.variant, *own] for row, own in zip(rows, cells, strict=True)]
    return table(module, columns, cells)


def _figures(row: ModuleRow, ceilings: Ceilings) -> list[str]:
    times, work = row.times, row.case.work
    low, high = spread(times.seconds_each)
    bandwidth, rate = work.bytes / times.median, work.flops / times.median
    return [
        f"{times.median * 1e3:.4g}{'' if row.in_device_loop else '*'}",
        f"{low * 1e3:.3g}–{high * 1e3:.3g}",
        f"{times.setup * 1e6:.0f}",
        f"{bandwidth / 1e9:.3g}",
        f"{bandwidth / ceilings.bytes_per_s:.0%}",
        f"{rate / 1e9:.3g}" if work.flops else "",
        f"{rate / ceilings.flops_per_s:.1%}" if work.flops else "",
    ]


def show_extrapolation(console: Console, steps: list[Extrapolation], plan: OneRankPlan, config: ModelConfig) -> None:
    """Print the extrapolated step of the whole model: number of layers × seconds per layer, for each kind."""
    title = (
        f"a decode step of one rank of {plan.ranks}: {plan.batch} requests, {plan.experts} of "
        f"{config.n_routed_experts} experts a layer; {plan.layers} MoE layers timed, {config.num_moe_layers} extrapolated"
    )
    rows = []
    for step in steps:
        terms = " + ".join(f"{count} × {each * 1e3:.4g} {name}" for name, count, each in step.parts)
        rate = plan.batch / step.seconds
        rows.append((step.variant, str(step.context), terms, f"{step.seconds * 1e3:.4g}", f"{rate:,.1f}"))
    console.print(table(title, ("routing", "context", "<<sum", "ms", "tokens/s of the rank"), rows))
    console.print(
        "Excludes the exchanges between ranks, which --only dispatch --mesh times.", style="dim", highlight=False
    )


def to_json(
    results: Results,
    setting: Setting,
    model: str,
    ceilings: Ceilings,
    device: Device,
    *,
    processes: Sequence[Mapping[str, Any]] = (),
    **more: Any,
) -> dict[str, Any]:
    """Return the results in a stable format. processes: `Processes.members` of a group.

    `skipped` lists the skipped cases, each with its `reason`. A row has `module`, `variant`, `sizes`, `flops` (a multiply-add is two),
    `weight_bytes`, `other_bytes` (cache, inputs and results, or bytes that leave a device), `in_device_loop`, `median_s`, `min_s`, `low_s`
    and `high_s` (10th and 90th percentile; minimum and maximum of fewer than ten samples), `once_s` (cost of a call beyond an empty call
    and its applications), `applications`, and `samples_s` as seconds of [empty, short, long] calls.
    """
    step = setting.step
    return {
        **origin(FORMAT, device),
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


def origin(form: str, device: Device) -> dict[str, Any]:
    """Return the first fields of the JSON of `dsjax bench modules` and `dsjax bench network`."""
    return {
        "format": form,
        "command": shlex.join(["dsjax", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {
            **{package: installed_version(package) for package in ("dsjax", "jax", "jaxlib")},
            "python": platform.python_version(),
            "system": platform.platform(),
        },
        "device": vars(device),
    }
