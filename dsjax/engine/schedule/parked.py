"""`ParkedRequests`: requests that a smaller mesh cannot hold, while they wait for a larger one. Plain Python."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from dsjax.engine.contract.executor import ErrorKind, RowResult
from dsjax.engine.schedule.request import FinishReason, Request
from dsjax.engine.schedule.scheduler import Update
from dsjax.engine.schedule.scheduler_config import AdmissionError


class ParkedRequest(NamedTuple):
    """A request outside the scheduler."""

    request: Request
    error: AdmissionError  # why the current mesh cannot hold it
    since: float  # start of its wait, on the monotonic clock


class ParkedRequests(dict[str, ParkedRequest]):
    """The parked requests by id. Threads other than the engine's may read the length and the counts, and set `seconds`.

    Attributes:
        seconds: how long a request waits, from the first mesh that could not hold it; 0: it fails at once.
        is_reduced: whether the current mesh is smaller than requested; otherwise requests do not wait.
        outcomes: counts of `resumed`, `expired`, `aborted` requests.
    """

    def __init__(self):
        self.seconds, self.is_reduced = 0.0, False
        self.outcomes: Counter[str] = Counter()

    @property
    def requests(self) -> list[Request]:
        """All parked requests."""
        return [parked.request for parked in self.values()]

    def park(self, request: Request, error: AdmissionError, now: float) -> list[Update]:
        """Park a new request that the current mesh refuses. Return the updates from `expire`."""
        self[request.request_id] = ParkedRequest(request, error, now)
        return self.expire(now)

    def renew(self, refused: Iterable[tuple[Request, AdmissionError]], now: float) -> list[Update]:
        """Park the requests that a new mesh refuses; all others have resumed. Return the updates from `expire`."""
        before = dict(self)
        self.clear()
        for request, error in refused:
            earlier = before.pop(request.request_id, None)
            self[request.request_id] = ParkedRequest(request, error, now if earlier is None else earlier.since)
        self.outcomes["resumed"] += len(before)
        return self.expire(now)

    def expire(self, now: float) -> list[Update]:
        """End the requests that have waited too long or may not wait, and return their last updates."""
        updates = []
        for request, error, since in [one for one in self.values() if one.since + self._limit <= now]:
            del self[request.request_id]
            self.outcomes["expired"] += since < now
            waited = self.seconds if since + self.seconds <= now else 0
            updates.append(_refuse(request, error, now, waited))
        return updates

    def abort(self, request_id: str, now: float) -> Update | None:
        """Abort a request. Return its last update, or None if it is not parked."""
        parked = self.pop(request_id, None)
        if parked is None:
            return None
        self.outcomes["aborted"] += 1
        parked.request.finish(FinishReason.ABORT, now)
        return Update(parked.request, None, FinishReason.ABORT)

    def look_seconds(self, now: float) -> float:
        """Return the seconds until the next request expires. There must be one."""
        return max(0.0, min(parked.since for parked in self.values()) + self._limit - now)

    @property
    def _limit(self) -> float:
        return self.seconds if self.is_reduced else 0.0


def _refuse(request: Request, error: AdmissionError, now: float, waited: float) -> Update:
    """End an accepted request that the current mesh cannot hold. waited: seconds that it has waited for a larger mesh."""
    request.finish(FinishReason.ERROR, now)
    wait = f"; no larger mesh came in {waited:g} s" if waited else ""
    message = f"the server's mesh has changed, and {error}{wait}"
    return Update(request, RowResult(error=message, kind=ErrorKind.NO_ROOM), FinishReason.ERROR)
