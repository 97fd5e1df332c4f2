"""Figures as text: how far a point is, a point line for line as `vllm bench serve` prints it, and the table of a sweep."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from dsjax.bench.serve.records import RequestRecord
from dsjax.bench.serve.statistics import DraftFigures, GoodputVerdict, Statistics
from dsjax.progress import counting

_WIDTH = 50
_MOST_ERRORS = 10
_TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
LATENCIES = tuple(_TITLES)
_COLUMNS = (
    ("done", "completed", "d"),
    ("failed", "failed", "d"),
    ("tok/s", "output_throughput", ".1f"),
    ("tok/s a user", "output_throughput_per_user", ".2f"),
    ("tok/s a device", "output_throughput_per_device", ".2f"),
    ("TTFT ms, median", "median_ttft_ms", ".1f"),
    ("TPOT ms, median", "median_tpot_ms", ".2f"),
    ("E2EL ms, median", "median_e2el_ms", ".1f"),
    ("good req/s", "request_goodput", ".2f"),
    ("accepted %", "spec_decode_acceptance_rate", ".1f"),
)


@dataclass(frozen=True)
class LoadPoint:
    """What load made a point: requests, and the bound or rate that was asked for.

    `cached_share_bound` is the most of the input tokens that a prefix cache can have; None where the workload has no bound.
    """

    num_prompts: int
    request_rate: float
    burstiness: float
    max_concurrency: int | None
    cached_share_bound: float | None = None


def report(
    point: LoadPoint,
    statistics: Statistics,
    latencies: Sequence[str],
    devices: int | None,
    drafts: DraftFigures | None = None,
    goodput: GoodputVerdict | None = None,
) -> str:
    """The block of one point, without a newline at its end.

    Args:
        point: what was asked for.
        statistics: what came of it.
        latencies: which of `LATENCIES` to print.
        devices: of the server; None where nobody knows.
        drafts: what came of the server's speculative decoding; None where there is none.
        goodput: whether enough requests met every objective; None without objectives.
    """
    s = statistics
    lines = [" Serving Benchmark Result ".center(_WIDTH, "=")]
    lines += [_line("Successful requests:", s.completed), _line("Failed requests:", s.failed)]
    if point.max_concurrency is not None:
        lines.append(_line("Maximum request concurrency:", point.max_concurrency))
    if not math.isinf(point.request_rate):
        lines.append(_line("Request rate configured (RPS):", point.request_rate))
    lines += [
        _line("Benchmark duration (s):", s.duration),
        _line("Total input tokens:", s.total_input_tokens),
        _line("Total generated tokens:", s.total_output_tokens),
    ]
    if s.cached_share is not None:
        lines.append(_line("Cached input tokens:", s.total_cached_tokens))
        lines.append(_line("Cached share of input (%):", s.cached_share * 100))
    if point.cached_share_bound is not None:
        lines.append(_line("Most that a cache can share (%):", point.cached_share_bound * 100))
    lines.append(_line("Request throughput (req/s):", s.request_throughput))
    if s.request_goodput is not None:
        lines.append(_line("Request goodput (req/s):", s.request_goodput))
    lines += [
        _line("Input token throughput (tok/s):", s.input_throughput),
        _line("Output token throughput (tok/s):", s.output_throughput),
        _line("Peak output token throughput (tok/s):", s.max_output_tokens_per_s),
        _line("Peak concurrent requests:", float(s.max_concurrent_requests)),
        _line("Total token throughput (tok/s):", s.total_token_throughput),
    ]
    if devices is not None:
        lines.append(_line("Output tok/s a device:", s.output_throughput / devices))
    if s.tokens_per_second_per_user is not None:
        lines.append(_line("Output tok/s a user (1 / median TPOT):", s.tokens_per_second_per_user))
    if s.tokens_per_chunk is not None and s.tokens_per_chunk > 1.005:
        lines.append(_line("Output tokens a chunk:", s.tokens_per_chunk))
    for name in latencies:
        lines += _latency_lines(name, s)
    lines += [] if drafts is None else _draft_lines(drafts)
    lines += [] if goodput is None else _goodput_lines(goodput)
    lines.append("=" * _WIDTH)
    return "\n".join(lines + _notes(s))


def _latency_lines(name: str, statistics: Statistics) -> list[str]:
    short, title = _TITLES[name]
    values = statistics.latencies[name]
    lines = [title.center(_WIDTH, "-"), _line(f"Mean {short} (ms):", values.mean)]
    lines.append(_line(f"Median {short} (ms):", values.median))
    return lines + [_line(f"P{p:g} {short} (ms):", value) for p, value in values.percentiles.items()]


def _draft_lines(drafts: DraftFigures) -> list[str]:
    lines = [
        "Speculative Decoding".center(_WIDTH, "-"),
        _line("Acceptance rate (%):", drafts.acceptance_rate),
        _line("Acceptance length:", drafts.acceptance_length),
        _line("Drafts:", drafts.num_drafts),
        _line("Draft tokens:", drafts.draft_tokens),
        _line("Accepted tokens:", drafts.accepted_tokens),
        "Per-position acceptance (%):",
    ]
    return lines + [
        _line(f"  Position {i}:", share * 100) for i, share in enumerate(drafts.per_position_acceptance_rates)
    ]


def _goodput_lines(goodput: GoodputVerdict) -> list[str]:
    lines = ["Objectives".center(_WIDTH, "-")]
    lines += [_line(f"{objective} (% of requests):", share * 100) for objective, share in goodput.by_objective.items()]
    lines.append(_line("All of them (% of requests):", goodput.share * 100))
    return [*lines, f"{f'Wanted: {goodput.wanted:.4g} of the requests':<40} {goodput.verdict}"]


def _line(label: str, value: float | None) -> str:
    shown = "-" if value is None else str(value) if isinstance(value, int) else f"{value:.2f}"
    return f"{label:<40} {shown:<10}".rstrip()


def _notes(statistics: Statistics) -> list[str]:
    """What a reader must know to trust the figures: other counts than the server's, and errors, each once."""
    notes = []
    if statistics.prompts_differ:
        counted, meant = (
            total / statistics.completed for total in (statistics.total_input_tokens, statistics.meant_input_tokens)
        )
        notes.append(
            f"The server counted {counted:,.0f} tokens a prompt where {meant:,.0f} were meant: its tokenizer is another one than the "
            "benchmark's, or another version of it. All figures are those of the prompts that the server counted."
        )
    for source, how in (
        ("tokenizer", "tokenizer, from the text, which may give other tokens than the model made"),
        ("chunks", "chunks, which may hold more than one token each"),
    ):
        if statistics.token_sources.get(source):
            number = statistics.token_sources[source]
            notes.append(f"Output tokens of {number} requests were counted as {how}: the server sent no usage.")
    errors = [f"{number} × {message}" for message, number in statistics.errors[:_MOST_ERRORS]]
    left = len(statistics.errors) - _MOST_ERRORS
    return notes + errors + ([f"… and {left} other errors"] if left > 0 else [])


