"""A timeline as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing: JSON in the Trace Event Format.

The device is the only process. Its threads are the compute thread, one per link, and a copy of the critical path. Complete events (``X``)
are operations, and the loops and layers around them. Flow events (``s``, ``f``) are arrows from the operation that lets a transfer start to
the transfer, and from the transfer to the operation that waits for it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dsjax.dryrun.prices import BETWEEN, COPIES, INSIDE
from dsjax.dryrun.program import COMPUTE, Span
from dsjax.dryrun.timeline import Timeline

MOST_EVENTS = 200_000
"""Number of events up to which loops show every iteration. Further loops show only their first iteration."""
_PROCESS = 1  # process id
_CRITICAL = "critical path"
THREADS = (COMPUTE, INSIDE, BETWEEN, COPIES, _CRITICAL)  # in display order


def write_trace(timeline: Timeline, file: Path, title: str) -> None:
    """Write the trace, compressed if the file's name ends in ``.gz``, which Perfetto also opens."""
    write_json(file, trace(timeline, title))


def write_json(file: Path, body: dict[str, Any]) -> None:
    """Write a trace, compressed if the file's name ends in ``.gz``."""
    text = json.dumps(body, separators=(",", ":"))
    if file.suffix == ".gz":
        file.write_bytes(gzip.compress(text.encode(), mtime=0))
    else:
        file.write_text(text, encoding="utf-8")


def trace(timeline: Timeline, title: str) -> dict[str, Any]:
    """Return the trace as plain data. Times are microseconds from the step's begin, rounded to nanoseconds."""
    spans = timeline.schedule.spans
    path = timeline.schedule.critical_path()
    used = {span.thread for span in spans}
    events: list[dict[str, Any]] = [_event("M", None, "process_name", args={"name": title})]
    for order, thread in enumerate(THREADS, 1):
        if thread in used or thread == _CRITICAL:
            events.append(_event("M", thread, "thread_name", args={"name": thread}))
            events.append(_event("M", thread, "thread_sort_index", args={"sort_index": order}))
    for iteration in timeline.schedule.iterations:
        name = f"{iteration.index + 1} of {iteration.times}"
        events.append(_complete(COMPUTE, name, iteration.begin, iteration.end, {"loop": iteration.loop.name}))
    critical = set(path)
    events_left = MOST_EVENTS - len(spans)
    for index, span in enumerate(spans):
        num_events = sum(1 for _ in _expanded(span, begin=0.0, every_iteration=True))
        events_left -= num_events
        for inner, begin, end in _expanded(span, span.begin, events_left >= 0):
            events.append(_operation(timeline, inner, inner.thread, begin, end, index in critical))
    events += [_operation(timeline, spans[i], _CRITICAL, spans[i].begin, spans[i].end, critical=True) for i in path]
    events += _flows(spans)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {"step_seconds": timeline.step.value, "low": timeline.step.low, "high": timeline.step.high},
    }


def _expanded(span: Span, begin: float, every_iteration: bool) -> Iterator[tuple[Span, float, float]]:
    """Yield ``(span, begin, end)`` for a span and, recursively, for the spans in its body: in every iteration, or only in the first."""
    yield span, begin, begin + span.seconds
    if not span.body:
        return
    iteration_seconds = span.seconds / span.times
    for index in range(round(span.times) if every_iteration else 1):
        for inner in span.body:
            yield from _expanded(inner, begin + index * iteration_seconds + inner.begin, every_iteration)


def _operation(timeline: Timeline, span: Span, thread: str, begin: float, end: float, critical: bool) -> dict[str, Any]:
    work = span.work
    args: dict[str, Any] = {"operation": span.operation.name, "opcode": span.operation.opcode}
    if span.body:
        args |= {"turns": span.times}
    else:
        args |= {"flops": work.flops, "bytes": work.bytes, "bound by": work.bound}
    args |= {"critical": critical, "shapes": ", ".join(map(str, span.operation.shapes[:4]))}
    name = timeline.parts[span.operation]
    name = f"{name} × {span.times:g}" if span.body else name
    return _complete(thread, name, begin, end, args)


def _complete(thread: str, name: str, begin: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    duration = (_nanoseconds(end) - _nanoseconds(begin)) / 1000
    return _event("X", thread, name, begin, cat=thread, dur=duration, args=args)


def _flows(spans: tuple[Span, ...]) -> Iterable[dict[str, Any]]:
    """Yield an arrow (two events) for each span whose cause ran on another thread."""
    for index, span in enumerate(spans):
        if span.cause is None or spans[span.cause].thread == span.thread:
            continue
        cause = spans[span.cause]
        # An arrow belongs to the slice at its time. Slices of a thread touch, so the arrow starts a little before its cause ends.
        yield _event("s", cause.thread, "waits", cause.end - min(cause.seconds / 2, 1e-9), cat="waits", id=index)
        yield _event("f", span.thread, "waits", span.begin, cat="waits", id=index, bp="e")


def _event(phase: str, thread: str | None, name: str, at: float = 0.0, **more: Any) -> dict[str, Any]:
    """Return an event in the Trace Event Format. thread: None for a process event. at: seconds from the step's begin."""
    thread_id = 0 if thread is None else THREADS.index(thread) + 1
    return {"name": name, "ph": phase, "pid": _PROCESS, "tid": thread_id, "ts": _nanoseconds(at) / 1000, **more}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
