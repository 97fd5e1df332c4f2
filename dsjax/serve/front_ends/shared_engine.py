"""`SharedEngine`: the engine in its process where front ends have the clients; it hands each front end its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dsjax.engine.engine import EngineParts
from dsjax.engine.engine_thread import ThreadedEngine
from dsjax.engine.schedule.request import Request
from dsjax.engine.schedule.scheduler import Update
from dsjax.engine.stats import StepStats
from dsjax.serve.front_ends.link import FrontEnd, Links
from dsjax.serve.front_ends.messages import EndStreams, NewRequest, RequestProgress, StepUpdates, UpdateEntry


class SharedEngine(ThreadedEngine):
    """The engine for requests that other processes have checked: it follows no text, and passes tokens on.

    Attributes:
        make_rules: makes what changes a request's logits.
    """

    def __init__(self, parts: EngineParts):
        super().__init__(parts)
        self.make_rules = parts.inputs.make_rules
        self.front_ends: Links | None = None
        # By the core's id: where a completion came from, its handle there, and whether its first token was sent.
        self._owners: dict[str, _Owner] = {}

    @property
    def num_unfinished(self) -> int:
        """Completions that have not ended."""
        return len(self._owners)

    def admit(self, link: FrontEnd, request: NewRequest, requests: Sequence[Request]) -> None:
        """Queue the completions of a front end's request."""
        for (handle, request_id, _), one in zip(request.completions, requests, strict=True):
            link.requests[handle] = one
            self._owners[request_id] = _Owner(link, handle)
        self._thread.add(requests)

    def drop(self, link: FrontEnd, handles: Iterable[int]) -> list[Request]:
        """End completions that nobody waits for; give those that had not ended."""
        ended = [one for handle in handles if (one := link.requests.pop(handle, None)) is not None]
        for one in ended:
            self._owners.pop(one.request_id, None)
        self._thread.abort([one.request_id for one in ended])
        return ended

    def abort_all(self) -> None:
        """End every request; each client gets an error from its front end."""
        self.front_ends.send_all(EndStreams())
        for link in self.front_ends.links:
            self.drop(link, list(link.requests))

    async def shutdown(self, timeout: float = 10.0) -> None:
        """End the front ends, then the engine's thread."""
        self.closing = True  # before the thread ends: front ends take a while
        await self.front_ends.end()
        await super().shutdown(timeout)

    def deliver(self, updates: list[Update], stats: StepStats | None) -> None:
        """Send each front end what a step did to its requests."""
        entries_by_link: dict[FrontEnd, list[UpdateEntry]] = {}
        for update in updates:
            owner = self._owners.get(update.request.request_id)
            if owner is None:
                continue
            entries_by_link.setdefault(owner.link, []).append(owner.entry(update))
            if update.finish_reason is not None:
                del self._owners[update.request.request_id]
                owner.link.requests.pop(owner.handle, None)
        for link, entries in entries_by_link.items():
            link.send(StepUpdates(entries))
        if stats is not None:
            for observer in self.observers:
                observer.on_step(stats)

    def fail_requests(self, error: BaseException) -> None:
        """Have every front end end its requests and itself."""
        self.error = error
        self._owners.clear()
        self.front_ends.fail()


class _Owner:
    """Where a completion came from."""

    __slots__ = ("first_sent", "handle", "link")

    def __init__(self, link: FrontEnd, handle: int):
        self.link, self.handle, self.first_sent = link, handle, False

    def entry(self, update: Update) -> UpdateEntry:
        """Write an update as the front end gets it."""
        request, result, reason = update
        progress = None if self.first_sent and reason is None else RequestProgress.of(request)
        self.first_sent |= result is not None and bool(result.token_ids)
        return self.handle, result, reason, progress
