"""Figures as text: how far a point is, a point line for line as `vllm bench serve` prints it, and the table of a sweep."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from dsjax.bench.serve.records import RequestRecord
from dsjax.progress import counting
from dsjax.tables import table

_WIDTH = 50
_MOST_ERRORS = 10
_ALIKE, _OF_A_TEMPLATE = 1.1, 64
"""Prompts are those that were meant where the server counts at most so many times as many tokens, and so many more a request."""
_TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
_LINES = (
    ("Successful requests:", "completed", 1),
    ("Failed requests:", "failed", 1),
    ("Maximum request concurrency:", "max_concurrency", 1),
    ("Request rate configured (RPS):", "request_rate", 1),
    ("Benchmark duration (s):", "duration", 1),
    ("Total input tokens:", "total_input_tokens", 1),
    ("Total generated tokens:", "total_output_tokens", 1),
    ("Cached input tokens:", "total_cached_tokens", 1),
    ("Cached share of input (%):", "cached_share", 100),
    ("Most that a cache can share (%):", "cached_share_bound", 100),
    ("Request throughput (req/s):", "request_throughput", 1),
    ("Request goodput (req/s):", "request_goodput", 1),
    ("Input token throughput (tok/s):", "input_throughput", 1),
    ("Output token throughput (tok/s):", "output_throughput", 1),
    ("Peak output token throughput (tok/s):", "max_output_tokens_per_s", 1),
    ("Peak concurrent requests:", "max_concurrent_requests", 1.0),
    ("Total token throughput (tok/s):", "total_token_throughput", 1),
    ("Output tok/s a device:", "output_throughput_per_device", 1),
    ("Output tok/s a user (1 / median TPOT):", "output_throughput_per_user", 1),
)
"""Label, field of the point's JSON, and what its value is multiplied by. A field without a value has no line."""
_DRAFT_LINES = (
    ("Acceptance rate (%):", "acceptance_rate"),
    ("Acceptance length:", "acceptance_length"),
    ("Drafts:", "num_drafts"),
    ("Draft tokens:", "draft_tokens"),
    ("Accepted tokens:", "accepted_tokens"),
)
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
_COUNTED = {
    "tokenizer": "tokenizer, from the text, which may give other tokens than the model made",
    "chunks": "chunks, which may hold more than one token each",
}


def report(point: dict[str, Any], latencies: Sequence[str], percentiles: Sequence[float]) -> str:
    """The block of one point, of its JSON, without a newline at its end."""
    lines = [" Serving Benchmark Result ".center(_WIDTH, "=")]
    for label, name, factor in _LINES:
        if point[name] not in (None, "inf"):
            lines.append(_line(label, point[name] * factor))
    if point["tokens_per_chunk"] is not None and point["tokens_per_chunk"] > 1.005:
        lines.append(_line("Output tokens a chunk:", point["tokens_per_chunk"]))
    for name in latencies:
        short, title = _TITLES[name]
        lines.append(title.center(_WIDTH, "-"))
        for shown in ("Mean", "Median", *(f"P{p:g}" for p in percentiles)):
            lines.append(_line(f"{shown} {short} (ms):", point[f"{shown.lower()}_{name}_ms"]))
    if point["spec_decode_num_drafts"] is not None:
        lines.append("Speculative Decoding".center(_WIDTH, "-"))
        lines += [_line(label, point[f"spec_decode_{name}"]) for label, name in _DRAFT_LINES]
        lines.append("Per-position acceptance (%):")
        shares = point["spec_decode_per_position_acceptance_rates"]
        lines += [_line(f"  Position {i}:", share * 100) for i, share in enumerate(shares)]
    if point["goodput_verdict"] is not None:
        lines.append("Objectives".center(_WIDTH, "-"))
        shares = {**point["objective_shares"], "All of them": point["good_share"]}
        lines += [_line(f"{objective} (% of requests):", share * 100) for objective, share in shares.items()]
        wanted = f"Wanted: {point['goodput_share_wanted']:.4g} of the requests"
        lines.append(f"{wanted:<40} {point['goodput_verdict']}")
    return "\n".join([*lines, "=" * _WIDTH, *_notes(point)])


def _line(label: str, value: float | None) -> str:
    shown = "-" if value is None else str(value) if isinstance(value, int) else f"{value:.2f}"
    return f"{label:<40} {shown:<10}".rstrip()


def _notes(point: dict[str, Any]) -> list[str]:
    """What a reader must know to trust the figures: other counts than the server's, and errors, each once."""
    notes, answered = [], point["completed"]
    counted, meant = point["total_input_tokens"], point["meant_input_tokens"]
    if max(counted, meant) > _ALIKE * min(counted, meant) + _OF_A_TEMPLATE * answered:
        notes.append(
            f"The server counted {counted / answered:,.0f} tokens a prompt where {meant / answered:,.0f} were meant: its tokenizer is "
            "another one than the benchmark's, or another version of it. All figures are those of the prompts that the server counted."
        )
    for source, how in _COUNTED.items():
        if number := point["token_sources"].get(source):
            notes.append(f"Output tokens of {number} requests were counted as {how}: the server sent no usage.")
    errors = [f"{number} × {message}" for message, number in point["error_counts"].items()]
    more = [f"… and {len(errors) - _MOST_ERRORS} other errors"] if len(errors) > _MOST_ERRORS else []
    return notes + errors[:_MOST_ERRORS] + more


def sweep_table(points: Sequence[dict[str, Any]], swept: str) -> Table:
    """Points' JSON as rows; `swept` is the field that differs. Columns without any value are left out."""
    columns = [column for column in _COLUMNS if any(point[column[1]] is not None for point in points)]
    names = ("at once" if swept == "max_concurrency" else "req/s", *(title for title, _, _ in columns))
    rows = [
        [str(one[swept]), *(f"{one[key]:{form}}" if one[key] is not None else "-" for _, key, form in columns)]
        for one in points
    ]
    return table(None, names, rows, box=None, pad_edge=False)


Advance = Callable[[RequestRecord], None]


@contextlib.contextmanager
def point_progress(console: Console, shown: bool, title: str, total: int) -> Iterator[Advance]:
    """Show how far a point is; gives a function that counts a request."""
    begin, done, failed, tokens = time.monotonic(), 0, 0, 0
    with counting(console, shown, title, total) as report:

        def advance(record: RequestRecord) -> None:
            nonlocal done, failed, tokens
            done += 1
            failed += not record.succeeded
            tokens += record.output_tokens if record.succeeded else 0
            rate = tokens / max(time.monotonic() - begin, 1e-9)
            report(done, f"{rate:,.0f} tok/s" + (f", {failed} failed" if failed else ""))

        yield advance
