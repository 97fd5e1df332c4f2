"""The `dsjax bench modules` command. Imports JAX only when it runs."""

import dataclasses
import hashlib
import sys
from typing import Any

import typer
from rich.console import Console

from dsjax.bench.modules.options import ModelOptions, ModuleGrid, RunOptions
from dsjax.bench.processes import Processes, as_flags, measuring_together
from dsjax.cli.options import options_of
from dsjax.cli.output import INTERRUPTED, report_console, write_json
from dsjax.errors import UserError
from dsjax.hosts import GroupOptions
from dsjax.options import check_place
from dsjax.progress import track


@options_of(model=ModelOptions, grid=ModuleGrid, run=RunOptions, group=GroupOptions)
def modules(model: ModelOptions, grid: ModuleGrid, run: RunOptions, group: GroupOptions) -> None:
    """Time each part of the model by itself, at full width. `dsjax plan --measured` reads the JSON.

    Only one module's weights are in memory at a time. Ctrl-C prints and writes the results so far. On several hosts, start the same command
    on each: process 0 times the parts on one device, and all processes together time the dispatch on --mesh.
    """
    from sharding.mesh import MeshSpec

    spec = MeshSpec.parse(grid.mesh)
    with measuring_together(group, spec.num_devices, lambda: _shared_settings(model, grid, run)) as processes:
        interrupted = _measure(model, grid, run, spec, processes)
    if interrupted:
        print("interrupted: the figures are of the cases until then", file=sys.stderr)
        raise typer.Exit(INTERRUPTED)


def _measure(model: ModelOptions, grid: ModuleGrid, run: RunOptions, spec: Any, processes: Processes) -> bool:
    """Time the cases, then print and write the results. Return whether Ctrl-C ended the run."""
    from dsjax.bench.modules.grid import cases
    from dsjax.bench.modules.one_rank import OneRankPlan, extrapolate, one_rank_cases
    from dsjax.bench.modules.report import show, show_extrapolation, to_json
    from dsjax.bench.modules.run import run_cases
    from dsjax.bench.modules.setting import Ceilings, Device, find_ceilings, make_setting
    from dsjax.bench.modules.timing import Budget

    if processes.leads:  # fail before hours of work
        check_place("--json", run.json_file)
    setting = make_setting(model)
    if processes.members:  # in a group
        processes.check_shares(spec, spec.build())
    device = Device.of(setting.step.mesh.devices.flat[0])
    budget = Budget(run.seconds or (0.2 if grid.quick else 1.0))
    own_ceilings = None  # process 0 measures the ceilings for the whole group
    if processes.leads:
        own_ceilings = dataclasses.astuple(find_ceilings(setting, device, run.hardware, budget))
    ceilings = Ceilings(*processes.agree("ceilings", own_ceilings)[0])
    plan = OneRankPlan.of(setting, grid.one_rank_of, grid.batch, grid.layers) if grid.one_rank_of else None
    pending = list(one_rank_cases(setting, plan, grid.context_lengths) if plan else cases(setting, grid))
    if not pending:
        raise UserError(f"{model.model} has none of {', '.join(grid.modules)}; choose others with --only")
    if not processes.leads:  # other processes only take part in the dispatch
        pending = [case for case in pending if case.shared]
    with_progress = track(Console(stderr=True), run.progress and processes.leads, "timing cases", pending)
    results = run_cases(setting, with_progress, ceilings, budget, run.row_limit, processes.agree)

    def report() -> None:  # in process 0
        console = report_console(stderr=run.json_file == "-")
        show(console, results, ceilings, device)
        steps = extrapolate(setting, results.rows) if plan else []
        if plan:
            show_extrapolation(console, steps, plan, setting.config)
        if run.json_file:
            extrapolation = {"one_rank": {**vars(plan), "steps": [step.to_json() for step in steps]}} if plan else {}
            body = to_json(
                results, setting, model.model, ceilings, device, processes=processes.members, **extrapolation
            )
            write_json(run.json_file, body)

    processes.report(results, report)
    return results.interrupted


def _shared_settings(model: ModelOptions, grid: ModuleGrid, run: RunOptions) -> dict[str, Any]:
    """Return the settings that must be equal in all processes, by their names in messages. The model's folder may differ between hosts."""
    from dsjax.config import load_config

    if grid.one_rank_of:
        raise UserError(
            "--one-rank-of is measured on one device; start it on one host, without --coordinator-address and its like"
        )
    settings = as_flags(model) | as_flags(grid) | {"--seconds": run.seconds, "--row-limit": run.row_limit}
    config = repr(load_config(settings.pop("--model")))  # compared by content
    settings["a model configuration with the SHA-256 sum"] = hashlib.sha256(config.encode()).hexdigest()[:16]
    return settings
