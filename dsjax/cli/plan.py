"""`dsjax plan`: a cluster, a workload and objectives in, a layout out, with figures that can be checked."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from dsjax.cli.options import options_of
from dsjax.cli.output import report_console, write_json, writing
from dsjax.plan.arguments import PlanArgs

if TYPE_CHECKING:
    from dsjax.plan.candidate import Candidate
    from dsjax.plan.question import Question
    from dsjax.plan.search import Plan
    from dsjax.plan.simulation.outcome import SimulationOutcome
    from dsjax.plan.sweep import Sweep


@options_of(lambda kind: None, args=PlanArgs)
def plan(args: PlanArgs) -> None:
    """Find the layout for a cluster, a workload and objectives; every figure with its kind and interval."""
    question, slos = args.question()
    if args.fit:
        _show_fit(args, question)
        return
    if args.is_static:
        _show_batches(args, question)
        return
    from dsjax.plan.explain import explain
    from dsjax.plan.report import show, show_sweep, to_json
    from dsjax.plan.search import search
    from dsjax.plan.sweep import read_sweep, sweep

    answer, kept = search(question), []
    if slos:
        from dsjax.plan.percentiles import show_within, within

        answer, kept = within(answer, slos, num_requests=args.num_prompts, seed=args.seed, burstiness=args.burstiness)
    beside = _published_beside(args, question, answer)
    best = answer.winner or (answer.missed[0] if answer.missed else None)
    sweeps = [sweep(question, best, *read_sweep(text)) for text in args.sweep or ()] if best else []
    outcomes = _simulate(args, question, best)
    _draw(args, answer, sweeps)
    _write_recipe(args, question, answer, best)
    found = None
    if args.working_set is not None and best:
        from dsjax.plan.reuse import reuse

        found = reuse(best, args.working_set, args.host_cache_gb * 1e9, args.disk_cache_gb * 1e9)
    if args.json_file is not None:
        body = to_json(answer, args.model, args.rows, sweeps, outcomes) | {"reuse": found and found.to_json()}
        write_json(args.json_file, {**body, "published": beside, "percentiles": [one.to_json(slos) for one in kept]})
        return
    console = report_console()
    if kept:
        show_within(console, kept, slos)
    show(console, answer, args.model, args.rows)
    if found:
        console.print(str(found), highlight=False, soft_wrap=True)
    if beside:
        console.print(Text("published: " + beside, "yellow"))
    if args.explain:
        console.print(
            Text(explain(best, args.explain)) if best else "nothing fits: there is nothing to explain", soft_wrap=True
        )
    if outcomes:
        from dsjax.plan.simulation.report import show_simulation

        show_simulation(console, best, outcomes)
    for swept in sweeps:
        show_sweep(console, swept)


def _show_batches(args: PlanArgs, question: Question) -> None:
    """Show or write one batch of every layout (`--mode static` and its like)."""
    from dsjax.plan.report import show_usages
    from dsjax.plan.search import instances, usages
    from dsjax.plan.static import no_room, show_static, static_of

    _, fitting, too_large = instances(question)
    results, taken = static_of(fitting, args.mode, args.batch), usages(question, fitting + too_large)
    if args.json_file is None:
        console = report_console()
        show_usages(console, taken)
        why = "" if results else no_room(fitting, too_large, args.batch)
        show_static(console, results, args.mode, args.rows, why)
        return
    body = {"model": args.model, "cluster": question.cluster.name, "mode": args.mode}
    ranked, compiled = [r.to_json() for r in results[: args.rows]], [u.to_json() for u in taken]
    write_json(args.json_file, {**body, "ranked": ranked, "compiled": compiled})


def _show_fit(args: PlanArgs, question: Question) -> None:
    """Show or write whether the layout fits (`--fit`)."""
    from dsjax.plan.fit import DOES_NOT_FIT, asked, show

    about = (question.config, question.cluster, question.options, question.workload)
    verdict = asked(*about, args.mesh or "", args.memory_fraction, args.context)
    if args.json_file is None:
        report_console().print(Text(show(verdict, args.model, question.cluster.name)), soft_wrap=True)
    else:
        write_json(args.json_file, {"model": args.model, "cluster": question.cluster.name, **verdict.to_json()})
    if not verdict.fits:
        raise typer.Exit(DOES_NOT_FIT)


def _published_beside(args: PlanArgs, question: Question, answer: Plan) -> str | None:
    """What published engines would do there, for a plan of dsjax's own figures; None for another."""
    from dsjax.plan.engine import PUBLISHED
    from dsjax.plan.recipe import published_beside
    from dsjax.plan.search import search

    if question.options.engine.name != "dsjax" or args.compiled or args.measured:
        return None
    options = dataclasses.replace(question.options, engine=PUBLISHED, dispatch=args.dispatch or PUBLISHED.dispatch)
    return published_beside(answer.winner, search(dataclasses.replace(question, options=options)).winner)


def _simulate(args: PlanArgs, question: Question, best: Candidate | None) -> list[SimulationOutcome]:
    """Play requests through on the best deployment, where that is asked for."""
    if not (args.simulate and best):
        return []
    from dsjax.plan.simulation.report import simulations

    at_once = bool(args.request_rate)
    skipped = 0 if at_once and args.warmup is None else args.warmup
    return simulations(best, question.bounds, args.burstiness, args.num_prompts, args.seed, skipped, at_once)


def _draw(args: PlanArgs, answer: Plan, sweeps: list[Sweep]) -> None:
    """Write the pictures that are asked for."""
    if not (args.pareto or args.plots):
        return
    from dsjax.plan.pareto import draw_front, draw_sweep, write_html

    if args.pareto:
        with writing(args.pareto):
            (write_html if args.pareto.suffix == ".html" else draw_front)(answer, args.pareto)
    if args.plots:
        with writing(args.plots):
            args.plots.mkdir(parents=True, exist_ok=True)
            for swept in sweeps:
                draw_sweep(swept, args.plots / f"{swept.quantity}.png")


def _write_recipe(args: PlanArgs, question: Question, answer: Plan, best: Any) -> None:
    """Write the winner's recipe, where one is asked for; say why where there is no winner."""
    from dsjax.plan.recipe import recipe, write_script

    path = args.recipe_file
    if path is None:
        return
    if not answer.winner:
        why = "no deployment meets the objectives" if best else "nothing fits"
        report_console(stderr=True).print(Text(f"--recipe {path} is not written: {why}", "yellow"))
        return
    if path.suffix == ".json":
        write_json(path, recipe(args.model, question, answer.winner))
        return
    write = write_script
    if path.suffix in (".yaml", ".yml"):
        from dsjax.plan.dynamo_graph import write_graph as write
    elif path.suffix != ".sh":
        from dsjax.plan.kubernetes import write_overlay as write
    with writing(path):
        write(path, args.model, question, answer.winner, shlex.join(["dsjax", *sys.argv[1:]]))
