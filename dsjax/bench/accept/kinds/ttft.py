"""`TtftMeasurement`: the time to the first token of prompts of one length, one request at a time."""

from dataclasses import dataclass
from typing import ClassVar

from dsjax.bench.accept.kinds.kind import Measured, Measurement
from dsjax.bench.accept.test_bed import TestBed
from dsjax.bench.serve.load import run_load
from dsjax.bench.serve.options import WorkloadOptions
from dsjax.bench.serve.statistics import figures

_PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, kw_only=True)
class TtftMeasurement(Measurement):
    """Prompts of `input_tokens`, `requests` of them, each sent when the one before is answered with one token."""

    KIND: ClassVar = "ttft"
    UNITS: ClassVar = {**{f"ttft_p{p}": "s" for p in _PERCENTILES}, "ttft_mean": "s", "error_share": ""}
    ABOVE_ZERO: ClassVar = ("input_tokens", "requests")

    input_tokens: int
    requests: int = 30

    def expected_seconds(self) -> float:
        """A second for each request and for the warm-up: nobody knows better before."""
        return self.requests + 1.0

    async def measure(self, bed: TestBed) -> Measured:
        """Send one request to warm up, then those that count."""
        lengths = {"random_input_len": self.input_tokens, "random_output_len": 1}
        source = await bed.requests(WorkloadOptions(num_prompts=64, seed=bed.seed, **lengths))
        client, done = bed.server.client, []
        await client.send(next(source))
        with bed.counting(self.title, self.requests) as report:

            def on_done(record) -> None:
                done.append(record)
                report(len(done), "")

            result = await run_load(client, source, [0.0] * self.requests, 1, on_done=on_done)
        found_in = figures(result.records, result.duration, _PERCENTILES, {}, 1.0)
        answered, found, why = found_in["completed"], Measured(samples=found_in["completed"]), bed.why_none(found_in)
        for name in ("mean", *(f"p{p}" for p in _PERCENTILES)):
            ms = found_in[f"{name}_ttft_ms"]
            found.enter({f"ttft_{name}": ms and ms / 1e3}, why, "missed")
        found.enter({"error_share": found_in["failed"] / self.requests})
        if 0 < answered < 100:
            found.notes.append(f"P99 of {answered} requests is little more than the largest.")
        return found
