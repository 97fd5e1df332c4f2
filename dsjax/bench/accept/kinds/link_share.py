"""`LinkShareMeasurement`: what is left of a link's bandwidth where the links are limited, from two runs of `dsjax bench network`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dsjax.bench.accept.kinds.kind import Measured
from dsjax.bench.accept.kinds.link import LinkMeasurement

if TYPE_CHECKING:
    from dsjax.bench.accept.test_bed import TestBed


@dataclass(frozen=True, kw_only=True)
class LinkShareMeasurement(LinkMeasurement):
    """One row of the network's measurement with limited links beside the same row without a limit.

    Attributes:
        limit: which of the files of `--limited-network`: what is left to the links, as the criteria file calls it.
    """

    UNITS: ClassVar = {"bandwidth_share": ""}

    limit: str

    def why_not(self, bed: "TestBed") -> str | None:
        """Both files are needed."""
        if self.limit not in bed.options.limited_networks:
            return f"--limited-network {self.limit}=FILE is not given: the JSON of dsjax bench network while the links are limited so"
        return super().why_not(bed)

    def depends_on(self, bed: "TestBed") -> tuple[str, ...]:
        """When the files were made."""
        limited = bed.options.limited_networks.get(self.limit)
        return super().depends_on(bed) + ((str(limited["date"]),) if limited else ())

    async def measure(self, bed: "TestBed") -> Measured:
        """Divide the two rates."""
        limited = bed.options.limited_networks[self.limit]
        rows = self._row(bed.network), self._row(limited, f"--limited-network {self.limit}")
        before, during = (row["sent_bytes"] / row["median_s"] for row in rows)
        found = Measured(samples=min(len(row.get("samples_s", ())) for row in rows))
        found.enter("bandwidth_share", during / before, "")
        found.notes.append(
            f"{before / 1e9:.3g} GB/s, {bed.network['date']}, and {during / 1e9:.3g}, {limited['date']}."
        )
        return found
