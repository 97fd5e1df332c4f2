"""Replays a recording of steps in this process, and compares every token and every step's time with what was recorded.

    dsjax serve --mesh dp=2 --record-steps steps.dsjax
    python tools/replay_steps.py steps.dsjax
    python tools/replay_steps.py --demo          # records a mixed workload on the demo model first, in a process of its own

The executor is made from the recording's own options; `--model` says where the checkpoint lies here. It must be the one that was
recorded: the fingerprint is compared. Commands are launched and collected in the recorded order, so steps that were in flight together
are so again. Compared are tokens, whether logits were finite, errors, and of scored sequences the most probable tokens;
not log-probabilities.

A step's time is from its launch, or from the end of the step before where that is later, until the host saw that it was done.
In the recorded process the host also planned steps and made text meanwhile, so its times may be longer.

Exits with 1 where a token differs, and with 2 where the recording cannot be replayed.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from dsjax.engine.contract.commands import Command, ConnectExperts, Flush, Score, Step, from_int32s
from dsjax.engine.contract.executor import Executor
from dsjax.engine.device.buckets import Buckets
from dsjax.engine.stream.step_record import Collected, Launched, RecordError, RecordingEnd, collected
from dsjax.errors import UserError
from tools.step_recording import StepRecording


@dataclass(frozen=True)
class Difference:
    """A row whose outcome is not the recorded one. step: the command's number in the stream. row: its place in the rank's command."""

    step: int
    rank: int
    kind: str
    row: int
    slot: int
    recorded: Any
    replayed: Any

    def __str__(self) -> str:
        return (
            f"step {self.step}, rank {self.rank}, {self.kind} row {self.row} (slot {self.slot}): "
            f"recorded {_shown(self.recorded)}, replayed {_shown(self.replayed)}"
        )


@dataclass
class Report:
    """What a replay found.

    Attributes:
        num_uncompared: steps whose results are not in the recording: under way when it ended.
        end: why the recording ended; None where it ends in the middle.
        times: of each kind of step the recorded and the replayed seconds, step by step.
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_differing: int = 0
    num_uncompared: int = 0
    first: Difference | None = None
    end: str | None = None
    times: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def compare(self, command: Command, recorded: Collected, replayed: Collected) -> None:
        """Enter a command's results."""
        self.num_steps += 1
        for difference in _differences(command, recorded, replayed):
            self.num_differing += 1
            self.first = self.first or difference
        for rank in recorded.ranks:
            self.num_tokens += sum(len(_tokens(row)) for rows in (rank.decodes, rank.prefills) for row in rows)
        self.num_tokens += len(recorded.greedy)

    def to_json(self) -> dict[str, Any]:
        """Everything, with statistics in place of single times (seconds)."""
        kinds = {
            kind: {
                "count": len(pairs),
                **{
                    name: _statistics([pair[side] for pair in pairs])
                    for side, name in enumerate(("recorded", "replayed"))
                },
            }
            for kind, pairs in self.times.items()
        }
        first = None if self.first is None else asdict(self.first) | {"text": str(self.first)}
        found = {name: getattr(self, name) for name in ("num_steps", "num_tokens", "num_differing", "num_uncompared")}
        return {**found, "first_difference": first, "end": self.end, "kinds": kinds}


def replay(record: StepRecording, executor: Executor, kind_of: Callable[[Command], str]) -> Report:
    """Give an executor, whose cache is empty, the recorded stream.

    kind_of: under which heading a command's time is listed.

    Raises:
        RecordError: the recording is damaged.
    """
    report = Report()
    waiting: dict[int, tuple[Launched, Any, float]] = {}
    began = time.monotonic()
    ends = (0.0, 0.0)
    for frame in record:
        if isinstance(frame, Launched):
            if isinstance(frame.command, ConnectExperts):
                continue  # which processes compute the experts changes no token
            at = time.monotonic() - began
            pending = executor.launch(frame.command)
            if isinstance(frame.command, Step | Score | Flush):
                waiting[frame.number] = frame, pending, at
        elif isinstance(frame, Collected) and frame.number in waiting:
            launched, pending, at = waiting.pop(frame.number)
            executor.wait(pending)
            done = time.monotonic() - began
            found = collected(frame.number, done, launched.command, executor.collect(pending))
            if isinstance(launched.command, Step | Score):
                report.compare(launched.command, frame, found)
                pair = frame.done - max(launched.time, ends[0]), done - max(at, ends[1])
                report.times.setdefault(kind_of(launched.command), []).append(pair)
            ends = frame.done, done
        elif isinstance(frame, RecordingEnd):
            report.end = frame.reason
    for _, pending, _ in waiting.values():
        executor.collect(pending)
    report.num_uncompared = len(waiting)
    return report


