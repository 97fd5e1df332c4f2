"""Time each collective over each group at each size, in all processes together; judge the times, and report them as tables and JSON."""

import dataclasses
import math
import socket
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from dsjax.bench.modules.report import origin
from dsjax.bench.modules.setting import Device, free_memory
from dsjax.bench.modules.timing import TOO_NOISY, Budget, PreparedCase, spread
from dsjax.bench.network.options import CollectiveGrid
from dsjax.bench.network.programs import CollectiveProgram, DeviceGroup
from dsjax.bench.processes import Agree, Results
from dsjax.errors import UserError
from dsjax.plan.cluster import Cluster
from dsjax.plan.measured import NETWORK_FORMAT, SEND_RECEIVE
from dsjax.plan.network import all_reduce, xla_collective
from dsjax.tables import table
from sharding.dispatch.ragged import NATIVE_PLATFORMS

VERDICTS = ("as expected", "warning", "failing")
_STYLES = dict(zip(VERDICTS, ("green", "yellow", "bold red"), strict=True))
_MEMORY_SHARE = 0.5  # of the free memory, that a case may use


@dataclass(frozen=True)
class Expectation:
    """Expected seconds of one collective, and the seconds above which its verdict is `warning` or `failing`."""

    expected: float
    warning: float
    failing: float
    source: str  # for the reader of the report


@dataclass(frozen=True, eq=False)
class CollectiveCase:
    """A collective over a group, or a message between two devices, to time at one size: about the bytes that a device sends."""

    group: DeviceGroup
    collective: str
    size: int

    @property
    def title(self) -> str:
        """The name that a progress bar shows."""
        return f"{self.collective} over {self.group.name}, {self.size:,} bytes"


@dataclass(frozen=True, eq=False)
class CollectiveRow:
    """A timed case."""

    case: CollectiveCase
    operand_bytes: int
    sent_bytes: int
    correct: bool
    samples: tuple[float, ...]  # seconds of one collective, or of a message in one direction, in the slowest process
    expectation: Expectation | None

    @property
    def median(self) -> float:
        """Median seconds."""
        return statistics.median(self.samples)

    @property
    def bandwidth(self) -> float:
        """Bytes per second that a device sends, which nccl-tests calls bus bandwidth."""
        return self.sent_bytes / self.median

    @property
    def verdict(self) -> str | None:
        """One of `VERDICTS`: `failing` with wrong data; None with correct data and no expectation."""
        if not self.correct:
            return "failing"
        if self.expectation is None:
            return None
        bounds = (self.expectation.warning, self.expectation.failing)
        return VERDICTS[sum(self.median > bound for bound in bounds)]

    def to_json(self) -> dict[str, Any]:
        """Stable fields."""
        (low, high), group, expectation = spread(sorted(self.samples)), self.case.group, self.expectation
        return {
            "group": list(group.uses),
            "between_hosts": group.between_hosts,
            "ranks": group.ranks,
            "hosts": group.hosts,
            "collective": self.case.collective,
            "operand_bytes": self.operand_bytes,
            "sent_bytes": self.sent_bytes,
            "median_s": self.median,
            "low_s": low,
            "high_s": high,
            "samples_s": list(self.samples),
            "bytes_per_s": self.bandwidth,
            "correct": self.correct,
            "expected_s": expectation and expectation.expected,
            "warning_s": expectation and expectation.warning,
            "failing_s": expectation and expectation.failing,
            "expected_source": expectation and expectation.source,
            "verdict": self.verdict,
        }


def worst(results: Results) -> str | None:
    """Return the worst verdict of all rows; None if no row has one."""
    verdicts = [VERDICTS.index(row.verdict) for row in results.rows if row.verdict]
    return VERDICTS[max(verdicts)] if verdicts else None


def cases(groups: Iterable[DeviceGroup], options: CollectiveGrid) -> Iterator[CollectiveCase]:
    """Yield each collective of each group, and a message between the devices of each pair; small sizes first."""
    for group in groups:
        is_pair = "pair" in group.uses
        for collective in options.collectives:
            if is_pair == (collective == SEND_RECEIVE):
                for size in options.pair_byte_counts if is_pair else options.byte_counts:
                    yield CollectiveCase(group, collective, size)


