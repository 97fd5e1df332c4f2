"""`Measurement`: something that is measured once, and gives values that criteria are held against."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from dsjax.bench.accept.test_bed import TestBed
from dsjax.bench.serve.options import WorkloadOptions
from dsjax.errors import UserError

Verdict = Literal["met", "missed", "not tested"]


@dataclass
class Measured:
    """What came of a measurement.

    absent: name of a value that is missing to (verdict of its criteria, why).
    """

    values: dict[str, float] = field(default_factory=dict)  # name to number, in the units of the kind's `UNITS`
    absent: dict[str, tuple[Verdict, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # sentences that a reader must know
    samples: int | None = None  # requests or samples behind the values; None where that says nothing

    def enter(self, values: Mapping[str, float | None], why_not: str = "", verdict: Verdict = "not tested") -> None:
        """Add values, or why there are none."""
        for name, value in values.items():
            if value is None or not math.isfinite(value):
                self.absent[name] = (verdict, why_not)
            else:
                self.values[name] = float(value)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A measurement as a criteria file describes it; its fields are those of the file's table. title: what a report calls it."""

    KIND: ClassVar[str]
    """The file's word for the kind."""
    UNITS: ClassVar[Mapping[str, str]]
    """Name of each value that the kind gives to its unit; empty for a ratio."""
    ABOVE_ZERO: ClassVar[tuple[str, ...]] = ()
    """Fields of which 0 would be no measurement."""

    name: str
    title: str

    def __post_init__(self):
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not 0 <= value < math.inf:
                raise UserError(f"measurement {self.name}: {name} is {value:g}, expected 0 or more")
            if name in self.ABOVE_ZERO and not value > 0:
                raise UserError(f"measurement {self.name}: {name} is {value:g}, expected more than 0")

    def expected_seconds(self) -> float:
        """How long it takes, as far as that can be known before."""
        return 0.0

    def why_not(self, bed: TestBed) -> str | None:
        """Why it cannot be measured on this test bed, where that is known before; else None."""
        return None

    def depends_on(self, bed: TestBed) -> tuple[str, ...]:
        """What the values depend on beside the fields and the server: hooks, files."""
        return ()

    async def measure(self, bed: TestBed) -> Measured:
        """Measure it. Raises `NotTestedError`: it cannot be measured here."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class RandomLengths(Measurement):
    """A measurement under load, with prompts and answers of random lengths: evenly within mean × (1 ± spread)."""

    ABOVE_ZERO: ClassVar = ("input_tokens", "output_tokens")

    input_tokens: int = 220
    output_tokens: int = 200
    spread: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        if not self.spread < 1:
            raise UserError(f"measurement {self.name}: spread is {self.spread:g}, expected at least 0 and less than 1")

    def workload(self, bed: TestBed) -> WorkloadOptions:
        """The load's requests: of a ShareGPT file where the user gave one."""
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