def launch_kind(command: Command, buckets: Buckets) -> str:
    """The shapes that a command is computed in: `decode 8`, `decode 8×3` with two drafts, `prefill 2×128`, `score`."""
    if not isinstance(command, Step):
        return type(command).__name__.lower()
    names = []
    for launch in buckets.launches(command):
        parts = []
        if launch.decode:
            rows, width = launch.decode
            parts.append(f"decode {rows}" + (f"×{width}" if width > 1 else ""))
        if launch.prefill:
            parts.append(f"{'scored' if launch.scored else 'prefill'} {launch.prefill.rows}×{launch.prefill.chunk}")
        names.append(" with ".join(parts))
    counted = {name: names.count(name) for name in names}
    return " + ".join(name if count == 1 else f"{count} · {name}" for name, count in counted.items())


def build_executor(record: StepRecording, model: str | None, *, show_progress: bool = False) -> Executor:
    """The executor that the recording's header describes, in this process. JAX must not have started.

    model: the checkpoint's name or directory here; None: as it was recorded.

    Raises:
        RecordError: another checkpoint, or other limits.
        UserError: options that cannot be here.
    """
    from dsjax.checkpoint.fingerprint import fingerprint
    from dsjax.checkpoint.hub import resolve
    from dsjax.engine.setup.args import EngineArgs
    from sharding.emulation import emulate_devices
    from sharding.mesh import MeshSpec

    header = record.header
    options = dict(header.options)
    if model is not None:
        options |= {"model": model, "revision": None}
    args = EngineArgs.from_options(**options)
    directory = resolve(args.model, revision=args.revision)
    found = fingerprint(directory)
    if found != header.fingerprint:
        raise RecordError(
            f"{directory} is another checkpoint than the recorded one: its fingerprint is {found[:16]}…, expected "
            f"{header.fingerprint[:16]}…; give the recorded checkpoint's directory with --model"
        )
    emulate_devices(MeshSpec.parse(args.mesh).num_devices)
    from dsjax.engine.setup import loading

    executor = loading.load_model(args, show_progress=show_progress).executor
    limits = asdict(executor.limits)
    recorded = {"num_stages": 1} | header.limits  # older recordings do not say it
    if limits != recorded:
        differing = [
            f"{name} {limits.get(name)}, recorded {recorded.get(name)}"
            for name in sorted(limits.keys() | recorded.keys())
            if limits.get(name) != recorded.get(name)
        ]
        raise RecordError(
            f"the executor has other limits here ({'; '.join(differing)}): slots and pages would not be the recorded ones. "
            "Where memory decided them, record with --cache-tokens"
        )
    return executor


def times_table(report: Report) -> Table:
    """The times by kind of step, in milliseconds, recorded beside replayed."""
    table = Table(title="Time of a step, ms: recorded → replayed", title_justify="left")
    table.add_column("launches")
    for name in ("count", "mean", "median", "p99"):
        table.add_column(name, justify="right")
    for kind, pairs in sorted(report.times.items(), key=lambda item: -len(item[1])):
        recorded, replayed = (_statistics([pair[side] for pair in pairs]) for side in (0, 1))
        cells = (f"{recorded[name] * 1e3:,.1f} → {replayed[name] * 1e3:,.1f}" for name in recorded)
        table.add_row(kind, str(len(pairs)), *cells)
    return table


