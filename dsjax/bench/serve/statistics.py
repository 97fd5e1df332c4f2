"""Records and counters of drafts as the figures of a benchmark, by objectives too. Definitions: `docs/bench-serve.md`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dsjax.errors import UserError

if TYPE_CHECKING:
    from dsjax.bench.serve.load import LoadResult
    from dsjax.bench.serve.records import RequestRecord
    from dsjax.top.reading import Exposition

_ROWS, _DRAFTED, _ACCEPTED, _PER_POSITION = DRAFT_COUNTERS = tuple(
    f"vllm:spec_decode_num_{name}_total"
    for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
)
_ALIKE, _OF_A_TEMPLATE = 1.1, 64
"""Prompts are those that were meant where the server counts at most so many times as many tokens, and so many more a request."""
METRICS = ("ttft", "tpot", "e2el", "tps")


class GoodputError(UserError):
    """An objective that is not `METRIC:MILLISECONDS`."""


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """Objectives in milliseconds, from words such as `ttft:200`; several may stand in one word, with commas or spaces.

    `tps:20`, at least 20 tokens a second for each user, is `tpot:50`.

    Raises:
        GoodputError: an unknown metric, or no positive number.
    """
    objectives: dict[str, float] = {}
    for word in " ".join(words).replace(",", " ").split():
        name, _, number = word.partition(":")
        try:
            limit = float(number)
        except ValueError:
            limit = 0.0
        if name not in METRICS or not limit > 0:
            raise GoodputError(
                f"--goodput has {word!r}, expected METRIC:MILLISECONDS with a metric of {', '.join(METRICS[:-1])}, or "
                "tps:TOKENS_PER_SECOND"
            )
        if name == "tps":
            name, limit = "tpot", 1e3 / limit
        objectives[name] = min(limit, objectives.get(name, limit))
    return objectives


def is_good(record: RequestRecord, objectives: dict[str, float]) -> bool:
    """Whether a successful request met every objective. An answer of one token meets any TPOT."""
    seconds = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.latency}
    return all(seconds[name] * 1e3 <= limit for name, limit in objectives.items())


@dataclass(frozen=True)
class GoodputVerdict:
    """Whether enough of a point's requests met every objective.

    Attributes:
        share: requests that met every objective, of all that were sent, failed ones too.
        wanted: the least share that is enough.
        by_objective: objective, as `ttft ≤ 500 ms`, to the share of requests that met it.
    """

    share: float
    wanted: float
    by_objective: dict[str, float]

    @classmethod
    def of(
        cls, records: Sequence[RequestRecord], objectives: dict[str, float], wanted: float
    ) -> "GoodputVerdict | None":
        """Judge a point; None without objectives, or where no request was answered."""
        good = [record for record in records if record.succeeded]
        if not objectives or not good:
            return None

        def share(some: dict[str, float]) -> float:
            return sum(is_good(record, some) for record in good) / len(records)

        return cls(share(objectives), wanted, {f"{n} ≤ {ms:g} ms": share({n: ms}) for n, ms in objectives.items()})

    @property
    def verdict(self) -> str:
        """`met` or `missed`."""
        return "met" if self.share >= self.wanted else "missed"


@dataclass(frozen=True)
class Distribution:
    """Milliseconds: mean, median, standard deviation (of the population), and percentiles by their number.

    All are None where there is no value: no request succeeded, or (TPOT, ITL) none had a second token.
    """

    count: int
    mean: float | None
    median: float | None
    std: float | None
    percentiles: dict[float, float | None]

    @classmethod
    def of(cls, seconds: Sequence[float], percentiles: Sequence[float]) -> "Distribution":
        """Summarise times in seconds; percentiles interpolate linearly, as NumPy's and vLLM's."""
        if not seconds:
            return cls(0, None, None, None, dict.fromkeys(percentiles))
        values = np.asarray(seconds) * 1e3
        points = {p: float(v) for p, v in zip(percentiles, np.percentile(values, percentiles), strict=True)}
        return cls(len(values), float(values.mean()), float(np.median(values)), float(values.std()), points)


@dataclass(frozen=True)
class Statistics:
    """The figures of one point.

    Attributes:
        duration: seconds.
        total_input_tokens, total_output_tokens: of successful requests.
        meant_input_tokens: of the same requests, as the dataset meant their prompts.
        total_cached_tokens: input tokens that came out of the server's prefix cache; None where no answer told.
        request_goodput: requests a second that met every objective; None without objectives.
        good_share: requests that met every objective, of all that were sent, failed ones too; None without objectives or answers.
        input_throughput, output_throughput, total_token_throughput: tokens a second.
        max_output_tokens_per_s: output tokens of the best second.
        max_concurrent_requests: most successful requests under way at one moment.
        tokens_per_chunk: output tokens of a chunk that carried any, on average; None without a success.
        token_sources: successful requests by how their tokens were counted.
        latencies: `ttft`, `tpot`, `itl` and `e2el`.
        errors: messages with their number, most frequent first.
    """

    duration: float
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    meant_input_tokens: int
    total_cached_tokens: int | None
    request_throughput: float
    request_goodput: float | None
    good_share: float | None
    input_throughput: float
    output_throughput: float
    total_token_throughput: float
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    tokens_per_chunk: float | None
    token_sources: dict[str, int]
    latencies: dict[str, Distribution]
    errors: list[tuple[str, int]]

    @property
    def cached_share(self) -> float | None:
        """Share of the input tokens that came out of the prefix cache."""
        if self.total_cached_tokens is None or not self.total_input_tokens:
            return None
        return self.total_cached_tokens / self.total_input_tokens

    @property
    def prompts_differ(self) -> bool:
        """Whether the server counted other prompts than were meant, by more than a chat template adds."""
        counted, meant = self.total_input_tokens, self.meant_input_tokens
        return max(counted, meant) > _ALIKE * min(counted, meant) + _OF_A_TEMPLATE * self.completed

    @property
    def tokens_per_second_per_user(self) -> float | None:
        """Speed that the median user sees after the first token: 1 / median TPOT."""
        median = self.latencies["tpot"].median
        return 1e3 / median if median else None


def summarise(result: LoadResult, percentiles: Sequence[float], objectives: dict[str, float]) -> Statistics:
    """All figures of a point.

    Args:
        result: what came back.
        percentiles: which, between 0 and 100.
        objectives: milliseconds by metric; empty for none.
    """
    good = [record for record in result.records if record.succeeded]
    duration = max(result.duration, 1e-9)
    inputs, outputs = sum(r.prompt_tokens for r in good), sum(r.output_tokens for r in good)
    cached = [r.cached_tokens for r in good if r.cached_tokens is not None]
    chunks = sum(len(r.chunk_times) for r in good)
    times = {
        "ttft": [r.ttft for r in good],
        "tpot": [r.tpot for r in good if r.tpot is not None],
        "itl": [gap for r in good for gap in r.itls],
        "e2el": [r.latency for r in good],
    }
    return Statistics(
        duration=result.duration,
        completed=len(good),
        failed=sum(r.error is not None for r in result.records),
        total_input_tokens=inputs,
        total_output_tokens=outputs,
        meant_input_tokens=sum(r.meant_prompt_tokens for r in good),
        total_cached_tokens=sum(cached) if cached else None,
        request_throughput=len(good) / duration,
        request_goodput=sum(is_good(r, objectives) for r in good) / duration if objectives else None,
        good_share=sum(is_good(r, objectives) for r in good) / len(result.records) if objectives and good else None,
        input_throughput=inputs / duration,
        output_throughput=outputs / duration,
        total_token_throughput=(inputs + outputs) / duration,
        max_output_tokens_per_s=_best_second(good),
        max_concurrent_requests=_peak_concurrency(good),
        tokens_per_chunk=outputs / chunks if chunks else None,
        token_sources=dict(Counter(r.token_source for r in good)),
        latencies={name: Distribution.of(values, percentiles) for name, values in times.items()},
        errors=Counter(r.error for r in result.records if r.error is not None).most_common(),
    )


def _best_second(records: Sequence[RequestRecord]) -> float:
    """Most output tokens in one of the seconds that follow the first request's start.

    A request's tokens are spread evenly over its chunks, since only their sum is told.
    """
    if not records:
        return 0.0
    first = min(record.start for record in records)
    seconds = np.concatenate([np.asarray(r.chunk_times) - first for r in records]).astype(int)
    weights = np.concatenate([np.full(len(r.chunk_times), r.output_tokens / len(r.chunk_times)) for r in records])
    return float(np.bincount(seconds, weights).max())


def _peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """Most intervals [start, end) that share a moment. An end counts before a start at the same time."""
    changes = sorted([(r.start, 1) for r in records] + [(r.end, -1) for r in records])
    return int(np.cumsum([change for _, change in changes]).max(initial=0))


@dataclass(frozen=True)
class DraftFigures:
    """Drafts of one point; vLLM's names in its result files.

    Attributes:
        num_drafts: rows that had drafts to verify.
        draft_tokens, accepted_tokens: drafts in them, and how many were accepted.
        accepted_per_position: of the first, second, … draft of each row, how many were accepted.
    """

    num_drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: tuple[int, ...]

    @classmethod
    def between(cls, before: Exposition | None, after: Exposition | None) -> DraftFigures | None:
        """What happened between two scrapes; None where the server drafted nothing, or does not tell.

        A position that is no number is another server's, and is left out.
        """
        if before is None or after is None:
            return None
        rows, drafted, accepted = (
            round(sum(after.growth(before, name).values())) for name in (_ROWS, _DRAFTED, _ACCEPTED)
        )
        by_position = {
            int(position): count
            for (position,), count in after.growth(before, _PER_POSITION, "position").items()
            if position.isdecimal()
        }
        return (
            cls(rows, drafted, accepted, tuple(round(by_position[k]) for k in sorted(by_position))) if drafted else None
        )

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts in percent of all, as vLLM has it."""
        return 100 * self.accepted_tokens / self.draft_tokens

    @property
    def acceptance_length(self) -> float:
        """Tokens that a row with drafts made on average, the one after the accepted drafts included."""
        return 1 + self.accepted_tokens / self.num_drafts

    @property
    def per_position_acceptance_rates(self) -> list[float]:
        """Share of the rows with drafts whose draft at each position was accepted; 0 to 1."""
        return [accepted / self.num_drafts for accepted in self.accepted_per_position]
