"""Benchmark results as text and files: progress, the summary that `vllm bench serve` prints, sweep table, CSV, and plot.

The JSON is one object for a single point; for a sweep, its head with `swept` (max_concurrency or request_rate) and `points`. Names are
vLLM's where it has them. `…_ms` are milliseconds, other times seconds; unknown values are None.

- head: `date`, `backend` (openai, openai-chat), `endpoint`, `base_url`, `model_id`, `tokenizer_id`, `dataset_name`, `seed`
- point: `num_prompts`, `request_rate` (or "inf"), `burstiness`, `max_concurrency`, `interrupted`, `duration`, `completed`, `failed`,
  `error_counts`
- tokens: `total_input_tokens`, `total_output_tokens`, `meant_input_tokens` (from the dataset), `token_sources` (usage, tokenizer, chunks),
  `tokens_per_chunk`, `total_cached_tokens`, `cached_share`, `cached_share_bound` (the largest possible)
- rates: `request_throughput`, `request_goodput`, `input_throughput`, `output_throughput`, `total_token_throughput`,
  `max_output_tokens_per_s` (best second), `max_concurrent_requests`, `num_devices`, `output_throughput_per_device`, `…_per_user`
- objectives: `good_share`, `goodput_verdict` (met, missed), `goodput_share_wanted`, `objective_shares`
- drafts: `spec_decode_acceptance_rate` (percent), `…_acceptance_length`, `…_num_drafts`, `…_draft_tokens`, `…_accepted_tokens`,
  `…_per_position_acceptance_rates` (0 to 1)
- latencies: `mean_X_ms`, `median_X_ms`, `std_X_ms`, `pNN_X_ms` of ttft, tpot, itl, e2el
- with `--save-detailed`, one list per field: `input_lens`, `cached_lens`, `output_lens`, `ttfts`, `itls`, `latencies`, `start_times`,
  `queue_times` (how long `--max-concurrency` held a request), `finish_reasons`, `generated_texts`, `errors`
"""

import contextlib
import csv
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dsjax.bench.serve.records import RequestRecord
from dsjax.cli.output import writing
from dsjax.errors import UserError
from dsjax.progress import report_progress
from dsjax.tables import table
from dsjax.texts import filled

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


def render(point: dict[str, Any], latencies: Sequence[str], percentiles: Sequence[float]) -> str:
    """Return the text summary of one point's JSON, without a trailing newline."""
    columns = ["Mean", "Median", *(f"P{p:g}" for p in percentiles)]
    return filled("texts", "bench_serve.txt", point=point, latencies=latencies, shown=columns)


def sweep_table(points: Sequence[dict[str, Any]], swept: str) -> Table:
    """Return the points' JSON as a table, one row per point. `swept`: the field that varies. Columns without values are omitted."""
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
    """Show the progress of a point; yields a function that counts one request."""
    begin = time.monotonic()
    done = failed = tokens = 0
    with report_progress(console, shown, title, total) as report:

        def advance(record: RequestRecord) -> None:
            nonlocal done, failed, tokens
            done += 1
            failed += not record.succeeded
            tokens += record.output_tokens if record.succeeded else 0
            rate = tokens / max(time.monotonic() - begin, 1e-9)
            report(done, f"{rate:,.0f} tok/s" + (f", {failed} failed" if failed else ""))

        yield advance


def details(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return the per-request fields of a point's JSON."""
    return {
        "input_lens": [r.prompt_tokens for r in records],
        "cached_lens": [r.cached_tokens for r in records],
        "output_lens": [r.output_tokens if r.succeeded else 0 for r in records],
        "ttfts": [r.ttft if r.succeeded else None for r in records],
        "itls": [r.itls for r in records],
        "latencies": [r.latency if r.succeeded else None for r in records],
        "start_times": [r.start for r in records],
        "queue_times": [r.start - r.arrival for r in records],
        "finish_reasons": [r.finish_reason for r in records],
        "generated_texts": [r.text for r in records],
        "errors": [r.error or "" for r in records],
    }


def write_points_csv(path: Path, points: Sequence[dict[str, Any]]) -> None:
    """Write one line per point with the scalar fields of its JSON. A field that is a dict or list in any point is omitted from all."""
    several = {key for point in points for key, value in point.items() if isinstance(value, dict | list)}
    rows = [{key: value for key, value in point.items() if key not in several} for point in points]
    with writing(path), path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def draw(path: Path, points: Sequence[dict[str, Any]], title: str) -> None:
    """Plot points from their JSON, each labelled with its concurrency or rate.

    Raises:
        UserError: no point has both figures, or the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no pyplot: it would look for a display
    from matplotlib.figure import Figure

    drawn = [p for p in points if p["output_throughput_per_user"] and p["output_throughput_per_device"]]
    if not drawn:
        raise UserError(
            "nothing to draw: a point needs answers of two tokens or more, and the number of devices (--devices where the "
            "server has no /server_info)"
        )
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    users = [p["output_throughput_per_user"] for p in drawn]
    devices = [p["output_throughput_per_device"] for p in drawn]
    axes.plot(users, devices, marker="o")
    for point, x, y in zip(drawn, users, devices, strict=True):
        axes.annotate(_label(point), (x, y), textcoords="offset points", xytext=(6, 6), fontsize=8)
    axes.set_xlabel("output tokens / s / user   (1 / median TPOT)")
    axes.set_ylabel("output tokens / s / device")
    axes.set_title(title, fontsize=10)
    axes.set_xlim(0, max(users) * 1.2)
    axes.set_ylim(0, max(devices) * 1.1)
    axes.grid(alpha=0.3)
    with writing(path):
        figure.savefig(path, dpi=150)


def _label(point: dict[str, Any]) -> str:
    if point["max_concurrency"] is not None:
        return f"{point['max_concurrency']} at once"
    return "all at once" if point["request_rate"] == "inf" else f"{point['request_rate']:g} req/s"
