"""A point's JSON fields from request records and speculative decoding counters, under vLLM's names. Definitions: `docs/benchmarking.md`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dsjax.errors import UserError

if TYPE_CHECKING:
    from dsjax.bench.serve.records import RequestRecord
    from dsjax.top.reading import Exposition

_DRAFTS, _DRAFT_TOKENS, _ACCEPTED_TOKENS, _ACCEPTED_PER_POSITION = DRAFT_COUNTERS = (
    "vllm:spec_decode_num_drafts_total",  # a draft: the draft tokens of one request in one step
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
)
LATENCIES = ("ttft", "tpot", "itl", "e2el")
_GOODPUT_METRICS = ("ttft", "tpot", "e2el", "tps")


class GoodputError(UserError):
    """An objective that is not `METRIC:MILLISECONDS`."""


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """Parse objectives such as `ttft:200` into milliseconds by metric. A word may hold several, separated by commas or spaces.

    `tps:20` (at least 20 tokens/s per user) is equivalent to `tpot:50`.

    Raises:
        GoodputError: unknown metric, or the limit is not a positive number.
    """
    objectives: dict[str, float] = {}
    for word in " ".join(words).replace(",", " ").split():
        name, _, number = word.partition(":")
        try:
            limit = float(number)
        except ValueError:
            limit = 0.0
        if name not in _GOODPUT_METRICS or not limit > 0:
            raise GoodputError(
                f"--goodput has {word!r}, expected METRIC:MILLISECONDS with a metric of {', '.join(_GOODPUT_METRICS[:-1])}, or "
                "tps:TOKENS_PER_SECOND"
            )
        if name == "tps":
            name, limit = "tpot", 1e3 / limit
        objectives[name] = min(limit, objectives.get(name, limit))
    return objectives


def meets_objectives(record: RequestRecord, objectives: Mapping[str, float]) -> bool:
    """Whether a successful request met every objective. A one-token response meets any TPOT."""
    seconds = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.latency}
    return all(seconds[name] * 1e3 <= limit for name, limit in objectives.items())


def figures(
    records: Sequence[RequestRecord],
    duration: float,
    percentiles: Sequence[float],
    objectives: Mapping[str, float],
    wanted: float,
) -> dict[str, Any]:
    """Return all fields of a point that derive from its records; undefined values are None.

    percentiles: between 0 and 100. objectives: milliseconds by metric; may be empty. wanted: the share of all requests, including failed
    ones, that must meet every objective.
    """
    seconds = max(duration, 1e-9)  # never zero, since rates divide by it
    succeeded = [record for record in records if record.succeeded]
    inputs, outputs = sum(r.prompt_tokens for r in succeeded), sum(r.output_tokens for r in succeeded)
    cached = [r.cached_tokens for r in succeeded if r.cached_tokens is not None]
    chunks = sum(len(r.chunk_times) for r in succeeded)
    latencies = latency_figures(succeeded, percentiles)
    tpot_ms = latencies["median_tpot_ms"]
    values = {
        "output_throughput_per_user": 1e3 / tpot_ms if tpot_ms else None,
        "error_counts": dict(Counter(r.error for r in records if r.error is not None).most_common()),
        **goodput_figures(records, objectives, wanted),
        "duration": duration,
        "completed": len(succeeded),
        "failed": len(records) - len(succeeded),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "meant_input_tokens": sum(r.meant_prompt_tokens for r in succeeded),
        "total_cached_tokens": sum(cached) if cached else None,
        "cached_share": sum(cached) / inputs if cached and inputs else None,
        "request_throughput": len(succeeded) / seconds,
        "request_goodput": sum(meets_objectives(r, objectives) for r in succeeded) / seconds if objectives else None,
        "output_throughput": outputs / seconds,
        "input_throughput": inputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        "max_output_tokens_per_s": _best_second(succeeded),
        "max_concurrent_requests": _peak_concurrency(succeeded),
        "tokens_per_chunk": outputs / chunks if chunks else None,
        "token_sources": dict(Counter(r.token_source for r in succeeded)),
    }
    return values | latencies


def latency_figures(succeeded: Sequence[RequestRecord], percentiles: Sequence[float]) -> dict[str, float | None]:
    """Return mean, median, population standard deviation and percentiles of each of `LATENCIES` over successful requests, in milliseconds.

    Percentiles interpolate linearly, as in NumPy and vLLM. All are None without samples: no request succeeded, or (TPOT, ITL) no
    response had a second token.
    """
    seconds = {
        "ttft": [r.ttft for r in succeeded],
        "tpot": [r.tpot for r in succeeded if r.tpot is not None],
        "itl": [gap for r in succeeded for gap in r.itls],
        "e2el": [r.latency for r in succeeded],
    }
    found: dict[str, float | None] = {}
    for name in LATENCIES:
        ms = np.asarray(seconds[name]) * 1e3
        names = [f"{which}_{name}_ms" for which in ("mean", "median", "std", *(f"p{p:g}" for p in percentiles))]
        found |= dict.fromkeys(names)
        if len(ms):
            values = ms.mean(), np.median(ms), ms.std(), *np.percentile(ms, percentiles)
            found |= zip(names, map(float, values), strict=True)
    return found


def goodput_figures(records: Sequence[RequestRecord], objectives: Mapping[str, float], wanted: float) -> dict[str, Any]:
    """Return the goodput verdict and shares of a point; all None without objectives, or if no request succeeded."""
    succeeded = [record for record in records if record.succeeded]
    if not objectives or not succeeded:
        return dict.fromkeys(("goodput_verdict", "goodput_share_wanted", "objective_shares", "good_share"))

    def share(limits: Mapping[str, float]) -> float:
        return sum(meets_objectives(record, limits) for record in succeeded) / len(records)

    return {
        "goodput_verdict": "met" if share(objectives) >= wanted else "missed",
        "goodput_share_wanted": wanted,
        "objective_shares": {f"{name} ≤ {ms:g} ms": share({name: ms}) for name, ms in objectives.items()},
        "good_share": share(objectives),
    }


def _best_second(records: Sequence[RequestRecord]) -> float:
    """Return the largest number of output tokens in one second; seconds count from the first request's start.

    A request's tokens are spread evenly over its chunks, since only their total is known.
    """
    if not records:
        return 0.0
    chunks = [len(r.chunk_times) for r in records]
    times = np.concatenate([r.chunk_times for r in records]) - min(r.start for r in records)
    weights = np.repeat([r.output_tokens / n for r, n in zip(records, chunks, strict=True)], chunks)
    return float(np.bincount(times.astype(int), weights).max())


def _peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """Return the largest number of overlapping intervals [start, end). At equal times, an end counts before a start."""
    changes = sorted([(r.start, 1) for r in records] + [(r.end, -1) for r in records])
    return int(np.cumsum([change for _, change in changes]).max(initial=0))


def draft_figures(before: Exposition | None, after: Exposition | None) -> dict[str, Any]:
    """Return speculative decoding statistics between two scrapes; all None if nothing was drafted or the server has no such metrics.

    Position labels that are not numbers come from another server and are ignored. The acceptance rate is in percent, as in vLLM; the
    acceptance length includes the token after the accepted drafts.
    """
    names = (
        "acceptance_rate", "acceptance_length", "num_drafts", "draft_tokens", "accepted_tokens", "per_position_acceptance_rates",
    )  # fmt: skip
    keys = [f"spec_decode_{name}" for name in names]
    if before is None or after is None:
        return dict.fromkeys(keys)
    totals = (sum(after.growth(before, name).values()) for name in (_DRAFTS, _DRAFT_TOKENS, _ACCEPTED_TOKENS))
    num_drafts, draft_tokens, accepted_tokens = map(round, totals)
    if not draft_tokens or not num_drafts:
        return dict.fromkeys(keys)
    growth = after.growth(before, _ACCEPTED_PER_POSITION, "position")
    accepted_at = {int(position): round(count) for (position,), count in growth.items() if position.isdecimal()}
    rates = [accepted_at[position] / num_drafts for position in sorted(accepted_at)]
    rate, length = 100 * accepted_tokens / draft_tokens, 1 + accepted_tokens / num_drafts
    return dict(zip(keys, (rate, length, num_drafts, draft_tokens, accepted_tokens, rates), strict=True))
