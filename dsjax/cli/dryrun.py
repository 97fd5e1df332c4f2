"""`dsjax dryrun`: the command."""

import dataclasses
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from dsjax.cli.options import options_of, prepare_devices
from dsjax.cli.output import report_console, write_json
from dsjax.engine.setup.args import EXECUTOR_OPTIONS, EngineArgs
from dsjax.errors import UserError
from dsjax.options import Checked, check_place, option
from sharding import MeshSpec


@dataclass(frozen=True)
class DryRunOptions(Checked):
    """Options of a dry run in addition to the engine's."""

    target: str = option("cpu", "Device to compile for: cpu, a name in configs/hardware (tpu-v5e, …), or a TOML file.")
    expert_target: str | None = option(None, "With --expert-mesh: target of the expert programs. Default: --target.")
    step: str = option("decode", "Step to compile: decode, prefill or mixed (both in one program).")
    batch: int | None = option(None, "Number of requests per DP rank. Default: --max-num-seqs, or 32 for decode.")
    context: int | None = option(None, "Context length. Default: --max-model-len, or 4096, at most the model's.")
    mla: str | None = option(None, "MLA form of this step, in place of --mla-decode or --mla-prefill.")
    fit: bool = option(False, "Also find the largest batch, context and cache that fit, by compiling.", switch=True)
    cluster: str | None = option(None, "Name in configs/clusters, or a file. Default: as the hardware file assumes.")
    timeline: Path | None = option(None, "Predict the step time; write a trace for ui.perfetto.dev (.json, .json.gz).")
    timeline_picture: Path | None = option(None, "Plot of the timeline: .png, .svg, .pdf. Default: next to the trace.")
    reductions: bool = option(
        False,
        "List every sum whose order of additions may depend on the layout or the batch; fail on an unexplained one.",
        switch=True,
    )
    against: list[str] | None = option(
        None,
        "With --reductions: also compile a variant and compare: batch=1, mesh=dp=4,tp=8 or step=prefill. Repeatable.",
    )
    json_file: str | None = option(None, "Write JSON to this file instead; - for standard output.", flag="--json")


@options_of(title=lambda kind: None, only=EXECUTOR_OPTIONS, args=EngineArgs, options=DryRunOptions)
def dryrun(args: EngineArgs, options: DryRunOptions) -> None:
    """Compile the full-size serving step without the target hardware, and report memory, collectives and costs."""
    # Compilers for absent accelerators run alongside JAX's CPU backend; a GPU in this machine must stay untouched.
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Silence XLA's warnings about kernels that it cannot tune without the device; errors are raised as exceptions.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    target, timeline = options.target, options.timeline
    for flag, place in (
        ("--json", options.json_file),
        ("--timeline", options.timeline),
        ("--timeline-picture", options.timeline_picture),
    ):
        check_place(flag, None if place is None else str(place))  # compiling may take minutes
    if options.mla is not None and options.step == "mixed":
        raise UserError("--mla is of one kind of rows, and a mixed step has both; give --mla-decode and --mla-prefill")
    if options.mla is not None and options.step in ("decode", "prefill"):  # other values are rejected below
        args = dataclasses.replace(args, **{f"mla_{options.step}": options.mla})
    if options.expert_target is not None and args.expert_mesh is None:
        raise UserError("--expert-target is of --attention-mesh and --expert-mesh; give these too")
    if args.expert_mesh is not None:
        _apart(args, options)
        return
    if target == "cpu":
        meshes = [args.mesh, *(text[5:] for text in options.against or () if text.startswith("mesh="))]
        prepare_devices(max(meshes, key=lambda mesh: MeshSpec.parse(mesh).num_devices))
    from dsjax.dryrun.arguments import DryRunArgs
    from dsjax.dryrun.report import StagesReport
    from dsjax.dryrun.run import dry_run
    from dsjax.dryrun.tables import show, show_stages

    if options.timeline_picture and not timeline:
        raise UserError("--timeline-picture needs --timeline FILE")
    request = DryRunArgs(engine=args, target=target, step=options.step, batch=options.batch, context=options.context)
    report = dry_run(request, search=options.fit, cluster=options.cluster, timeline=timeline is not None,
        reductions=options.reductions, against=options.against or ())  # fmt: skip
    stages = report.stages if isinstance(report, StagesReport) else [report]
    for number, one in enumerate(stages):
        if timeline and one.timeline:
            own = timeline if len(stages) == 1 else _of_stage(timeline, number)
            picture = options.timeline_picture or own.with_name(own.name.split(".json")[0] + ".png")
            _write_timeline(one, own, picture if own is timeline else _of_stage(picture, number))
    if options.json_file is not None:
        write_json(options.json_file, report.to_json())
    elif isinstance(report, StagesReport):
        show_stages(report_console(), report)
    else:
        show(report_console(), report)
    for one in stages:
        if one.orders:
            one.orders.check()


def _of_stage(file: Path, number: int) -> Path:
    """The file for one stage: ``trace.json.gz`` becomes ``trace-stage1.json.gz``."""
    name, dot, kind = file.name.partition(".")
    return file if f"-stage{number}" in name else file.with_name(f"{name}-stage{number}{dot}{kind}")


def _apart(args: EngineArgs, options: DryRunOptions) -> None:
    """Compile and show both sides' programs for attention–FFN disaggregation (AFD)."""
    of_one_mesh = (options.fit, options.reductions, options.against, options.timeline_picture)
    for flag, given in zip(("--fit", "--reductions", "--against", "--timeline-picture"), of_one_mesh, strict=True):
        if given:
            raise UserError(f"{flag} is of one mesh, and --expert-mesh makes two; leave one of the two out")
    if options.target == "cpu":
        from dsjax.engine.afd.options import expert_spec
        from sharding.emulation import emulate_devices

        emulate_devices(MeshSpec.parse(args.mesh).num_devices + expert_spec(args).num_devices)
    from dsjax.dryrun.apart import dry_run_apart
    from dsjax.dryrun.apart_tables import show_apart
    from dsjax.dryrun.arguments import DryRunArgs

    request = DryRunArgs(
        engine=args, target=options.target, step=options.step, batch=options.batch, context=options.context
    )
    report = dry_run_apart(request, expert_target=options.expert_target, cluster=options.cluster,
        timeline=options.timeline is not None)  # fmt: skip
    if options.timeline:
        r = report.request
        title = f"{r['model']}, attention {r['attention_mesh']}, experts {r['expert_mesh']}, {r['step']}: {r['batch']} × {r['chunk']}"
        try:
            report.timeline.write(options.timeline, title)
        except OSError as error:
            raise UserError(f"cannot write the timeline: {error}") from error
        sys.stderr.write(f"wrote {options.timeline} (open it at https://ui.perfetto.dev)\n")
    if options.json_file is None:
        show_apart(report_console(), report)
    else:
        write_json(options.json_file, report.to_json())


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
