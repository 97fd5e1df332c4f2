"""Measurements that send nothing: what the server says of itself, and rows of the network's measurement (`dsjax bench network --json`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dsjax.bench.accept.kinds.kind import Measured, Measurement
from dsjax.bench.accept.test_bed import NotTestedError, TestBed
from dsjax.plan.measured import SEND_RECEIVE

_SAME_SIZE = 1.1
"""Bytes are as asked for up to this factor: those of a collective are a multiple of its ranks."""


@dataclass(frozen=True, kw_only=True)
class ServerMeasurement(Measurement):
    """The longest request, and the devices, that the server names."""

    KIND: ClassVar = "server"
    UNITS: ClassVar = {"max_model_len": "tokens", "devices": "devices"}

    def depends_on(self, bed: TestBed) -> tuple[str, ...]:
        """The values: the server was asked already, and may be started anew with others."""
        return tuple(map(str, self._values(bed).values()))

    async def measure(self, bed: TestBed) -> Measured:
        """Read the facts."""
        values, found = self._values(bed), Measured()
        found.enter({"max_model_len": values["max_model_len"]}, "/v1/models does not say max_model_len")
        found.enter({"devices": values["devices"]}, "the server has no /server_info; give --devices")
        return found

    def _values(self, bed: TestBed) -> dict[str, int | None]:
        facts = bed.server.facts
        return {
            "max_model_len": facts.max_model_len,
            "devices": bed.server.options.devices or facts.num_devices,
        }


@dataclass(frozen=True, kw_only=True)
class LinkMeasurement(Measurement):
    """One size of one collective, or of a message between two devices."""

    KIND: ClassVar = "link"
    UNITS: ClassVar = {"latency_us": "µs", "gb_per_s": "GB/s", "gbit_per_s": "Gbit/s", "aggregate_gbit_per_s": "Gbit/s"}
    ABOVE_ZERO: ClassVar = ("bytes",)

    group: str  # use of the devices' group in the file: `pair`, `host`, `hosts`, `experts`, `tp`
    collective: str
    between_hosts: bool
    bytes: int  # that leave a device

    def why_not(self, bed: TestBed) -> str | None:
        """Without the file nothing is known."""
        return None if bed.network else "--network is not given: the JSON of dsjax bench network on these hosts"

    def depends_on(self, bed: TestBed) -> tuple[str, ...]:
        """When the file was made."""
        return (str(bed.network["date"]),) if bed.network else ()

    async def measure(self, bed: TestBed) -> Measured:
        """Find the row; of several such groups the slower one counts."""
        row = self._row(bed.network)
        ranks, hosts, sent, seconds = row["ranks"], row["hosts"], row["sent_bytes"], row["median_s"]
        gbit, away = sent / seconds * 8 / 1e9, None
        if hosts > 1:
            # Of a message and its answer one is on its way at a time.
            senders = 1 if row["collective"] == SEND_RECEIVE else ranks
            away = senders * gbit * (ranks - ranks / hosts) / (ranks - 1)
        found = Measured(samples=len(row.get("samples_s", ())))
        found.enter({"latency_us": seconds * 1e6, "gb_per_s": gbit / 8, "gbit_per_s": gbit})
        found.enter({"aggregate_gbit_per_s": away}, "the group is within one host")
        found.notes.append(
            f"{ranks} devices ({bed.network['device']['name']}) of {hosts} hosts, {bed.network['date']}."
        )
        return found

    def _row(self, network: Mapping[str, Any]) -> dict[str, Any]:
        where, wanted = (
            "between hosts" if self.between_hosts else "inside a host",
            (self.collective, self.between_hosts),
        )
        rows = [
            r for r in network["rows"] if self.group in r["group"] and (r["collective"], r["between_hosts"]) == wanted
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
