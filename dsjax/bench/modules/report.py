"""A run as tables, and as JSON."""

from __future__ import annotations

import contextlib
import datetime
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jaxlib
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dsjax.bench.modules.ceilings import Ceilings, Device
from dsjax.bench.modules.one_rank import Extrapolation, OneRankPlan
from dsjax.bench.modules.run import ModuleCase, ModuleResults, ModuleRow
from dsjax.bench.modules.setting import Setting
from dsjax.config import ModelConfig
from dsjax.plan.measured import FORMAT, widths
from dsjax.progress import Tenths


def show(console: Console, found: ModuleResults, ceilings: Ceilings, device: Device) -> None:
    """A table for each module, and what was left out."""
    console.print(
        f"[bold]{device.name}[/bold]: {ceilings.bytes_per_s / 1e9:,.1f} GB/s, {ceilings.flops_per_s / 1e9:,.0f} GFLOP/s "
        f"({ceilings.source})",
        highlight=False,
    )
    for module in dict.fromkeys(row.case.module for row in found.rows):
        console.print(_table(module, [row for row in found.rows if row.case.module == module], ceilings))
    for one in found.skipped:
        console.print(f"left out: {one.case.title}: {one.reason}", highlight=False)
    console.print(
        "ms: one application in one layer, median, in a loop on the device (*: called from the host); 10th to 90th "
        "percentile; +once: what a call costs beside, the first time. Shares are of the ceilings above; above 100 %: caches.",
        style="dim",
    )


def _table(module: str, rows: list[ModuleRow], ceilings: Ceilings) -> Table:
    table = Table(title=module, title_justify="left")
    names = [name for name in dict.fromkeys(n for row in rows for n in row.case.sizes) if name != "mesh"]
    if any(row.case.variant for row in rows):
        table.add_column("")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True, style="bold")
    for name in ("ms", "10–90 %", "+once µs", "GB/s", "of max", "GFLOP/s", "of max"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        times, work = row.times, row.case.work
        bandwidth, rate = work.bytes / times.median, work.flops / times.median
        cells = [row.case.variant] if any(r.case.variant for r in rows) else []
        cells += [str(row.case.sizes.get(name, "")) for name in names]
        cells += [
            f"{times.median * 1e3:.4g}{'' if row.in_device_loop else '*'}",
            f"{times.low * 1e3:.3g}–{times.high * 1e3:.3g}",
            f"{times.once * 1e6:.0f}",
            f"{bandwidth / 1e9:.3g}",
            f"{bandwidth / ceilings.bytes_per_s:.0%}",
            f"{rate / 1e9:.3g}" if work.flops else "",
            f"{rate / ceilings.flops_per_s:.1%}" if work.flops else "",
        ]
        table.add_row(*cells)
    return table


def show_extrapolation(console: Console, steps: list[Extrapolation], plan: OneRankPlan, config: ModelConfig) -> None:
    """A step of the whole model, layer by layer."""
    table = Table(
        title=f"a decode step of one rank of {plan.ranks}: {plan.batch} requests, {plan.experts} of "
        f"{config.n_routed_experts} experts a layer; {plan.layers} MoE layers timed, {config.num_moe_layers} reckoned",
        title_justify="left",
    )
    for name in ("routing", "context", "sum", "ms", "tokens/s of the rank"):
        table.add_column(name, justify="left" if name == "sum" else "right")
    for step in steps:
        terms = " + ".join(f"{count} × {each * 1e3:.4g} {name}" for name, count, each in step.parts)
        rate = plan.batch / step.seconds
        table.add_row(step.variant, str(step.context), terms, f"{step.seconds * 1e3:.4g}", f"{rate:,.1f}")
    console.print(table)
    console.print(
        "Without the exchanges between ranks: --only dispatch --mesh times those.", style="dim", highlight=False
    )


def to_json(
    found: ModuleResults,
    setting: Setting,
    model: str,
    ceilings: Ceilings,
    device: Device,
    command: str,
    *,
    processes: Sequence[Mapping[str, Any]] = (),
    **more: Any,
) -> dict[str, Any]:
    """Stable fields, as `docs/bench-modules.md` lists them. processes: those of a group, as of `Processes.members`."""
    return {
        **head(setting, model, ceilings, device, command),
        "processes": list(processes),
        "partial": found.partial,
        "skipped": [
            {"module": s.case.module, "variant": s.case.variant, "sizes": dict(s.case.sizes), "reason": s.reason}
            for s in found.skipped
        ],
        "rows": [row.to_json() for row in found.rows],
        **more,
    }


def head(setting: Setting, model: str, ceilings: Ceilings, device: Device, command: str) -> dict[str, Any]:
    """What all figures of a run hang on."""
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
        "kernels": step.kernels.names(step.prefill_form, step.decode_form),
        "page_size": step.page_size,
        "max_model_len": setting.max_model_len,
        "seed": setting.seed,
    }


def origin(form: str, command: str, device: Device) -> dict[str, Any]:
    """What every file of `dsjax bench` begins with."""
    return {
        "format": form,
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "device": vars(device),
    }


def versions() -> Mapping[str, str]:
    """Versions of what the figures hang on beside the device."""
    import importlib.metadata

    try:
        own = importlib.metadata.version("dsjax")
    except importlib.metadata.PackageNotFoundError:
        own = "not installed"
    return {
        "dsjax": own,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "system": platform.platform(),
    }


@contextlib.contextmanager
def case_progress(console: Console, shown: bool, total: int) -> Iterator[Callable[[ModuleCase], None]]:
    """A progress bar over cases, with the name of the one that is being timed; gives a function to call when one begins.

    The bar goes away at the end. Where the console is no terminal, a line is written at each tenth instead.
    """
    tenths = None
    if shown and not console.is_terminal:
        tenths = Tenths("timing cases", total, lambda line: console.print(line, highlight=False))
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task("", total=total)
        begun = [0]

        def on_start(case: ModuleCase) -> None:
            if tenths is not None:
                tenths.reach(begun[0])
            bar.update(task, completed=begun[0], description=case.title)
            begun[0] += 1

        yield on_start
