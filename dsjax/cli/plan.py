"""`dsjax plan`: find the layout for a cluster, a workload and objectives, with figures that can be checked."""

import math
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from dsjax.cli.help import PLAIN, Commands, PanelledCommand
from dsjax.cli.options import options_of
from dsjax.cli.output import report_console, write_json, writing
from dsjax.plan.arguments import FitArgs, PlanArgs, ServiceArgs, SimulateArgs, StepArgs

_SEARCH = "search"


class _PlanCommands(Commands):
    """A group whose default subcommand is `search`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments of `dsjax plan`."""
        return super().parse_args(ctx, args if args and args[0] in self.commands else [_SEARCH, *args])


class _SearchCommand(PanelledCommand):
    """The default subcommand of `dsjax plan`; its help lists the others."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the sections."""
        super().format_options(ctx, formatter)
        if ctx.parent is not None:
            ctx.parent.command.format_commands(ctx.parent, formatter)


app = typer.Typer(name="plan", cls=_PlanCommands, **PLAIN)


@app.callback()
def group() -> None:
    """Find the best layout for a cluster, a workload and objectives. Each figure has a kind, such as measured, and an interval."""


@app.command(_SEARCH, cls=_SearchCommand)
@options_of(title=lambda kind: None, args=PlanArgs)
def search_layouts(args: PlanArgs) -> None:
    """Find the best layout for a cluster, a workload and objectives. `dsjax plan` without a subcommand does the same."""
    from dsjax.plan.explain import explain
    from dsjax.plan.report import details, show, show_sweep, to_json
    from dsjax.plan.search import search
    from dsjax.plan.sweep import read_sweep, sweep

    points = [read_sweep(text) for text in args.sweep or ()]
    plan = search(args.question())
    sweeps = [sweep(plan.question, plan.best, *one) for one in points] if plan.best else []
    if args.pareto:
        from dsjax.plan.pareto import draw_front

        with writing(args.pareto):
            draw_front(plan, args.pareto)
    if args.json_file is not None:
        write_json(args.json_file, to_json(plan, args.model, args.rows, sweeps=sweeps))
        return
    console = report_console()
    show(console, plan, args.model, args.rows)
    if args.explain == "plan":
        details(console, plan, args.model, args.rows)
    elif args.explain:
        why = explain(plan.best, args.explain) if plan.best else "nothing fits: there is nothing to explain"
        console.print(Text(why), soft_wrap=True)
    for swept in sweeps:
        show_sweep(console, swept)


@app.command("compare", cls=PanelledCommand)
@options_of(title=lambda kind: None, args=ServiceArgs)
def compare_layouts(
    args: ServiceArgs,
    layouts: Annotated[
        list[str],
        typer.Argument(
            help="At least two layouts: a mesh (dp=32), a prefill and a decode mesh ('tp=8|dp=24'), or a file from dsjax plan recipe.",
            show_default=False,
        ),
    ],
) -> None:
    """Compare the first layout with the others: ratios, each with its own interval, and the factors that decide them."""
    from dsjax.plan.comparison import compare, show

    found = compare(args.question(), layouts)
    if args.json_file is not None:
        write_json(args.json_file, {"model": args.model, **found.to_json()})
    else:
        show(report_console(), found)


@app.command("fit", cls=PanelledCommand)
@options_of(title=lambda kind: None, args=FitArgs)
def fit(args: FitArgs) -> None:
    """Check whether a layout fits into memory, and with which memory fractions. Exit status 3: it does not fit."""
    from dsjax.plan.fit import DOES_NOT_FIT, fit_mesh, show

    question = args.question()
    verdict = fit_mesh(question, args.mesh or "", args.memory_fraction, args.context)
    if args.json_file is None:
        report_console().print(Text(show(verdict, args.model, question.cluster.name)), soft_wrap=True)
    else:
        write_json(args.json_file, {"model": args.model, "cluster": question.cluster.name, **verdict.to_json()})
    if not verdict.fits:
        raise typer.Exit(DOES_NOT_FIT)


@app.command("step", cls=PanelledCommand)
@options_of(title=lambda kind: None, args=StepArgs)
def step(args: StepArgs) -> None:
    """Predict the time of one batch on each layout, phase by phase, without modelling a service."""
    from dsjax.plan.report import show_usages
    from dsjax.plan.search import instances, usages
    from dsjax.plan.static import no_room, show_static, static_results

    question = args.question()
    _, fitting, too_large = instances(question)
    results, taken = static_results(fitting, args.mode, args.batch), usages(question, fitting + too_large)
    if args.json_file is None:
        console = report_console()
        show_usages(console, taken)
        why = "" if results else no_room(fitting, too_large, args.batch)
        show_static(console, results, args.mode, args.rows, why)
        return
    body = {"model": args.model, "cluster": question.cluster.name, "mode": args.mode}
    ranked, compiled = [r.to_json() for r in results[: args.rows]], [u.to_json() for u in taken]
    write_json(args.json_file, {**body, "ranked": ranked, "compiled": compiled})


@app.command("simulate", cls=PanelledCommand)
@options_of(title=lambda kind: None, args=SimulateArgs)
def simulate(args: SimulateArgs) -> None:
    """Simulate request arrivals on the best deployment, and print latency percentiles and goodput."""
    from dsjax.plan.report import show, to_json
    from dsjax.plan.search import search
    from dsjax.plan.simulation.report import show_simulation, simulations

    plan, at_once, outcomes = search(args.question()), args.request_rate == math.inf, []
    if plan.best:
        skipped = 0 if at_once and args.warmup is None else args.warmup
        how = args.burstiness, args.num_prompts, args.seed, skipped, at_once
        outcomes = simulations(plan.best, plan.question.all_objectives, *how)
    if args.json_file is not None:
        write_json(args.json_file, to_json(plan, args.model, args.rows, outcomes))
        return
    console = report_console()
    show(console, plan, args.model, args.rows)
    if outcomes:
        show_simulation(console, plan.best, outcomes)


@app.command("recipe", cls=PanelledCommand)
@options_of(title=lambda kind: None, args=ServiceArgs)
def recipe(
    args: ServiceArgs,
    file: Annotated[
        Path,
        typer.Argument(
            help="Output: FILE.json; FILE.sh with commands for --engine vllm, sglang or tensorrt-llm; FILE.yaml for NVIDIA Dynamo's "
            "operator; or a directory for a kustomize overlay."
        ),
    ],
) -> None:
    """Write the best deployment as a recipe, a script or manifests. Exit status 1: no deployment fits and meets the objectives."""
    from dsjax.plan.manifests import write_graph, write_overlay
    from dsjax.plan.recipe import check_recipe, write_json_recipe, write_script
    from dsjax.plan.report import show, to_json
    from dsjax.plan.search import search

    check_recipe(file, args.engine)
    plan = search(args.question())
    if plan.winner is None:
        why = "no deployment meets the objectives" if plan.best else "nothing fits"
        report_console(stderr=True).print(Text(f"{file} is not written: {why}", "yellow"))
        raise typer.Exit(1)
    write = {".json": write_json_recipe, ".sh": write_script, ".yaml": write_graph, ".yml": write_graph}
    with writing(file):
        chosen = write.get(file.suffix, write_overlay)
        chosen(file, args.model, plan.question, plan.winner, shlex.join(["dsjax", *sys.argv[1:]]))
    if args.json_file is not None:
        write_json(args.json_file, to_json(plan, args.model, args.rows))
        return
    console = report_console()
    show(console, plan, args.model, args.rows)
    console.print(f"written to {file}", highlight=False, soft_wrap=True)
