"""`dsjax replay`: run recorded steps again, and compare tokens and times. JAX is imported only when it runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from dsjax.cli.options import prepare_devices
from dsjax.cli.output import JsonFile, report_console, write_json
from dsjax.engine.contract.commands import Command, ConnectExperts, Flush, Score, Step, from_int32s
from dsjax.engine.stream.step_record import Collected, Launched, RecordError, RecordingEnd, StepRecording, collected
from dsjax.options import check_place

if TYPE_CHECKING:
    from dsjax.engine.contract.executor import Executor
    from dsjax.engine.device.buckets import Buckets


def replay(
    file: Annotated[str, typer.Argument(help="Recording made by dsjax serve --record-steps FILE.")],
    model: Annotated[
        str | None,
        typer.Option(help="Checkpoint on this machine, if its name or directory differs from the recorded one."),
    ] = None,
    warm_up: Annotated[
        bool, typer.Option(help="Compile all programs first. Otherwise step times include compilation.")
    ] = True,
    json_file: JsonFile = None,
) -> None:
    """Replay recorded engine steps in this process, and compare each token and each step's time with the recording.

    Steps that were in flight together are in flight together again. The comparison covers tokens, errors, whether logits were finite, and
    the most probable tokens of scored sequences, but not log-probabilities. A step's time starts at its launch, or at the end of the
    previous step if that is later, and ends when the host sees the result. Exit status 1: a result differs; 2: replay is impossible.
    """
    check_place("--json", json_file)
    record = StepRecording(file)
    executor = build_executor(record, model)
    import jax

    if warm_up:
        executor.warm_up()
    report = compare(record, executor, lambda command: launch_kind(command, executor.buckets))
    executor.shutdown()
    console, header = report_console(stderr=json_file == "-"), record.header
    console.print(times_table(report))
    current = jax.__version__, jax.devices()[0].platform, jax.devices()[0].device_kind
    recorded = header.jax, header.platform, header.device_kind
    if current != recorded:
        console.print(
            f"Recorded with JAX {' '.join(recorded)}, replayed with {' '.join(current)}: rounding may change tokens."
        )
    if json_file:
        header_fields = {name: getattr(header, name) for name in header.__struct_fields__}
        write_json(json_file, {"header": header_fields, **report.to_json()})
    ended = "has no end, so its process was killed" if report.end is None else f"ended with: {report.end}"
    console.print(
        f"{report.num_steps:,} steps compared, {report.num_tokens:,} tokens; {report.num_uncompared} steps without recorded "
        f"results. The recording {ended}."
    )
    if report.num_differing:
        console.print(f"{report.num_differing:,} rows differ. The first: {report.first_difference}", markup=False)
        raise typer.Exit(1)
    console.print("Every token is equal.")


@dataclass
class Report:
    """Result of a replay."""

    num_steps: int = 0
    num_tokens: int = 0
    num_differing: int = 0
    num_uncompared: int = 0  # steps that were in flight when the recording ended, without recorded results
    # text that names the first row, or scored position, whose result differs from the recorded one
    first_difference: str | None = None
    end: str | None = None  # why the recording ended; None if it stops without an end record
    # (recorded, replayed) seconds of each step, by kind of step
    times: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def add(self, command: Command, recorded: Collected, replayed: Collected) -> None:
        """Compare a command's results and count them."""
        self.num_steps += 1
        for difference in _differences(command, recorded, replayed):
            self.num_differing += 1
            self.first_difference = self.first_difference or difference
        rows = [row for rank in recorded.ranks for row in (*rank.decodes, *rank.prefills) if row is not None]
        self.num_tokens += sum(1 if isinstance(row, int) else len(row.token_ids) for row in rows)
        self.num_tokens += len(recorded.greedy)

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON, with statistics (seconds) instead of individual times."""
        kinds = {
            kind: {"count": len(pairs), "recorded": _statistics(pairs, 0), "replayed": _statistics(pairs, 1)}
            for kind, pairs in self.times.items()
        }
        return {name: value for name, value in vars(self).items() if name != "times"} | {"kinds": kinds}


def compare(record: StepRecording, executor: Executor, kind_of: Callable[[Command], str]) -> Report:
    """Replay the recorded stream on an executor with an empty cache. kind_of: name under which a command's step time is listed.

    Raises:
        RecordError: the recording is damaged.
    """
    report, start = Report(), time.monotonic()
    last_recorded_end = last_replayed_end = 0.0
    in_flight: dict[int, tuple[Launched, Any, float]] = {}  # by command number: frame, pending result, launch time
    for frame in record:
        if isinstance(frame, Launched):
            if isinstance(frame.command, ConnectExperts):
                continue  # which processes compute the experts changes no token
            launched_at = time.monotonic() - start
            pending = executor.launch(frame.command)
            if isinstance(frame.command, Step | Score | Flush):  # commands with a result
                in_flight[frame.number] = frame, pending, launched_at
        elif isinstance(frame, Collected) and frame.number in in_flight:
            launched, pending, launched_at = in_flight.pop(frame.number)
            executor.wait(pending)
            done = time.monotonic() - start
            replayed = collected(frame.number, done, launched.command, executor.collect(pending))
            if isinstance(launched.command, Step | Score):
                report.add(launched.command, frame, replayed)
                recorded_seconds = frame.done - max(launched.time, last_recorded_end)
                replayed_seconds = done - max(launched_at, last_replayed_end)
                times = report.times.setdefault(kind_of(launched.command), [])
                times.append((recorded_seconds, replayed_seconds))
            last_recorded_end, last_replayed_end = frame.done, done
        elif isinstance(frame, RecordingEnd):
            report.end = frame.reason
    for _, pending, _ in in_flight.values():
        executor.collect(pending)
    report.num_uncompared = len(in_flight)
    return report


def launch_kind(command: Command, buckets: Buckets) -> str:
    """Return a step's batch shapes: `decode 8 rows`, `decode 8 rows × 3` with two drafts, `prefill 2 × 128`; `score`."""
    from dsjax.engine.device.programs import shape_label

    if not isinstance(command, Step):
        return type(command).__name__.lower()
    return ", ".join(shape_label(launch.decode, launch.prefill) for launch in buckets.launches(command))


