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

_RECOVERED_SHARE = 0.9
"""Share of the pre-fault token rate at which a server counts as recovered."""
_MOST_WARM_UP = 120.0
"""Maximum seconds to wait for as many answers as sessions before the fault."""
_LEAST_WINDOW, _TOKENS_OF_WINDOW = 2.0, 100
"""Window of a rate: two seconds, or the time of a hundred tokens at the pre-fault rate if longer."""


class FaultTimes(NamedTuple):
    """Phases of a fault measurement, in seconds since the load began."""

    steady: float  # sessions are warm
    begun: float  # fault hook started
    broken: float  # fault hook ended
    mending: float  # `-end` hook started
    mended: float  # `-end` hook ended
    over: float  # watch ended


@dataclass(frozen=True, kw_only=True)
class FaultMeasurement(RandomLengths):
    """Closed-loop sessions that keep sending during a fault."""

    KIND: ClassVar = "fault"
    UNITS: ClassVar = {"throughput_loss": "", "ttft_growth": "", "error_share": "", "silence": "s", "recovery": "s"}
    ABOVE_ZERO: ClassVar = (*RandomLengths.ABOVE_ZERO, "sessions", "before", "hold")

    hook: str  # name of the hook
    value: str = ""  # replaces `{value}` in the hook's commands
    sessions: int
    before: float  # seconds of load before the fault
    hold: float  # seconds of load during the fault
    watch: float  # maximum seconds after the fault; ends when the rate has recovered
    # seconds at the start that do not count, nor does the following wait for as many answers as sessions
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
            bed.sessions(source, self.sessions) as load,
        ):
            await asyncio.sleep(self.settle)
            await bed.answered(load.started, self.sessions, _MOST_WARM_UP)
            times = await self._break_and_mend(bed, load.started, lambda: bed.clock() - load.zero)
            load.stop.set()
            await load.task
        return self.evaluate(load.started, times)

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
        while now() - mended < self.watch and _recovery_seconds(records, base, mended, now()) is None:
            await asyncio.sleep(0.25)
        return FaultTimes(steady, begun, broken, mending, mended, now())

    def evaluate(self, records: Sequence[RequestRecord], times: FaultTimes) -> Measured:
        """Compute the values from the requests and the phases."""
        measured = Measured(samples=len(records))
        no_base = "no token came before the fault"
        base = _rate(records, times.steady, times.begun)
        during = _rate(records, times.broken, times.mending)
        measured.enter({"throughput_loss": 1 - during / base if base else None}, no_base, "missed")
        measured.enter({"ttft_growth": _ttft_growth(records, times)}, "too few requests had a first token", "missed")
        failed = [record.error is not None for record in records if record.error is not None or record.end]
        share = sum(failed) / len(failed) if failed else None
        measured.enter({"error_share": share}, "no request ended", "missed")
        arrivals = sorted(t for r in records for t in r.chunk_times if t >= times.begun)
        ends = [times.begun, *arrivals, max([times.over, *arrivals])]
        measured.enter({"silence": max(later - earlier for earlier, later in itertools.pairwise(ends))})
        recovery = _recovery_seconds(records, base, times.mended, times.over)
        if base and self.watch and recovery is None:
            recovery = times.over - times.mended
            measured.notes.append(
                f"The rate did not come back to {_RECOVERED_SHARE:.0%} within the {recovery:.0f} s that were watched."
            )
        measured.enter({"recovery": recovery}, no_base if self.watch else "watch is 0: nobody looked", "missed")
        measured.notes.append(
            f"Of {len(records)} requests: before {base:,.1f} tokens/s, during {during:,.1f}; making the fault took "
            f"{times.broken - times.begun:.1f} s, ending it {times.mended - times.mending:.1f} s."
        )
        return measured


def _rate(records: Sequence[RequestRecord], begin: float, end: float) -> float:
    return tokens_between(records, begin, end) / max(end - begin, 1e-9)


def _recovery_seconds(records: Sequence[RequestRecord], base: float, mended: float, now: float) -> float | None:
    """Return the seconds from the fault's end to the first window at 0.9 of `base`; None if there is none yet."""
    if not base:
        return None
    window = max(_LEAST_WINDOW, _TOKENS_OF_WINDOW / base)
    begin = mended
    while begin + window <= now:
        if _rate(records, begin, begin + window) >= _RECOVERED_SHARE * base:
            return begin - mended
        begin += window / 8
    return None


def _ttft_growth(records: Sequence[RequestRecord], times: FaultTimes) -> float | None:
    answered = [record for record in records if record.chunk_times]
    before = [r.ttft for r in answered if times.steady <= r.start < times.begun]
    during = [r.ttft for r in answered if times.broken <= r.start < times.mending]
    return statistics.median(during) / statistics.median(before) - 1 if before and during else None