def run_cases(
    todo: Iterable[CollectiveCase], options: CollectiveGrid, dtype: np.dtype, cluster: Cluster | None, agree: Agree
) -> Results:
    """Time each case in turn; after Ctrl-C or the loss of another process, return the results so far."""
    results = Results()
    rows: dict[tuple, list[CollectiveRow]] = {}
    with results.collecting(agree):
        for case in todo:
            program = CollectiveProgram(case.group, case.collective, case.size, dtype)
            smaller = rows.setdefault((case.group, case.collective), [])
            if reason := why_not(case, program, smaller, options.row_limit, agree):
                results.skipped.append((case, reason))
                continue
            takes_part = case.group.takes_part  # a process that does not still takes part in each all-gather (`agree`)
            correct = all(agree("correct", program.arrives_right() if takes_part else True))
            prepared = program.loop() if takes_part else PreparedCase(lambda count: None)
            samples = sample(prepared, options.repeats, agree)
            if not samples:
                results.skipped.append((case, TOO_NOISY))
                continue
            samples = tuple(seconds / program.hops for seconds in samples)
            expectation = expect(cluster, case, program.sent_bytes) if cluster else None
            row = CollectiveRow(case, program.operand_bytes, program.sent_bytes, correct, samples, expectation)
            results.rows.append(row)
            smaller.append(row)
    return results


def sample(prepared: PreparedCase, repeats: int, agree: Agree) -> tuple[float, ...]:
    """Time a program `repeats` times. Return seconds of one application in the slowest process; empty if the times are noise."""
    prepared.agree = agree
    prepared.warm_up()
    times = prepared.take(Budget(math.inf, repeats))
    return tuple(times.seconds_each) if times else ()


def why_not(
    case: CollectiveCase, program: CollectiveProgram, smaller: list[CollectiveRow], limit: float, agree: Agree
) -> str | None:
    """Return why a case cannot be timed, in one line and the same in all processes; None if it can. smaller: rows of smaller sizes."""
    device = jax.local_devices()[0]
    if case.collective == "ragged_all_to_all" and device.platform not in NATIVE_PLATFORMS:
        return "XLA has it on GPUs and TPUs only; elsewhere serving emulates it by all_to_all"
    needed, free = _most_crowded(case, program.memory, device, agree)
    if needed > _MEMORY_SHARE * free:
        return f"needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
    if smaller and _extrapolate(smaller, program.sent_bytes) > limit:
        return f"would take more than --row-limit {limit:g} s, by the size before it"
    return None


def _most_crowded(case: CollectiveCase, device_bytes: int, device: jax.Device, agree: Agree) -> tuple[int, int]:
    """Return (needed, free) bytes of the fullest memory. Emulated devices of all processes on a host share the host's memory."""
    memory, users = str(device.process_index), 1
    if device.platform == "cpu":
        local_devices = sum(peer.process_index == device.process_index for peer in case.group.devices.flat)
        memory, users = socket.gethostname(), max(1, local_devices)
    totals: dict[str, tuple[int, int]] = {}
    for name, count, free in agree("free", [memory, users, free_memory(device)]):
        count_before, free_before = totals.get(name, (0, free))
        totals[name] = (count_before + count, min(free_before, free))
    users, free = max(totals.values(), key=lambda total: total[0] / max(total[1], 1))
    return device_bytes * users, free


def _extrapolate(smaller: list[CollectiveRow], sent: int) -> float:
    """Predict seconds from the last smaller size. A message's smallest row is its latency, which does not grow with the bytes."""
    fixed = smaller[0].median if smaller[0].case.collective == SEND_RECEIVE else 0.0
    return fixed + (smaller[-1].median - fixed) * sent / smaller[-1].sent_bytes


def expect(cluster: Cluster, case: CollectiveCase, sent: int) -> Expectation:
    """Return the expectation for `sent` bytes of a device: by the cluster file's `[acceptance]` table, or by the planner for its links."""
    group, limits = case.group, cluster.acceptance
    place = "between_hosts" if group.between_hosts else "inside_host"
    if bounds := getattr(limits, place).get(case.collective):
        seconds = bounds.latency_us * 1e-6 + sent / (bounds.gb_per_s * 1e9)
        source = f"{cluster.name}: acceptance.{place}.{case.collective}"
    else:
        near, ranks = group.near(cluster.domain, cluster.devices_per_host), group.ranks
        if case.collective == "all_reduce":  # priced by its operand's bytes, the others by the bytes for one peer
            seconds = all_reduce(cluster, ranks, sent * ranks / (2 * (ranks - 1)), near)
        else:
            if case.collective == SEND_RECEIVE:  # the only sender has a whole NIC
                cluster = dataclasses.replace(cluster, nics_per_host=cluster.devices_per_host)
            seconds = xla_collective(cluster, ranks, sent / (ranks - 1), kind=case.collective, near=near)
        source = f"{cluster.name}: its links, as dsjax plan reckons with them"
    return Expectation(seconds, seconds * limits.warning, seconds * limits.failing, source)


