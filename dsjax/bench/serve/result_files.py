"""The files of a benchmark: JSON, CSV, and the picture of a sweep.

Fields are documented in `docs/bench-serve.md` and stable; vLLM's names where it has them.
"""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsjax.bench.serve.load import LoadResult
from dsjax.bench.serve.records import RequestRecord
from dsjax.bench.serve.report import LATENCIES, LoadPoint
from dsjax.bench.serve.statistics import DraftFigures, GoodputVerdict, Statistics
from dsjax.errors import UserError

_FIGURES = (
    "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "meant_input_tokens", "total_cached_tokens",
    "cached_share", "request_throughput", "request_goodput", "output_throughput", "input_throughput", "good_share",
    "total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests", "tokens_per_chunk", "token_sources",
)  # fmt: skip
"""Attributes of `Statistics` that are fields of the same name."""

_DRAFT_FIGURES = (
    "acceptance_rate", "acceptance_length", "num_drafts", "draft_tokens", "accepted_tokens", "per_position_acceptance_rates",
)  # fmt: skip
"""Attributes of `DraftFigures` that are fields of the same name behind `spec_decode_`."""

_REQUEST_COLUMNS = (
    "point", "request", "arrival_s", "start_s", "ttft_ms", "tpot_ms", "e2el_ms", "input_tokens", "cached_tokens", "output_tokens",
    "chunks", "token_source", "finish_reason", "error",
)  # fmt: skip


@dataclass(frozen=True)
class PointResult:
    """A point: what was asked for, what came back, and its figures."""

    point: LoadPoint
    result: LoadResult
    statistics: Statistics
    drafts: DraftFigures | None = None
    goodput: GoodputVerdict | None = None


def result_json(head: dict[str, Any], one: PointResult, devices: int | None, detailed: bool) -> dict[str, Any]:
    """One point as vLLM's result file has it; `head` comes first (date, model, dataset).

    With `detailed`, lists of each request's lengths, times, text and error follow.
    """
    point, s, drafts = one.point, one.statistics, one.drafts
    body = head | {
        "num_prompts": point.num_prompts,
        "request_rate": "inf" if math.isinf(point.request_rate) else point.request_rate,
        "burstiness": "inf" if math.isinf(point.burstiness) else point.burstiness,
        "max_concurrency": point.max_concurrency,
        "interrupted": one.result.interrupted,
        "cached_share_bound": point.cached_share_bound,
        "num_devices": devices,
        "output_throughput_per_device": s.output_throughput / devices if devices else None,
        "output_throughput_per_user": s.tokens_per_second_per_user,
        "error_counts": dict(s.errors),
        "goodput_verdict": one.goodput and one.goodput.verdict,
        "goodput_share_wanted": one.goodput and one.goodput.wanted,
        "objective_shares": one.goodput and one.goodput.by_objective,
    }
    body |= {name: getattr(s, name) for name in _FIGURES}
    body |= {f"spec_decode_{name}": drafts and getattr(drafts, name) for name in _DRAFT_FIGURES}
    for name in LATENCIES:
        values = s.latencies[name]
        body |= {f"mean_{name}_ms": values.mean, f"median_{name}_ms": values.median, f"std_{name}_ms": values.std}
        body |= {f"p{p:g}_{name}_ms": value for p, value in values.percentiles.items()}
    return body | (_details(one.result.records) if detailed else {})


def _details(records: Sequence[RequestRecord]) -> dict[str, Any]:
    return {
        "input_lens": [r.prompt_tokens for r in records],
        "output_lens": [r.output_tokens if r.succeeded else 0 for r in records],
        "ttfts": [r.ttft if r.succeeded else None for r in records],
        "itls": [r.itls for r in records],
        "latencies": [r.latency if r.succeeded else None for r in records],
        "start_times": [r.start for r in records],
        "queue_times": [r.start - r.arrival for r in records],
        "generated_texts": [r.text for r in records],
        "errors": [r.error or "" for r in records],
    }


def write_points_csv(path: Path, points: Sequence[dict[str, Any]]) -> None:
    """One line a point: every number of `result_json`. What has several values in one point is left out of all."""
    several = {key for point in points for key, value in point.items() if isinstance(value, dict | list)}
    rows = [{key: value for key, value in point.items() if key not in several} for point in points]
    _write_csv(path, list(rows[0]), rows)


def write_requests_csv(path: Path, points: Sequence[PointResult]) -> None:
    """One line a request; times after the point's start."""
    rows = [
        _request_row(number, index, record)
        for number, one in enumerate(points)
        for index, record in enumerate(one.result.records)
    ]
    _write_csv(path, list(_REQUEST_COLUMNS), rows)


def _request_row(point: int, index: int, record: RequestRecord) -> dict[str, Any]:
    row: dict[str, Any] = {"point": point, "request": index, "arrival_s": record.arrival, "start_s": record.start}
    row |= {"input_tokens": record.prompt_tokens, "cached_tokens": record.cached_tokens, "error": record.error}
    if record.succeeded:
        row |= {"ttft_ms": record.ttft * 1e3, "e2el_ms": record.latency * 1e3}
        row |= {"tpot_ms": None if record.tpot is None else record.tpot * 1e3}
        row |= {"output_tokens": record.output_tokens, "chunks": len(record.chunk_times)}
        row |= {"token_source": record.token_source, "finish_reason": record.finish_reason}
    return row


def _write_csv(path: Path, columns: list[str], rows: Sequence[dict[str, Any]]) -> None:
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def draw(path: Path, points: Sequence[dict[str, Any]], title: str) -> None:
    """Draw points as `result_json` gives them; each is labelled with its concurrency or rate.

    Raises:
        UserError: no point has both figures, or the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no pyplot: it would look for a display
    from matplotlib.figure import Figure

    shown = [p for p in points if p["output_throughput_per_user"] and p["output_throughput_per_device"]]
    if not shown:
        raise UserError(
            "nothing to draw: a point needs answers of two tokens or more, and the number of devices (--devices where the "
            "server has no /server_info)"
        )
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    users = [p["output_throughput_per_user"] for p in shown]
    devices = [p["output_throughput_per_device"] for p in shown]
    axes.plot(users, devices, marker="o")
    for point, x, y in zip(shown, users, devices, strict=True):
        axes.annotate(_label(point), (x, y), textcoords="offset points", xytext=(6, 6), fontsize=8)
    axes.set_xlabel("output tokens / s / user   (1 / median TPOT)")
    axes.set_ylabel("output tokens / s / device")
    axes.set_title(title, fontsize=10)
    axes.set_xlim(0, max(users) * 1.2)
    axes.set_ylim(0, max(devices) * 1.1)
    axes.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def _label(point: dict[str, Any]) -> str:
    if point["max_concurrency"] is not None:
        return f"{point['max_concurrency']} at once"
    return "all at once" if point["request_rate"] == "inf" else f"{point['request_rate']:g} req/s"