def sweep_table(points: Sequence[dict[str, Any]], swept: str) -> Table:
    """Points as `result_json` gives them; `swept` is the field that differs. Columns without any value are left out."""
    columns = [column for column in _COLUMNS if any(point[column[1]] is not None for point in points)]
    table = Table(box=None, pad_edge=False)
    for title in ("at once" if swept == "max_concurrency" else "req/s", *(title for title, _, _ in columns)):
        table.add_column(title, justify="right")
    for point in points:
        cells = [f"{point[key]:{form}}" if point[key] is not None else "-" for _, key, form in columns]
        table.add_row(str(point[swept]), *cells)
    return table


class PointProgress:
    """Counts records, and reports how many there are with their rate."""

    def __init__(self, report: Callable[[int, str], None]):
        self._report = report
        self._begin = time.monotonic()
        self._done = self._tokens = self._failed = 0

    def advance(self, record: RequestRecord) -> None:
        """Count one request."""
        self._tokens += record.output_tokens if record.succeeded else 0
        self._failed += not record.succeeded
        rate = self._tokens / max(time.monotonic() - self._begin, 1e-9)
        failed = f", {self._failed} failed" if self._failed else ""
        self._done += 1
        self._report(self._done, f"{rate:,.0f} tok/s{failed}")


@contextlib.contextmanager
def point_progress(console: Console, shown: bool, title: str, total: int) -> Iterator[PointProgress]:
    """Show how far a point is."""
    with counting(console, shown, title, total) as report:
        yield PointProgress(report)