def _statistics(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, -(-99 * len(ordered) // 100) - 1)]
    return {"mean": statistics.fmean(ordered), "median": statistics.median(ordered), "p99": p99}


def _differences(command: Command, recorded: Collected, replayed: Collected) -> list[Difference]:
    if isinstance(command, Score):
        pairs = enumerate(zip_longest(recorded.greedy, replayed.greedy))
        return [Difference(recorded.number, 0, "score", at, -1, old, new) for at, (old, new) in pairs if old != new]
    found = []
    for rank, (own, old_rank, new_rank) in enumerate(zip(command.ranks, recorded.ranks, replayed.ranks, strict=True)):
        slots = {
            "decode": list(from_int32s(own.decodes))[::2],
            "prefill": [row.slot for row in own.prefills],
        }
        for kind, of_kind in slots.items():
            old_rows, new_rows = (getattr(side, f"{kind}s") for side in (old_rank, new_rank))
            for row, (slot, old, new) in enumerate(zip(of_kind, old_rows, new_rows, strict=True)):
                if old != new:
                    found.append(Difference(recorded.number, rank, kind, row, slot, old, new))
    return found


def _tokens(row: Any) -> list[int]:
    if isinstance(row, int):
        return [row]
    return [] if row is None else row.token_ids


def _shown(row: Any) -> str:
    if row is None:
        return "no token"
    if isinstance(row, int):
        return f"token {row}"
    tokens = f"tokens {row.token_ids}" if row.token_ids else "no token"
    return f"{tokens}{'' if row.finite else ', not finite'}{f', {row.error!r}' if row.error else ''}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", help="a recording (dsjax serve --record-steps FILE)")
    parser.add_argument("--model", help="the recorded checkpoint's name or directory on this machine")
    parser.add_argument("--json", metavar="FILE", help="write the report there as JSON")
    parser.add_argument(
        "--no-warm-up", action="store_true", help="compile programs at first use; times then include it"
    )
    parser.add_argument("--demo", action="store_true", help="record tools/record_mixed.py's workload on the demo first")
    arguments = parser.parse_args()
    console = Console()
    if (arguments.file is None) != arguments.demo:
        parser.error("give a recording, or --demo, and not both")
    try:
        if arguments.demo:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "steps.dsjax"
                recorder = Path(__file__).with_name("record_mixed.py")
                options = ["--no-warm-up"] if arguments.no_warm_up else []
                subprocess.run([sys.executable, recorder, file, *options], check=True)
                return _replay_file(file, arguments, console)
        return _replay_file(Path(arguments.file), arguments, console)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(f"the recording process failed with exit code {error.returncode}", file=sys.stderr)
        return 2


def _replay_file(file: Path, arguments: argparse.Namespace, console: Console) -> int:
    record = StepRecording(file)
    header = record.header
    executor = build_executor(record, arguments.model)
    import jax

    here = jax.__version__, jax.devices()[0].platform, jax.devices()[0].device_kind
    recorded = header.jax, header.platform, header.device_kind
    if here != recorded:
        console.print(
            f"Recorded with JAX {recorded[0]} on {recorded[1]} ({recorded[2]}), replayed with JAX {here[0]} on {here[1]} "
            f"({here[2]}): other roundings may change tokens."
        )
    if not arguments.no_warm_up:
        executor.warm_up()
    report = replay(record, executor, lambda command: launch_kind(command, executor.buckets))
    executor.shutdown()
    console.print(times_table(report))
    if arguments.json:
        Path(arguments.json).write_text(
            json.dumps({"header": header_json(record), **report.to_json()}, indent=1) + "\n"
        )
    ended = "has no end, so its process was killed" if report.end is None else f"ended with: {report.end}"
    console.print(
        f"{report.num_steps:,} steps compared, {report.num_tokens:,} tokens; {report.num_uncompared} steps without recorded "
        f"results. The recording {ended}."
    )
    if report.first is not None:
        console.print(f"{report.num_differing:,} rows differ. The first: {report.first}", markup=False)
        return 1
    console.print("Every token is equal.")
    return 0


def header_json(record: StepRecording) -> dict[str, Any]:
    """The header as a JSON object."""
    header = record.header
    return {name: getattr(header, name) for name in header.__struct_fields__}


if __name__ == "__main__":
    sys.exit(main())
