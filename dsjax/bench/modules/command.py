"""`dsjax bench modules`: the command. JAX is imported when it runs."""

import shlex
import sys

import typer
from rich.console import Console

from dsjax.bench.modules.options import GridOptions, ModelOptions, RunOptions
from dsjax.bench.serve.flags import options_of
from dsjax.cli.options import prepare_devices
from dsjax.cli.output import report_console, write_json
from dsjax.errors import UserError

_INTERRUPTED = 130


@options_of(model=ModelOptions, grid=GridOptions, run=RunOptions)
def modules(model: ModelOptions, grid: GridOptions, run: RunOptions) -> None:
    """Time the model's parts, one by one, at its true widths; `dsjax plan --measured` takes the JSON.

    Only one module's weights are in memory at a time. Ctrl-C prints and writes what is done so far.
    """
    prepare_devices(grid.mesh)
    from dsjax.bench.modules.ceilings import Device, find_ceilings
    from dsjax.bench.modules.grid import cases
    from dsjax.bench.modules.one_rank import RankPlan, extrapolate, one_rank_cases
    from dsjax.bench.modules.prepare import make_setting
    from dsjax.bench.modules.report import case_progress, show, show_extrapolation, to_json
    from dsjax.bench.modules.run import run_cases
    from dsjax.bench.modules.timing import Budget

    setting = make_setting(model)
    device = Device.of(setting.step.mesh.devices.flat[0])
    budget = Budget(run.seconds or (0.2 if grid.quick else 1.0))
    ceilings = find_ceilings(setting, device, run.hardware, budget)
    plan = RankPlan.of(setting, grid.one_rank_of, grid.batch, grid.layers) if grid.one_rank_of else None
    todo = list(one_rank_cases(setting, plan, grid.context_lengths) if plan else cases(setting, grid))
    if not todo:
        raise UserError(f"{model.model} has none of {', '.join(grid.modules)}; choose others with --only")
    with case_progress(Console(stderr=True), run.progress, len(todo)) as on_start:
        found = run_cases(setting, todo, ceilings, budget, run.row_limit, on_start)
    console = report_console(stderr=run.json_file == "-")
    show(console, found, ceilings, device)
    steps = extrapolate(setting, found.rows) if plan else []
    if plan:
        show_extrapolation(console, steps, plan, setting.config)
    if run.json_file:
        command = shlex.join(["dsjax", *sys.argv[1:]])
        more = {"one_rank": {**vars(plan), "steps": [step.to_json() for step in steps]}} if plan else {}
        write_json(run.json_file, to_json(found, setting, model.model, ceilings, device, command, **more))
    if found.interrupted:
        print("interrupted: the figures are of what was done until then", file=sys.stderr)
        raise typer.Exit(_INTERRUPTED)
