"""`Measurement`: base class of acceptance measurements, whose values the criteria bound; and the kinds that send no requests.

These kinds read what the server reports about itself, and rows of a network benchmark (`dsjax bench network --json`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from dsjax.bench.accept.test_bed import NotTestedError, TestBed
from dsjax.bench.serve.options import WorkloadOptions
from dsjax.errors import UserError
from dsjax.plan.measured import SEND_RECEIVE

Verdict = Literal["met", "missed", "not tested"]


@dataclass
class Measured:
    """Result of a measurement."""

    values: dict[str, float] = field(default_factory=dict)  # name to number, in the units of the kind's `UNITS`
    # maps the name of each missing value to (verdict of its criteria, reason)
    absent: dict[str, tuple[Verdict, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # sentences for the report
    samples: int | None = None  # requests or samples behind the values; None where a count is meaningless

    def enter(self, values: Mapping[str, float | None], why_not: str = "", verdict: Verdict = "not tested") -> None:
        """Add finite values; record all others as absent, with `verdict` and `why_not`."""
        for name, value in values.items():
            if value is None or not math.isfinite(value):
                self.absent[name] = (verdict, why_not)
            else:
                self.values[name] = float(value)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A measurement of a criteria file; the fields are the keys of its table."""

    KIND: ClassVar[str]
    """Value of `kind` in the file."""
    UNITS: ClassVar[Mapping[str, str]]
    """Maps the name of each value to its unit, which is empty for a ratio."""
    ABOVE_ZERO: ClassVar[tuple[str, ...]] = ()
    """Fields that must be greater than 0."""

    name: str
    title: str  # name in reports

    def __post_init__(self):
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not 0 <= value < math.inf:
                raise UserError(f"measurement {self.name}: {name} is {value:g}, expected 0 or more")
            if name in self.ABOVE_ZERO and not value > 0:
                raise UserError(f"measurement {self.name}: {name} is {value:g}, expected more than 0")

    def expected_seconds(self) -> float:
        """Return the estimated duration in seconds."""
        return 0.0

    def why_not(self, bed: TestBed) -> str | None:
        """Return the reason if it is already known that the measurement cannot run on this test bed, else None."""
        return None

    def depends_on(self, bed: TestBed) -> tuple[str, ...]:
        """Return what the values depend on besides the fields and the server: hooks, files."""
        return ()

    async def measure(self, bed: TestBed) -> Measured:
        """Run the measurement. Raises `NotTestedError` if it cannot run here."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class RandomLengths(Measurement):
    """A measurement under load, with prompt and output lengths drawn uniformly from mean × (1 ± spread)."""

    ABOVE_ZERO: ClassVar = ("input_tokens", "output_tokens")

    input_tokens: int = 220
    output_tokens: int = 200
    spread: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        if not self.spread < 1:
            raise UserError(f"measurement {self.name}: spread is {self.spread:g}, expected at least 0 and less than 1")

    def workload(self, bed: TestBed) -> WorkloadOptions:
        """Return the load's workload: the user's ShareGPT file if given, else random lengths."""
        path = bed.options.dataset_path
        if path is not None:
            return WorkloadOptions(dataset_name="sharegpt", dataset_path=path, num_prompts=5000, seed=bed.seed)
        return WorkloadOptions(
            num_prompts=64,
            seed=bed.seed,
            random_input_len=self.input_tokens,
            random_output_len=self.output_tokens,
            random_range_ratio=self.spread,
        )


_SAME_SIZE = 1.1
"""Factor within which two sizes match: a collective's bytes are rounded to a multiple of its ranks."""


@dataclass(frozen=True, kw_only=True)
class ServerMeasurement(Measurement):
    """Maximum request length and number of devices that the server reports."""

    KIND: ClassVar = "server"
    UNITS: ClassVar = {"max_model_len": "tokens", "devices": "devices"}

    def depends_on(self, bed: TestBed) -> tuple[str, ...]:
        """Return the reported values: a restarted server may have others."""
        return tuple(map(str, self._values(bed).values()))

    async def measure(self, bed: TestBed) -> Measured:
        """Read what the server reports."""
        values = self._values(bed)
        measured = Measured()
        measured.enter({"max_model_len": values["max_model_len"]}, "/v1/models does not say max_model_len")
        measured.enter({"devices": values["devices"]}, "the server has no /server_info; give --devices")
        return measured

    def _values(self, bed: TestBed) -> dict[str, int | None]:
        facts = bed.server.facts
        return {"max_model_len": facts.max_model_len, "devices": bed.server.options.devices or facts.num_devices}


@dataclass(frozen=True, kw_only=True)
class LinkMeasurement(Measurement):
    """One size of one collective, or of a point-to-point message between two devices."""

    KIND: ClassVar = "link"
    UNITS: ClassVar = {"latency_us": "µs", "gb_per_s": "GB/s", "gbit_per_s": "Gbit/s", "aggregate_gbit_per_s": "Gbit/s"}
    ABOVE_ZERO: ClassVar = ("bytes",)

    group: str  # use of the device group in the file: `pair`, `host`, `hosts`, `experts`, `tp`
    collective: str
    between_hosts: bool
    bytes: int  # sent by a device

    def why_not(self, bed: TestBed) -> str | None:
        """Return the reason if `--network` is missing, else None."""
        return None if bed.network else "--network is not given: the JSON of dsjax bench network on these hosts"

    def depends_on(self, bed: TestBed) -> tuple[str, ...]:
        """Return the date of the network benchmark."""
        return (str(bed.network["date"]),) if bed.network else ()

    async def measure(self, bed: TestBed) -> Measured:
        """Look up the row; if several groups match, the slowest counts."""
        row = self._row(bed.network)
        ranks, hosts, sent_bytes, seconds = row["ranks"], row["hosts"], row["sent_bytes"], row["median_s"]
        gbit_per_s = sent_bytes / seconds * 8 / 1e9
        aggregate_gbit_per_s = None
        if hosts > 1:
            # In a direct exchange, each rank sends equally to all others. A message and its reply alternate: one rank sends at a time.
            senders = 1 if row["collective"] == SEND_RECEIVE else ranks
            aggregate_gbit_per_s = senders * gbit_per_s * (ranks - ranks / hosts) / (ranks - 1)
        measured = Measured(samples=len(row.get("samples_s", ())))
        measured.enter({"latency_us": seconds * 1e6, "gb_per_s": gbit_per_s / 8, "gbit_per_s": gbit_per_s})
        measured.enter({"aggregate_gbit_per_s": aggregate_gbit_per_s}, "the group is within one host")
        measured.notes.append(
            f"{ranks} devices ({bed.network['device']['name']}) of {hosts} hosts, {bed.network['date']}."
        )
        return measured

    def _row(self, network: Mapping[str, Any]) -> dict[str, Any]:
        where = "between hosts" if self.between_hosts else "inside a host"
        wanted = (self.collective, self.between_hosts)
        rows = [
            r for r in network["rows"] if self.group in r["group"] and (r["collective"], r["between_hosts"]) == wanted
        ]
        if not rows:
            raise NotTestedError(f"--network has no {self.collective} over a group {self.group!r} {where}")
        same_size = [row for row in rows if 1 / _SAME_SIZE <= row["sent_bytes"] / self.bytes <= _SAME_SIZE]
        if not same_size:
            sizes = ", ".join(f"{row['sent_bytes']:,}" for row in rows)
            raise NotTestedError(
                f"--network has {self.collective} {where} of {sizes} bytes, and none of {self.bytes:,}"
            )
        return max(same_size, key=lambda row: row["median_s"])
