"""`TtftMeasurement`: the time to the first token of prompts of one length, one request at a time."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dsjax.bench.accept.kinds.kind import Measured, Measurement
from dsjax.bench.serve.load import run_load
from dsjax.bench.serve.options import WorkloadOptions
from dsjax.bench.serve.statistics import summarise

if TYPE_CHECKING:
    from dsjax.bench.accept.test_bed import TestBed

_PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, kw_only=True)
class TtftMeasurement(Measurement):
    """Prompts of `input_tokens`, `requests` of them, each sent when the one before is answered with one token."""

    UNITS: ClassVar = {**{f"ttft_p{p}": "s" for p in _PERCENTILES}, "ttft_mean": "s", "error_share": ""}

    ABOVE_ZERO: ClassVar = ("input_tokens", "requests")

    input_tokens: int
    requests: int = 30

    def expected_seconds(self) -> float:
        """A second for each request and for the warm-up: nobody knows better before."""
        return self.requests + 1.0

    async def measure(self, bed: "TestBed") -> Measured:
        """Send one request to warm up, then those that count."""
        lengths = {"random_input_len": self.input_tokens, "random_output_len": 1}
        source = await bed.requests(WorkloadOptions(num_prompts=64, seed=bed.seed, **lengths))
        requests = [next(source) for _ in range(self.requests + 1)]
        await bed.server.client.send(requests[0])
        with bed.counting(self.title, self.requests) as report:
            done = [0]

            def on_done(record) -> None:
                done[0] += 1
                report(done[0], "")

            result = await run_load(bed.server.client, requests[1:], [0.0] * self.requests, 1, on_done=on_done)
        statistics = summarise(result, _PERCENTILES, {})
        ttft, found = statistics.latencies["ttft"], Measured(samples=statistics.completed)
        why = bed.why_none(statistics)
        for p in _PERCENTILES:
            found.enter(f"ttft_p{p}", _seconds(ttft.percentiles[p]), why, "missed")
        found.enter("ttft_mean", _seconds(ttft.mean), why, "missed")
        found.enter("error_share", statistics.failed / self.requests, why)
        if 0 < ttft.count < 100:
            found.notes.append(f"P99 of {ttft.count} requests is little more than the largest.")
        return found


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
