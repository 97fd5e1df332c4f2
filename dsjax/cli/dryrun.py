"""`dsjax dryrun`: the command."""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from dsjax.cli.options import engine_options, prepare_devices
from dsjax.cli.output import JsonFile, report_console, write_json
from dsjax.engine.setup.args import EngineArgs
from dsjax.errors import UserError


@engine_options
def dryrun(
    args: EngineArgs,
    target: Annotated[
        str, typer.Option(help="cpu, a name of configs/hardware (h200, tpu-v5e, …), or a TOML file like those.")
    ] = "cpu",
    step: Annotated[str, typer.Option(help="decode or prefill.")] = "decode",
    batch: Annotated[
        int | None, typer.Option(help="Rows of a DP rank; default: --max-num-seqs, or 32 decodes.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens that a row attends to; default: --max-model-len, or 4096, or the model's positions if fewer."
        ),
    ] = None,
    mla: Annotated[
        str | None, typer.Option(help="MLA form of this step: --mla-decode or --mla-prefill by another name.")
    ] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="Also find the largest batch, context and cache that fit, by compiling.")
    ] = False,
    cluster: Annotated[
        str | None,
        typer.Option(help="Hosts and network: a name of configs/clusters or a file; default: the hardware's own."),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(help="Predict the step's time; write a trace for ui.perfetto.dev (.json or .json.gz)."),
    ] = None,
    timeline_picture: Annotated[
        Path | None, typer.Option(help="Draw it too: .png, .svg or .pdf; default: next to the trace.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Compile the serving step at full size for machines that are not there; read memory, collectives and costs."""
    # The compilers of accelerators that are not there run beside JAX's CPU backend; a GPU that is there must stay untouched.
    os.environ["JAX_PLATFORMS"] = "cpu"
    # XLA warns of each kernel that it cannot tune without the device; what goes wrong is raised.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if mla is not None:
        args = dataclasses.replace(args, **{f"mla_{step}": mla})
    if args.separated:
        raise UserError("a dry run is of one mesh; give --mesh, once for prefill's and once for decode's")
    if args.is_side:
        raise UserError(
            f"--disaggregation-mode {args.disaggregation_mode} changes no step that a dry run looks at; leave it out, and give --step "
            "prefill or --step decode"
        )
    if target == "cpu":
        prepare_devices(args.mesh)
    from dsjax.dryrun.arguments import DryRunArgs
    from dsjax.dryrun.run import dry_run
    from dsjax.dryrun.tables import show

    if timeline_picture and not timeline:
        raise UserError("--timeline-picture needs --timeline FILE")
    request = DryRunArgs(engine=args, target=target, step=step, batch=batch, context=context)
    report = dry_run(request, search=fit, cluster=cluster, timeline=timeline is not None)
    if timeline and report.timeline:
        picture = timeline_picture or timeline.with_name(timeline.name.split(".json")[0] + ".png")
        _write_timeline(report, timeline, picture)
    if json_file is None:
        show(report_console(), report)
        return
    write_json(json_file, report.to_json())


def _write_timeline(report, trace: Path, picture: Path) -> None:
    from dsjax.dryrun.timeline_picture import draw
    from dsjax.dryrun.timeline_trace import write_trace

    r = report.request
    title = (
        f"{r['model']}, {r['mesh']} on {r['target']}, {r['step']}: {r['batch']} × {r['chunk']} tokens of a DP rank, "
        f"context {r['context']:,}, weights {r['weights']}"
    )
    try:
        write_trace(report.timeline, trace, title)
        draw(report.timeline, picture, title)
    except OSError as error:
        raise UserError(f"cannot write the timeline: {error}") from error
    sys.stderr.write(f"wrote {trace} (open it at https://ui.perfetto.dev) and {picture}\n")
