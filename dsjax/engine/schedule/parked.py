"""`ParkedRequests`: requests that a smaller mesh cannot hold, while they wait for a larger one. Plain Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from dsjax.engine.schedule.request import Request
from dsjax.engine.schedule.scheduler_config import AdmissionError


class ParkedRequest(NamedTuple):
    """A request that no scheduler has. error: why the mesh of now cannot hold it. since: on the monotonic clock."""

    request: Request
    error: AdmissionError
    since: float


class ParkedRequests:
    """Belongs to the engine's thread. Others may ask for the number and the counts, and set `seconds`.

    Attributes:
        seconds: for which a request waits, from the first mesh on that could not hold it; 0: it ends at once.
        larger_is_wanted: whether the mesh of now is smaller than asked for; otherwise nothing is waited for.
        outcomes: counts of `resumed`, `expired`, `aborted` requests.
    """

    def __init__(self):
        self.seconds, self.larger_is_wanted = 0.0, False
        self.outcomes: Counter[str] = Counter()
        self._parked: dict[str, ParkedRequest] = {}

    def __len__(self) -> int:
        return len(self._parked)

    @property
    def requests(self) -> list[Request]:
        """All of them, for a mesh that may hold them."""
        return [parked.request for parked in self._parked.values()]

    def resume_but(self, refused: Iterable[Request]) -> None:
        """Let those go that another mesh holds: all but these."""
        refused_ids = {request.request_id for request in refused}
        for request_id in self._parked.keys() - refused_ids:
            del self._parked[request_id]
            self.outcomes["resumed"] += 1

    def park(self, refused: Iterable[tuple[Request, AdmissionError]], now: float) -> list[ParkedRequest]:
        """Keep requests that the mesh of now refuses; give those that do not wait, or have waited long enough."""
        ended = []
        for request, error in refused:
            before = self._parked.get(request.request_id)
            if before is None and not self._limit:
                ended.append(ParkedRequest(request, error, now))
            else:
                since = now if before is None else before.since
                self._parked[request.request_id] = ParkedRequest(request, error, since)
        return ended + self.expire(now)

    def expire(self, now: float) -> list[ParkedRequest]:
        """Take those that have waited long enough."""
        late = [parked for parked in self._parked.values() if parked.since + self._limit <= now]
        for parked in late:
            del self._parked[parked.request.request_id]
            self.outcomes["expired"] += 1
        return late

    def abort(self, request_id: str) -> Request | None:
        """Take one that nobody waits for any more; None where it is not here."""
        parked = self._parked.pop(request_id, None)
        if parked is None:
            return None
        self.outcomes["aborted"] += 1
        return parked.request

    def look_seconds(self, now: float) -> float | None:
        """Seconds until the next one has waited long enough; None where none waits."""
        since = min((parked.since for parked in self._parked.values()), default=None)
        return None if since is None else max(0.0, since + self._limit - now)

    @property
    def _limit(self) -> float:
        return self.seconds if self.larger_is_wanted else 0.0
