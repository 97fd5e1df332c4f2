"""`SharedEngine`: an engine that serves front end processes and sends them the tokens of their requests."""

from collections.abc import Iterable, Sequence

from dsjax.engine.engine import EngineParts
from dsjax.engine.engine_thread import ThreadedEngine
from dsjax.engine.schedule.request import Request
from dsjax.engine.schedule.scheduler import Update
from dsjax.engine.stats import StepStats
from dsjax.engine.text.outputs import EngineClosingError
from dsjax.serve.front_ends.link import FrontEnd, Links
from dsjax.serve.front_ends.messages import EndStreams, NewRequest, RequestProgress, StepUpdates, UpdateEntry


class SharedEngine(ThreadedEngine):
    """An engine for requests that front ends have validated. It forwards tokens and does not handle text.

    Attributes:
        make_rules: creates a request's logit rules.
    """

    def __init__(self, parts: EngineParts):
        super().__init__(parts)
        self.make_rules = parts.inputs.make_rules
        self.front_ends: Links | None = None
        # Keyed by the core's completion id.
        self._owners: dict[str, _Owner] = {}

    @property
    def num_unfinished(self) -> int:
        """Number of unfinished completions."""
        return len(self._owners)

    def admit(self, link: FrontEnd, request: NewRequest, requests: Sequence[Request]) -> None:
        """Queue the completions of a front end's request."""
        for (handle, request_id, _), completion in zip(request.completions, requests, strict=True):
            link.requests[handle] = completion
            self._owners[request_id] = _Owner(link, handle)
        self._thread.add(requests)

    def drop(self, link: FrontEnd, handles: Iterable[int]) -> list[Request]:
        """Abort completions whose clients have left; return those that had not finished."""
        dropped = [request for handle in handles if (request := link.requests.pop(handle, None)) is not None]
        for request in dropped:
            self._owners.pop(request.request_id, None)
        self._thread.abort([request.request_id for request in dropped])
        return dropped

    def abort_all(self) -> None:
        """End all requests, whose clients get an error from their front end, and all calls; refuse new calls."""
        self.closing = True
        self.front_ends.send_all(EndStreams())
        for link in self.front_ends.links:
            self.drop(link, list(link.requests))
        self._fail_calls(EngineClosingError("the server is shutting down"))

    async def shutdown(self, timeout: float = 10.0) -> None:
        """End the front ends, then the engine's thread."""
        await self.front_ends.end()
        await super().shutdown(timeout)

    def deliver(self, updates: list[Update], stats: StepStats | None) -> None:
        """Send each front end the updates of its requests."""
        entries_by_link: dict[FrontEnd, list[UpdateEntry]] = {}
        for update in updates:
            owner = self._owners.get(update.request.request_id)
            if owner is None:
                continue
            entries_by_link.setdefault(owner.link, []).append(owner.to_entry(update))
            if update.finish_reason is not None:
                del self._owners[update.request.request_id]
                owner.link.requests.pop(owner.handle, None)
        for link, entries in entries_by_link.items():
            link.send(StepUpdates(entries))
        if stats is not None:
            for observer in self.observers:
                observer.on_step(stats)

    def fail_requests(self, error: BaseException) -> None:
        """Make all front ends fail their requests and exit."""
        self.error = error
        self._owners.clear()
        self.front_ends.fail()


class _Owner:
    """The front end of a completion, its handle there, and whether its first token was sent."""

    __slots__ = ("handle", "is_first_token_sent", "link")

    def __init__(self, link: FrontEnd, handle: int):
        self.link, self.handle, self.is_first_token_sent = link, handle, False

    def to_entry(self, update: Update) -> UpdateEntry:
        """Return an update in the form that the front end receives."""
        request, result, finish_reason = update
        progress = None if self.is_first_token_sent and finish_reason is None else RequestProgress.from_request(request)
        self.is_first_token_sent |= result is not None and bool(result.token_ids)
        return self.handle, result, finish_reason, progress
