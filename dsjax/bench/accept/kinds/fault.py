"""`FaultMeasurement`: load before, during and after a fault that the user's hooks inject and remove."""

import asyncio
import contextlib
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from dsjax.bench.accept.kinds.kind import Measured, RandomLengths
from dsjax.bench.accept.kinds.load import tokens_between
from dsjax.bench.accept.test_bed import NotTestedError, TestBed
from dsjax.bench.serve.records import RequestRecord

_BACK = 0.9
"""Share of the pre-fault token rate at which a server counts as recovered."""
_MOST_WARM_UP = 120.0
"""Maximum seconds to wait for as many answers as sessions before the fault."""
_LEAST_WINDOW, _TOKENS_OF_WINDOW = 2.0, 100
"""Window of a rate: two seconds, or the time of a hundred tokens at the pre-fault rate if longer."""


class FaultTimes(NamedTuple):
    """Phases of a fault measurement, in seconds since the load began.

    steady: sessions are warm. begun, broken: fault hook started, ended. mending, mended: `-end` hook started, ended. over: watch ended.
    """

    steady: float
    begun: float
    broken: float
    mending: float
    mended: float
    over: float


@dataclass(frozen=True, kw_only=True)
class FaultMeasurement(RandomLengths):
    """Closed-loop sessions that keep sending during a fault.

    hook: name of the hook. value: replaces `{value}` in its commands. before, hold: seconds of load before and during the fault. watch:
    maximum seconds after it; ends when the rate has recovered. settle: seconds at the start that do not count; the following wait for
    as many answers as sessions does not count either.
    """

    KIND: ClassVar = "fault"
    UNITS: ClassVar = {"throughput_loss": "", "ttft_growth": "", "error_share": "", "silence": "s", "recovery": "s"}
    ABOVE_ZERO: ClassVar = (*RandomLengths.ABOVE_ZERO, "sessions", "before", "hold")

    hook: str
    value: str = ""
    sessions: int
    before: float
    hold: float
    watch: float
    settle: float = 0.0

    def expected_seconds(self) -> float:
        """Return the sum of all phases."""
        return self.settle + self.before + self.hold + self.watch

    def why_not(self, bed: TestBed) -> str | None:
        """Return which hook commands are missing; None if both are given."""
        return bed.hooks.why_not(self.hook)

    def depends_on(self, bed: TestBed) -> tuple[str, ...]:
        """Return the hook commands and the ShareGPT path."""
        commands = (bed.hooks.commands.get(name, "") for name in (self.hook, f"{self.hook}-end"))
        return (*commands, bed.options.dataset_path or "")

    async def measure(self, bed: TestBed) -> Measured:
        """Put the load on the server, inject the fault, remove it, and watch until the rate has recovered."""
        source = await bed.requests(self.workload(bed))
        async with (
            bed.clocked(self.title, self.expected_seconds()),
            bed.sessions(source, self.sessions) as (load, records, until, zero),
        ):
            await asyncio.sleep(self.settle)
            await bed.answered(records, self.sessions, _MOST_WARM_UP)
            times = await self._break_and_mend(bed, records, lambda: bed.clock() - zero)
            until.set()
            await load
        return self.evaluate(records, times)

    async def _break_and_mend(self, bed: TestBed, records: list[RequestRecord], now: Callable[[], float]) -> FaultTimes:
        async def mend() -> None:
            await bed.hooks.run(f"{self.hook}-end", self.value)

        steady = now()
        await asyncio.sleep(self.before)
        begun = now()
        try:
            await bed.hooks.run(self.hook, self.value)
            broken = now()
            await asyncio.sleep(self.hold)
        except BaseException:  # Ctrl-C too: the fault must not outlive the command
            with contextlib.suppress(NotTestedError):
                await mend()
            raise
        mending = now()
        try:
            await mend()
        except asyncio.CancelledError:  # Ctrl-C killed the hook half-way: run it again
            with contextlib.suppress(NotTestedError):
                await mend()
            raise
        mended = now()
        base = _rate(records, steady, begun)
        while now() - mended < self.watch and _back_after(records, base, mended, now()) is None:
            await asyncio.sleep(0.25)
        return FaultTimes(steady, begun, broken, mending, mended, now())

    def evaluate(self, records: Sequence[RequestRecord], times: FaultTimes) -> Measured:
        """Compute the values from the requests and the phases."""
        found, nothing = Measured(samples=len(records)), "no token came before the fault"
        base, during = _rate(records, times.steady, times.begun), _rate(records, times.broken, times.mending)
        found.enter({"throughput_loss": 1 - during / base if base else None}, nothing, "missed")
        found.enter({"ttft_growth": _ttft_growth(records, times)}, "too few requests had a first token", "missed")
        failed = [record.error is not None for record in records if record.error is not None or record.end]
        share = sum(failed) / len(failed) if failed else None
        found.enter({"error_share": share}, "no request ended", "missed")
        arrivals = sorted(t for r in records for t in r.chunk_times if t >= times.begun)
        ends = [times.begun, *arrivals, max([times.over, *arrivals])]
        found.enter({"silence": max(later - earlier for earlier, later in itertools.pairwise(ends))})
        back, watched = _back_after(records, base, times.mended, times.over), times.over - times.mended
        if base and self.watch and back is None:
            found.notes.append(
                f"The rate did not come back to {_BACK:.0%} within the {watched:.0f} s that were watched."
            )
            back = watched
        found.enter({"recovery": back}, nothing if self.watch else "watch is 0: nobody looked", "missed")
        found.notes.append(
            f"Of {len(records)} requests: before {base:,.1f} tokens/s, during {during:,.1f}; making the fault took "
            f"{times.broken - times.begun:.1f} s, ending it {times.mended - times.mending:.1f} s."
        )
        return found


def _rate(records: Sequence[RequestRecord], begin: float, end: float) -> float:
    return tokens_between(records, begin, end) / max(end - begin, 1e-9)


def _back_after(records: Sequence[RequestRecord], base: float, mended: float, now: float) -> float | None:
    """Return the seconds from the fault's end to the first window at 0.9 of `base`; None if there is none yet."""
    if not base:
        return None
    window, begin = max(_LEAST_WINDOW, _TOKENS_OF_WINDOW / base), mended
    while begin + window <= now:
        if _rate(records, begin, begin + window) >= _BACK * base:
            return begin - mended
        begin += window / 8
    return None


def _ttft_growth(records: Sequence[RequestRecord], times: FaultTimes) -> float | None:
    answered = [record for record in records if record.chunk_times]
    before = [r.ttft for r in answered if times.steady <= r.start < times.begun]
    during = [r.ttft for r in answered if times.broken <= r.start < times.mending]
    return statistics.median(during) / statistics.median(before) - 1 if before and during else None
