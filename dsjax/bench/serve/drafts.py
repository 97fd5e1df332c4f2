"""What came of a server's speculative decoding while a point was measured: its counters before and after."""

from dataclasses import dataclass

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

_TIMEOUT = aiohttp.ClientTimeout(total=10)
_PREFIX = "vllm:spec_decode_num_"
_ROWS, _DRAFTED, _ACCEPTED = (f"{_PREFIX}{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens"))
_PER_POSITION = f"{_PREFIX}accepted_tokens_per_pos_total"

Counters = dict[tuple[str, str], float]
"""(name, position or nothing) to its sum over all engines."""


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
    def between(cls, before: Counters | None, after: Counters | None) -> "DraftFigures | None":
        """What happened between two readings; None where the server drafted nothing, or does not tell."""
        if before is None or after is None:
            return None

        def grown(name: str, position: str = "") -> int:
            old, new = before.get((name, position), 0.0), after.get((name, position), 0.0)
            return round(new - old if new >= old else new)  # one that fell was begun anew, by a restart

        if not grown(_DRAFTED):
            return None
        positions = sorted({int(position) for name, position in after if name == _PER_POSITION})
        per_position = tuple(grown(_PER_POSITION, str(position)) for position in positions)
        return cls(grown(_ROWS), grown(_DRAFTED), grown(_ACCEPTED), per_position)

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts in percent of all, as vLLM has it."""
        return 100 * self.accepted_tokens / self.draft_tokens

    @property
    def acceptance_length(self) -> float:
        """Tokens that a row with drafts made on average, the one after the accepted drafts included."""
        return 1 + self.accepted_tokens / self.num_drafts

    @property
    def per_position(self) -> list[float]:
        """Share of the rows with drafts whose draft at each position was accepted; 0 to 1."""
        return [accepted / self.num_drafts for accepted in self.accepted_per_position]


async def read_counters(session: aiohttp.ClientSession, url: str) -> Counters | None:
    """A server's counters of drafts; None where it has no `/metrics`, and empty where it has none of them."""
    names = [("name[]", name) for name in (_ROWS, _DRAFTED, _ACCEPTED, _PER_POSITION)]
    try:
        async with session.get(f"{url}/metrics", params=names, timeout=_TIMEOUT) as response:
            return counters(await response.text()) if response.status == 200 else None
    except (aiohttp.ClientError, OSError, ValueError):
        return None


def counters(text: str) -> Counters:
    """The counters of drafts in an exposition.

    Raises:
        ValueError: it is not the text format.
    """
    found: Counters = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(_PREFIX) and sample.name.endswith("_total"):
                key = sample.name, sample.labels.get("position", "")
                found[key] = found.get(key, 0.0) + sample.value
    return found
