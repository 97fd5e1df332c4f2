"""Service-level objectives: which requests were answered fast enough."""

from collections.abc import Sequence

from dsjax.bench.serve.records import RequestRecord
from dsjax.errors import UserError

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
