"""Time each collective over each group at each size, in all processes together, and judge it; as tables and as JSON."""

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
_MEMORY_SHARE = 0.5


@dataclass(frozen=True)
class Expectation:
    """Expected seconds of one collective, the bounds beyond which it is a warning or failing, and the expectation's source."""

    expected: float
    warning: float
    failing: float
    source: str


@dataclass(frozen=True, eq=False)
class CollectiveCase:
    """A collective over a group, or a message between two devices, to time at one size."""

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
    samples: tuple[float, ...]  # seconds of one application, or of one way of a message, in the slowest process
    expectation: Expectation | None

    @property
    def median(self) -> float:
        """Median seconds."""
        return statistics.median(self.samples)

    @property
    def bandwidth(self) -> float:
        """Bytes per second that a device sends; nccl-tests' bus bandwidth."""
        return self.sent_bytes / self.median

    @property
    def verdict(self) -> str | None:
        """One of `VERDICTS`; None if the data are right and there is no expectation."""
        if not self.correct:
            return VERDICTS[2]
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
    before: dict[tuple, list[CollectiveRow]] = {}
    with results.collecting(agree):
        for case in todo:
            program = CollectiveProgram(case.group, case.collective, case.size, dtype)
            smaller = before.setdefault((case.group, case.collective), [])
            if reason := why_not(case, program, smaller, options.row_limit, agree):
                results.skipped.append((case, reason))
                continue
            part = case.group.takes_part
            correct = all(agree("correct", program.arrives_right() if part else True))
            prepared = program.loop() if part else PreparedCase(lambda count: None)
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
    """Time a collective `repeats` times; return seconds of one application in the slowest process, or nothing if the times are noise."""
    prepared.agree = agree
    prepared.warm_up()
    times = prepared.take(Budget(math.inf, repeats))
    return tuple(times.seconds_each) if times else ()


def why_not(
    case: CollectiveCase, program: CollectiveProgram, before: list[CollectiveRow], limit: float, agree: Agree
) -> str | None:
    """Return one line that says why a case cannot be timed, the same in all processes; else None. before: rows of smaller sizes."""
    device = jax.local_devices()[0]
    is_shared = device.platform == "cpu"
    if case.collective == "ragged_all_to_all" and device.platform not in NATIVE_PLATFORMS:
        return "XLA has it on GPUs and TPUs only; elsewhere serving emulates it by all_to_all"
    local_devices = sum(peer.process_index == device.process_index for peer in case.group.devices.flat)
    # Emulated devices of all processes on a host share its memory.
    place, users = (socket.gethostname(), max(1, local_devices)) if is_shared else (str(device.process_index), 1)
    hosts: dict[str, list[tuple[int, int]]] = {}
    for host, count, free in agree("free", [place, users, free_memory(device)]):
        hosts.setdefault(host, []).append((count, free))
    needs = [
        (program.memory * sum(count for count, _ in told), min(free for _, free in told)) for told in hosts.values()
    ]
    needed, free = max(needs, key=lambda need: need[0] / max(need[1], 1))
    if needed > _MEMORY_SHARE * free:
        return f"needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
    if before and _seconds_by(before, program.sent_bytes) > limit:
        return f"would take more than --row-limit {limit:g} s, by the size before it"
    return None


def _seconds_by(before: list[CollectiveRow], sent: int) -> float:
    """Extrapolate from the last size before. A message's smallest row is its latency, which does not grow with the bytes."""
    fixed = before[0].median if before[0].case.collective == SEND_RECEIVE else 0.0
    return fixed + (before[-1].median - fixed) * sent / before[-1].sent_bytes


def expect(cluster: Cluster, case: CollectiveCase, sent: int) -> Expectation:
    """Return a cluster file's expectation: from its `[acceptance]` table for this collective, or the planner's estimate for its links."""
    group, limits = case.group, cluster.acceptance
    place = "between_hosts" if group.between_hosts else "inside_host"
    if bounds := getattr(limits, place).get(case.collective):
        seconds = bounds.latency_us * 1e-6 + sent / (bounds.gb_per_s * 1e9)
        source = f"{cluster.name}: acceptance.{place}.{case.collective}"
    else:
        near = group.near(cluster.domain, cluster.devices_per_host)
        if case.collective == "all_reduce":
            seconds = all_reduce(cluster, group.ranks, sent * group.ranks / (2 * (group.ranks - 1)), near)
        else:
            if case.collective == SEND_RECEIVE:  # the only sender has a whole NIC
                cluster = dataclasses.replace(cluster, nics_per_host=cluster.devices_per_host)
            seconds = xla_collective(cluster, group.ranks, sent / (group.ranks - 1), kind=case.collective, near=near)
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
            f"devices of each of {len(by_process)} processes; give the cluster that this is, one process a host"
        )


_STYLES = dict(zip(VERDICTS, ("green", "yellow", "bold red"), strict=True))


def show(console: Console, results: Results, cluster: Cluster | None) -> None:
    """Print a table for each group of devices, the skipped cases, and the verdict."""
    for group in dict.fromkeys(row.case.group for row in results.rows):
        console.print(_table([row for row in results.rows if row.case.group is group]))
    reasons = dict.fromkeys((case.collective, case.group.name, reason) for case, reason in results.skipped)
    for collective, group, reason in reasons:
        console.print(f"left out: {collective} over {group}: {reason}", highlight=False)
    console.print(
        "ms: one collective, or one way of a message (send_receive), median of the repeats, the slowest process of each; "
        "bytes: that leave a device; GB/s: bytes ÷ time, "
        "which nccl-tests calls bus bandwidth.",
        style="dim",
        highlight=False,
    )
    if cluster is None:
        console.print(
            "No --cluster: nothing is expected, only whether the data arrived right is judged.", highlight=False
        )
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
    return table(title, names, cells, [_STYLES[one.verdict] if one.verdict in VERDICTS[1:] else None for one in rows])


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
    and `high_s` (10th and 90th percentile; the extremes of fewer than ten samples), `samples_s`, `bytes_per_s`, `correct` (the data
    arrived right), `expected_s`, `warning_s`, `failing_s`, `expected_source` and `verdict`.
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