def build_executor(record: StepRecording, model: str | None) -> Executor:
    """Build the executor that the recording's header describes, in this process. JAX must not be initialised yet.

    model: the checkpoint's name or directory on this machine; None: as recorded.

    Raises:
        RecordError: the checkpoint or the executor's limits differ from the recorded ones.
        UserError: the recorded options are not possible on this machine.
    """
    from dsjax.checkpoint.fingerprint import fingerprint
    from dsjax.checkpoint.hub import resolve
    from dsjax.engine.setup.args import EngineArgs

    header = record.header
    overrides = {} if model is None else {"model": model, "revision": None}
    args = EngineArgs.from_options(**header.options | overrides)
    directory = resolve(args.model, revision=args.revision)
    found = fingerprint(directory)
    if found != header.fingerprint:
        raise RecordError(
            f"{directory} is not the recorded checkpoint: its fingerprint is {found[:16]}…, expected "
            f"{header.fingerprint[:16]}…; give the recorded checkpoint with --model"
        )
    prepare_devices(args.mesh)
    from dsjax.engine.setup import loading

    executor = loading.load_model(args, show_progress=True).executor
    limits = asdict(executor.limits)
    recorded = header.limits
    names = sorted(name for name in limits.keys() | recorded.keys() if limits.get(name) != recorded.get(name))
    wrong = [f"{name} {limits.get(name)}, recorded {recorded.get(name)}" for name in names]
    if wrong:
        raise RecordError(
            f"the executor has different limits here ({'; '.join(wrong)}): slots and pages would not be the recorded ones. "
            "Where memory decided them, record with --cache-tokens"
        )
    return executor


def times_table(report: Report) -> Table:
    """Return a table of recorded and replayed times by kind of step, in milliseconds."""
    table = Table(title="Time of a step, ms: recorded → replayed", title_justify="left")
    table.add_column("launches")
    for name in ("count", "mean", "median", "p99"):
        table.add_column(name, justify="right")
    for kind, pairs in sorted(report.times.items(), key=lambda item: -len(item[1])):
        recorded, replayed = _statistics(pairs, 0), _statistics(pairs, 1)
        cells = (f"{recorded[name] * 1e3:,.1f} → {replayed[name] * 1e3:,.1f}" for name in recorded)
        table.add_row(kind, str(len(pairs)), *cells)
    return table


def _statistics(pairs: list[tuple[float, float]], side: int) -> dict[str, float]:  # side 0: recorded, 1: replayed
    times = sorted(pair[side] for pair in pairs)
    p99 = times[-(-99 * len(times) // 100) - 1]  # nearest-rank percentile
    return {"mean": statistics.fmean(times), "median": statistics.median(times), "p99": p99}


def _differences(command: Command, recorded: Collected, replayed: Collected) -> Iterator[str]:
    """Describe the rows that differ. Results are in the order of a rank's `decodes`, which are (slot, limit) pairs, and `prefills`."""
    step = f"step {recorded.number}"
    if isinstance(command, Score):
        for place, (old, new) in enumerate(zip_longest(recorded.greedy, replayed.greedy)):
            if old != new:
                yield f"{step}, scored position {place}: recorded {old}, replayed {new}"
        return
    for rank, (part, old_rank, new_rank) in enumerate(zip(command.ranks, recorded.ranks, replayed.ranks, strict=True)):
        slots = {"decode": from_int32s(part.decodes)[::2], "prefill": [row.slot for row in part.prefills]}
        for kind, kind_slots in slots.items():
            rows = zip(kind_slots, getattr(old_rank, f"{kind}s"), getattr(new_rank, f"{kind}s"), strict=True)
            for row, (slot, old, new) in enumerate(rows):
                if old != new:
                    yield f"{step}, rank {rank}, {kind} row {row} (slot {slot}): recorded {old}, replayed {new}"
