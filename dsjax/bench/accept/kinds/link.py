"""`LinkMeasurement`: a row of the network's measurement, `dsjax bench network --json`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dsjax.bench.accept.errors import NotTestedError
from dsjax.bench.accept.kinds.kind import Measured, Measurement
from dsjax.plan.measured_network import SEND_RECEIVE

if TYPE_CHECKING:
    from dsjax.bench.accept.test_bed import TestBed

_SAME_SIZE = 1.1
"""Bytes are as asked for up to this factor: those of a collective are a multiple of its ranks."""


@dataclass(frozen=True, kw_only=True)
class LinkMeasurement(Measurement):
    """One size of one collective, or of a message between two devices.

    Attributes:
        group: use of the devices' group in the file: `pair`, `host`, `hosts`, `experts`, `tp`.
        collective: by the name that the file has.
        between_hosts: whether the group spans hosts.
        bytes: that leave a device.
    """

    UNITS: ClassVar = {"latency_us": "µs", "gb_per_s": "GB/s", "gbit_per_s": "Gbit/s", "aggregate_gbit_per_s": "Gbit/s"}

    ABOVE_ZERO: ClassVar = ("bytes",)

    group: str
    collective: str
    between_hosts: bool
    bytes: int

    def expected_seconds(self) -> float:
        """Nothing: the file is there."""
        return 0.0

    def why_not(self, bed: "TestBed") -> str | None:
        """Without the file nothing is known."""
        return None if bed.network else "--network is not given: the JSON of dsjax bench network on these hosts"

    def depends_on(self, bed: "TestBed") -> tuple[str, ...]:
        """When the file was made."""
        return (str(bed.network["date"]),) if bed.network else ()

    async def measure(self, bed: "TestBed") -> Measured:
        """Find the row; of several such groups the slower one counts."""
        row = self._row(bed.network)
        seconds, found = row["median_s"], Measured(samples=len(row.get("samples_s", ())))
        found.enter("latency_us", seconds * 1e6, "")
        found.enter("gb_per_s", row["sent_bytes"] / seconds / 1e9, "")
        found.enter("gbit_per_s", row["sent_bytes"] / seconds * 8 / 1e9, "")
        away = None
        if row["hosts"] > 1:
            leave = (row["ranks"] - row["ranks"] / row["hosts"]) / (row["ranks"] - 1)
            # Of a message and its answer one is on its way at a time.
            senders = 1 if row["collective"] == SEND_RECEIVE else row["ranks"]
            away = senders * row["sent_bytes"] * leave / seconds * 8 / 1e9
        found.enter("aggregate_gbit_per_s", away, "the group is within one host")
        device = bed.network["device"]
        found.notes.append(f"{row['ranks']} devices ({device['name']}) of {row['hosts']} hosts, {bed.network['date']}.")
        return found

    def _row(self, network: Mapping[str, Any]) -> dict[str, Any]:
        where = "between hosts" if self.between_hosts else "inside a host"
        rows = [
            row
            for row in network["rows"]
            if self.group in row["group"]
            and (row["collective"], row["between_hosts"]) == (self.collective, self.between_hosts)
        ]
        if not rows:
            raise NotTestedError(f"--network has no {self.collective} over a group {self.group!r} {where}")
        sized = [row for row in rows if 1 / _SAME_SIZE <= row["sent_bytes"] / self.bytes <= _SAME_SIZE]
        if not sized:
            sizes = ", ".join(f"{row['sent_bytes']:,}" for row in rows)
            raise NotTestedError(
                f"--network has {self.collective} {where} of {sizes} bytes, and none of {self.bytes:,}"
            )
        return max(sized, key=lambda row: row["median_s"])