def check_cluster(cluster: Cluster, devices: np.ndarray) -> None:
    """Check that a cluster file can describe these devices.

    Raises:
        UserError: the mesh uses more hosts, or more devices of a host, than the cluster has.
    """
    by_process = Counter(device.process_index for device in devices.flat)
    most = max(by_process.values())
    if most > cluster.devices_per_host or len(by_process) > cluster.hosts:
        raise UserError(
            f"--cluster {cluster.name} has {cluster.hosts} hosts of {cluster.devices_per_host} devices, and the mesh takes {most} "
            f"devices of each of {len(by_process)} processes; give the file of this cluster, and start one process per host"
        )


def show(console: Console, results: Results, cluster: Cluster | None) -> None:
    """Print a table for each group of devices, the skipped cases, and the verdict."""
    for group in dict.fromkeys(row.case.group for row in results.rows):
        console.print(_table([row for row in results.rows if row.case.group is group]))
    reasons = dict.fromkeys((case.collective, case.group.name, reason) for case, reason in results.skipped)
    for collective, group, reason in reasons:
        console.print(f"left out: {collective} over {group}: {reason}", highlight=False)
    console.print(
        "ms: one collective, or a message in one direction (send_receive): the median over the repeats, in the slowest process; "
        "bytes: what a device sends; GB/s: bytes ÷ time, which nccl-tests calls bus bandwidth.",
        style="dim",
        highlight=False,
    )
    if cluster is None:
        console.print("Without --cluster, no time is expected; only the data are checked.", highlight=False)
    if verdict := worst(results):
        counts = Counter(row.verdict for row in results.rows)
        text = ", ".join(f"{counts[each]} {each}" for each in VERDICTS)
        console.print(f"{verdict}: {text}", style=_STYLES[verdict], highlight=False)


def _table(rows: list[CollectiveRow]) -> Table:
    group = rows[0].case.group
    where = f"between {group.hosts} hosts" if group.between_hosts else "inside a host"
    title = f"{group.name}: {len(group.devices)} × {group.ranks} ranks, {where}"
    names = ("<", "bytes", "ms", "least–most", "GB/s", "expected ms", "warning", "failing", "<")
    cells = []
    for row in rows:
        limits = row.expectation
        bounds = (limits.expected, limits.warning, limits.failing) if limits else ()
        cells.append(
            [
                row.case.collective,
                f"{row.sent_bytes:,}",
                f"{row.median * 1e3:.4g}",
                f"{min(row.samples) * 1e3:.3g}–{max(row.samples) * 1e3:.3g}",
                f"{row.bandwidth / 1e9:.3g}",
                *([f"{seconds * 1e3:.3g}" for seconds in bounds] or [""] * 3),
                ("" if row.correct else "data wrong: ") + (row.verdict or ""),
            ]
        )
    return table(title, names, cells, [_STYLES[row.verdict] if row.verdict in VERDICTS[1:] else None for row in rows])


def to_json(
    results: Results,
    options: CollectiveGrid,
    dtype: np.dtype,
    cluster: Cluster | None,
    device: Device,
    processes: list[dict[str, Any]],
) -> dict[str, Any]:
    """Stable fields. `verdict` is as expected, warning, failing or None (no expectation); `skipped` has skipped cases, with `reason`.

    A row has `group`, `between_hosts`, `ranks`, `hosts`, `collective`, `operand_bytes`, `sent_bytes` (by a device), `median_s`, `low_s`
    and `high_s` (10th and 90th percentile; the extremes of fewer than ten samples), `samples_s`, `bytes_per_s`, `correct` (whether the
    data arrived right), `expected_s`, `warning_s`, `failing_s`, `expected_source` and `verdict`.
    """
    return {
        **origin(NETWORK_FORMAT, device),
        "mesh": options.mesh,
        "processes": processes,
        "cluster": cluster and cluster.name,
        "dtype": str(dtype),
        "repeats": options.repeats,
        "verdict": worst(results),
        "partial": results.partial,
        "skipped": [
            {"group": list(c.group.uses), "collective": c.collective, "bytes": c.size, "reason": r}
            for c, r in results.skipped
        ],
        "rows": [row.to_json() for row in results.rows],
    }
