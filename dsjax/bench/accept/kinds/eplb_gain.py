"""`EplbGainMeasurement`: the same load on a server that balances its experts, and on one that does not."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dsjax.bench.accept.errors import NotTestedError
from dsjax.bench.accept.kinds.kind import Measured
from dsjax.bench.accept.kinds.load import LoadMeasurement, percentile

if TYPE_CHECKING:
    from dsjax.bench.accept.test_bed import TestBed


@dataclass(frozen=True, kw_only=True)
class EplbGainMeasurement(LoadMeasurement):
    """The load on both servers, one after the other; shares by which `--base-url` is better than `--without-eplb-url`."""

    UNITS: ClassVar = {"throughput_gain": "", "generation_p99_reduction": "", "utilisation_gain": ""}

    def expected_seconds(self) -> float:
        """Both loads."""
        return 2 * super().expected_seconds()

    def why_not(self, bed: "TestBed") -> str | None:
        """Without a second server there is nothing to compare with."""
        if bed.options.without_eplb_url is None:
            return "--without-eplb-url is not given: a server like this one, but without --enable-eplb"
        return None

    def depends_on(self, bed: "TestBed") -> tuple[str, ...]:
        """The other server."""
        options = bed.options
        return (*super().depends_on(bed), options.without_eplb_url or "", *(options.without_eplb_device_metrics or ()))

    async def measure(self, bed: "TestBed") -> Measured:
        """Put the load on the server without balancing first, then on the one with it."""
        figures = []
        async with bed.other(bed.options.without_eplb_url, bed.options.without_eplb_device_metrics or ()) as other:
            for one in (other, bed):
                run = await self.put_load(one)
                good = [record for record in run.counted if record.succeeded]
                if len(good) < self.sessions:
                    raise NotTestedError(
                        f"{one.server.url} answered {len(good)} requests in {self.seconds:g} s, fewer than the {self.sessions} sessions: "
                        "give the measurement more seconds"
                    )
                busy = sum(run.watch.busy) / len(run.watch.busy) if run.watch.busy else None
                slow = percentile([r.latency - r.ttft for r in good], 99)
                figures.append((self.rate(run), slow, busy, len(good)))
        (rate, slow, idle, few), (rate_with, slow_with, busy, more) = figures
        found = Measured(samples=few + more)
        found.enter(
            "throughput_gain", rate_with / rate - 1 if rate else None, "the server without EPLB answered nothing"
        )
        reduced = None if slow is None or slow_with is None or not slow else 1 - slow_with / slow
        found.enter("generation_p99_reduction", reduced, "one of the servers answered nothing", "missed")
        gained = None if idle is None or busy is None or not idle else busy - idle
        where = "URL of the dcgm-exporter beside that server, which tells how busy its devices are"
        found.enter(
            "utilisation_gain", gained, f"give --device-metrics and --without-eplb-device-metrics, each the {where}"
        )
        return found
