"""`RemotePrefills`: the KV connector of a decode engine whose prompts other engines compute."""

import itertools
import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dsjax.engine.contract.backoff import Backoff
from dsjax.engine.contract.commands import NAME_BYTES, Command, PullPages, int32s, names_of
from dsjax.engine.schedule.landing_area import LandingBuffer
from dsjax.engine.schedule.page_source import CommandTurn, Lookup, PageSource, RankPages
from dsjax.engine.schedule.pages import extend_hashes
from dsjax.engine.schedule.request import Request
from dsjax.engine.transfer.messages import (
    CHUNK_PAGES,
    CancelTransfer,
    ChunkReady,
    PrefillRequest,
    ReleaseChunk,
    Source,
    ToDecode,
    ToPrefill,
    TransferFailed,
    TransfersUnderWay,
)

_log = logging.getLogger(__name__)

TIER = "prefill"
"""The tier that transferred pages come from."""


class TransferCounts(NamedTuple):
    """Counts of transfers since the start."""

    asked: int = 0  # transfers
    completed: int = 0  # transfers
    given_up: int = 0  # transfers
    pages: int = 0  # pages that have arrived
    under_way: int = 0  # unfinished transfers
    # size, in pages, of the chunks of all ranks that are on the devices outside the cache or being pulled there
    landed: int = 0
    refused: int = 0  # transfers given up because the offered pages differ from the requested ones


@dataclass(eq=False)
class Transfer:
    """Pages that one prefill side computes for one rank."""

    name: str
    link: int
    rank: int
    first: int
    # names of the pages asked for; names[0] is page number `first` of its requests. With window pages, the last one names a window page
    names: list[bytes]
    request_time: float  # time at which it was requested
    last_message_time: float  # time of the last message about it
    awaited: set[bytes]  # names of pages that have not arrived
    owner: Request  # the request that started it
    requests: set[Request] = field(default_factory=set)  # all requests that wait for it; without any, it is cancelled
    waiters: set[Request] = field(default_factory=set)  # requests that the scheduler skips until something arrives
    offers: deque[ChunkReady] = field(default_factory=deque)
    pulling: dict[int, bytes] = field(default_factory=dict)  # names of the pages being pulled, by landing number
    cached: int = 0  # tokens cached on the prefill side
    offered_chunks: set[int] = field(default_factory=set)  # chunks that were offered, because an offer may arrive twice

    def matches(self, offer: ChunkReady) -> bool:
        """Whether an offer's numbers are valid and its pages have the names that were asked for.

        Invalid numbers would crash the threads of the engine or the executor, which do not check them.
        """
        has_valid_numbers = 0 <= offer.number < 2**31 and offer.count <= CHUNK_PAGES
        if not has_valid_numbers or len(offer.names) != NAME_BYTES * offer.count:
            return False
        offered = enumerate(names_of(offer.names), offer.first - self.first)
        return all(self.names[page] == name for page, name in offered if 0 <= page < len(self.names))

    def wake(self) -> None:
        """Let the scheduler consider the waiting requests again."""
        for request in self.waiters:
            request.is_loading = False
        self.waiters.clear()


class _PulledPage(NamedTuple):
    """A page to pull: its chunk, its place in the chunk, and its landing number."""

    source: Source
    chunk: int
    place: int
    number: int


class RemotePrefills(PageSource):
    """The transfers of all ranks of a decode engine. The caller sends `take_messages` and passes answers to `receive`.

    Attributes:
        connect: returns the number of the prefill engine at an address that a request names; None: addresses are ignored.
        pages_awaited_from: number of pages that each prefill engine was asked for and that have not arrived.

    Args:
        num_links: number of prefill engines that any request may be sent to.
        local_tokens: prompts that lack fewer tokens are computed here.
        timeout: seconds without a message after which a transfer is given up.
    """

    def __init__(self, num_links: int, local_tokens: int, timeout: float):
        self.local_tokens, self.timeout = local_tokens, timeout
        self.connect: Callable[[str], int] | None = None
        self._counts: Counter[str] = Counter()
        self._transfers: dict[str, Transfer] = {}
        self._transfer_by_page: dict[tuple[int, bytes], Transfer] = {}
        self._transfer_by_landing: dict[tuple[int, int], Transfer] = {}
        self._transfer_by_request: dict[Request, Transfer] = {}
        self._named_links: dict[Request, int] = {}  # for requests that name a prefill engine
        # For these requests, the name of the transfer that computes the prompt, until it is asked for.
        self._named_transfers: dict[Request, str] = {}
        self._computed_locally: set[Request] = set()  # because a transfer for them was given up
        self._default_links = range(num_links)
        self._link_numbers = itertools.count()
        self.pages_awaited_from: dict[int, int] = {}
        self._backoffs: dict[int, Backoff] = {}
        for _ in self._default_links:
            self.add_link()
        self._messages: list[tuple[int, ToPrefill]] = []
        self._pending_pulls: list[list[_PulledPage]] = []  # for the next command, by rank
        self._prefix, self._numbers = os.urandom(6).hex(), itertools.count()

    def bind(self, ranks: Sequence[RankPages]) -> None:
        """Start with these ranks. All transfers are given up; requests may ask again."""
        for transfer in list(self._transfers.values()):
            self._give_up(transfer)
        self._transfer_by_request.clear()
        self._computed_locally.clear()
        self.ranks, self._pending_pulls = ranks, [[] for _ in ranks]

    def add_link(self) -> int:
        """Add a prefill engine for requests that name it, and return its number."""
        number = next(self._link_numbers)
        self._backoffs[number], self.pages_awaited_from[number] = Backoff(), 0
        return number

    def forget_link(self, link: int, now: float) -> bool:
        """Forget a prefill engine that is gone, unless a request names it. Return whether it is forgotten."""
        if (
            link in self._default_links
            or self._backoffs[link].holds(now)
            or link in self._named_links.values()
            or any(transfer.link == link for transfer in self._transfers.values())
        ):
            return False
        del self._backoffs[link], self.pages_awaited_from[link]
        return True

    @property
    def num_under_way(self) -> int:
        """Number of unfinished transfers."""
        return len(self._transfers)

    @property
    def transfer_counts(self) -> TransferCounts:
        """Counters of transfers."""
        landed = sum(pages.landing.room_of(self) for pages in self.ranks)
        return TransferCounts(**self._counts, under_way=len(self._transfers), landed=landed)

    def take_messages(self) -> list[tuple[int, ToPrefill]]:
        """Take the (prefill engine, message) pairs to send."""
        messages, self._messages = self._messages, []
        return messages

    def added(self, request: Request) -> None:
        """Note the prefill engine that already computes a request's prompt, and the transfer's name."""
        prefill = request.options.prefill
        if prefill is not None and self.connect is not None:
            self._named_links[request] = self.connect(prefill["address"])
            self._named_transfers[request] = prefill["transfer"]

    def begin_step(self, now: float) -> None:
        """Give up transfers that have had no message for too long."""
        for transfer in [
            transfer for transfer in self._transfers.values() if now - transfer.last_message_time > self.timeout
        ]:
            # If offered pages found no room here, the link is not at fault.
            if transfer.pulling or not transfer.offers:
                self._backoffs[transfer.link].begin(now)
            self._give_up(transfer)

    def begin_rank(self, rank: int, now: float) -> None:
        """Pull the pages offered to a rank while there is room for them to land."""
        for transfer in [
            transfer for transfer in self._transfers.values() if transfer.rank == rank and transfer.offers
        ]:
            while transfer.offers and self._pull(transfer, transfer.offers[0], now):
                transfer.offers.popleft()
            if not transfer.awaited:
                self._complete(transfer, now)

    def awaits(self, rank: int, request: Request, name: bytes) -> bool:
        """Whether a page is on its way to a rank; then the request waits for it."""
        transfer = self._transfer_by_page.get((rank, name))
        if transfer is None:
            return False
        self._join(request, transfer)
        transfer.waiters.add(request)
        request.is_loading = True
        return True

    def lookup(
        self, rank: int, request: Request, names: Sequence[bytes], cached: Sequence[int], free_slots: int, now: float
    ) -> Lookup:
        """Ask a prefill engine for the pages after the `cached` ones, if the request fits in addition to the waiting ones."""
        joined = self._transfer_by_request.get(request)
        if len(cached) >= len(names) or request in self._computed_locally:
            return Lookup.ABSENT
        # Its own transfer asked for every page that it lacked. A page that it lacks now was evicted since, and is computed here.
        if joined is not None and joined.owner is request:
            return Lookup.ABSENT
        pool = self.ranks[rank].pool
        num_missing_tokens = len(request.token_ids) - pool.usable(names, len(cached)) * pool.page_size
        if num_missing_tokens < self.local_tokens or not self._available_links(request, now):
            return Lookup.ABSENT
        num_waiting, num_reserved = self._reserved(rank)
        num_missing_pages = pool.pages_for(len(request.token_ids)) - len(cached)
        windows = num_waiting + 1 if pool.num_windows else 0
        if num_waiting >= free_slots or not pool.can_hold(cached, num_missing_pages + num_reserved, windows):
            # Without other requests, waiting would not free any room.
            return Lookup.FULL if num_waiting else Lookup.ABSENT
        self._request_prefill(rank, request, len(cached), names, now)
        return Lookup.WAIT

    def receive(self, link: int, message: ToDecode, now: float) -> None:
        """Process a prefill engine's message."""
        if isinstance(message, TransferFailed):
            if not message.transfer:
                self._backoffs[link].begin(now)
            for transfer in list(self._transfers.values()):
                if transfer.link == link and message.transfer in ("", transfer.name):
                    self._give_up(transfer, notifies=False)
            return
        if isinstance(message, TransfersUnderWay):
            for name in message.transfers:
                transfer = self._transfer_of_link(link, name)
                # Otherwise the transfer waits for this side.
                if transfer is not None and not transfer.offers and not transfer.pulling:
                    transfer.last_message_time = now
            return
        transfer = self._transfer_of_link(link, message.transfer)
        if transfer is None:
            self._messages.append((link, ReleaseChunk(message.number)))
            return
        if message.number in transfer.offered_chunks:
            return
        if not transfer.matches(message):
            self._counts["refused"] += 1
            _log.error(
                "Prefill engine %d offers pages under the name %r that are not those asked for; the prompt is computed here.",
                link,
                transfer.name,
            )
            self._messages.append((link, ReleaseChunk(message.number)))
            self._give_up(transfer)
            return
        self._backoffs[link].end()
        transfer.last_message_time = now
        transfer.cached = message.cached
        transfer.offered_chunks.add(message.number)
        transfer.offers.append(message)

    def landed(self, rank: int, number: int, ok: bool, now: float) -> None:
        """Record that a page was pulled (`ok`) or that its pull failed."""
        transfer = self._transfer_by_landing.pop((rank, number), None)
        if transfer is None:
            return
        name = transfer.pulling.pop(number)
        if not ok:
            self._give_up(transfer)
            return
        self._mark_arrived(transfer, name)
        self._counts["pages"] += 1
        transfer.last_message_time = now
        transfer.wake()
        if not transfer.awaited:
            self._complete(transfer, now)

    def load_failed(self, rank: int, name: bytes, number: int) -> None:
        """Tell the executor to drop a page whose pull failed, because another process may have its part of the page."""
        self.ranks[rank].landing.drop(number)

    def release(self, rank: int, request: Request) -> None:
        """Stop waiting for a request. A transfer without waiting requests is cancelled."""
        name = self._named_transfers.pop(request, None)
        if name is not None:  # the prompt that is computed elsewhere is no longer needed
            page_size = self.ranks[rank].pool.page_size
            pages = (request.num_prompt_tokens - 1) // page_size
            if pages:
                page = extend_hashes(request, page_size)[pages - 1]
                self._messages.append((self._named_links[request], CancelTransfer(name, page)))
        self._leave(request)

    def preempted(self, request: Request) -> None:
        """Allow a request that waits again to have its prompt computed elsewhere."""
        self._computed_locally.discard(request)

    def ended(self, request: Request) -> None:
        """Forget a request."""
        self._computed_locally.discard(request)
        self._named_links.pop(request, None)
        self._named_transfers.pop(request, None)

    def num_computed(self, request: Request, loaded: Mapping[str, int]) -> int:
        """Return how many of a request's transferred pages its prefill engine computed, that is, had not cached."""
        pages, transfer = loaded.get(TIER, 0), self._transfer_by_request.get(request)
        if transfer is None:
            return pages
        page_size = self.ranks[transfer.rank].pool.page_size
        return pages - min(pages, max(0, transfer.cached // page_size - transfer.first))

    def cancel(self, rank: int) -> None:
        """Give up all transfers to a rank."""
        for transfer in [transfer for transfer in self._transfers.values() if transfer.rank == rank]:
            self._give_up(transfer)

    def commands(self) -> Iterable[tuple[CommandTurn, Command]]:
        """Yield the command that pulls the offered pages that have room to land."""
        pulls, self._pending_pulls = self._pending_pulls, [[] for _ in self.ranks]
        if not any(pulls):
            return
        sources = list(dict.fromkeys(page.source for pages in pulls for page in pages))
        ranks = [
            int32s(value for source, *rest in pages for value in (sources.index(source), *rest)) for pages in pulls
        ]
        yield CommandTurn.REQUEST, PullPages(ranks, [tuple(source) for source in sources])

    def _transfer_of_link(self, link: int, name: str) -> Transfer | None:
        """Return the transfer of this name if this prefill engine was asked for it, else None."""
        transfer = self._transfers.get(name)
        return transfer if transfer is not None and transfer.link == link else None

    def _reserved(self, rank: int) -> tuple[int, int]:
        """Return how many requests of a rank wait for transfers, and how many pages they will still need."""
        of_rank = [transfer for transfer in self._transfers.values() if transfer.rank == rank]
        requests = sum(len(transfer.requests) for transfer in of_rank)
        # After the transferred pages, each request needs one more for the tokens that it computes itself.
        return requests, sum(len(transfer.awaited) for transfer in of_rank) + requests

    def _request_prefill(
        self, rank: int, request: Request, num_cached: int, names: Sequence[bytes], now: float
    ) -> None:
        link = min(self._available_links(request, now), key=lambda link: self.pages_awaited_from[link])
        pool = self.ranks[rank].pool
        end = len(names) - 1 if pool.num_windows else len(names)  # the last name is that of the window page
        first = min(num_cached, end - 1)  # if only the window page is missing, it comes with the last page
        missing_names = list(names[first:])
        given_name = self._named_transfers.pop(request, None)
        if given_name in self._transfers:  # in use by another request: the name would hide its messages
            given_name = None
        name = given_name or f"{self._prefix}-{next(self._numbers)}"
        transfer = Transfer(name, link, rank, first, missing_names, now, now, set(missing_names), request)
        self._transfers[name] = transfer
        self.pages_awaited_from[link] += len(transfer.awaited)
        for page_name in missing_names:
            self._transfer_by_page.setdefault((rank, page_name), transfer)
        # One token more than the pages have: an engine computes a prompt's last token even if it is cached (`readable_names`).
        tokens = request.token_ids[: end * pool.page_size + 1]
        salt, priority = request.options.cache_salt, request.options.priority
        message = PrefillRequest(name, int32s(tokens), first, end, salt, priority, names[end - 1])
        self._messages.append((link, message))
        self._counts["asked"] += 1
        self.awaits(rank, request, names[num_cached])

    def _available_links(self, request: Request, now: float) -> list[int]:
        """Return the prefill engines that may be asked for a request now."""
        named = self._named_links.get(request)
        links = self._default_links if named is None else (named,)
        return [link for link in links if not self._backoffs[link].holds(now)]

    def _join(self, request: Request, transfer: Transfer) -> None:
        previous = self._transfer_by_request.get(request)
        if previous is not transfer:
            if previous is not None:
                self._leave(request)
            self._transfer_by_request[request] = transfer
            transfer.requests.add(request)

    def _leave(self, request: Request) -> None:
        transfer = self._transfer_by_request.pop(request, None)
        if transfer is None:
            return
        transfer.requests.discard(request)
        transfer.waiters.discard(request)
        if not transfer.requests and transfer.name in self._transfers:
            self._end(transfer)

    def _pull(self, transfer: Transfer, offer: ChunkReady, now: float) -> bool:
        """Pull the pages of an offer. Return False if there is no room for them."""
        rank, (pool, landing) = transfer.rank, self.ranks[transfer.rank]
        wanted = []
        for place in range(offer.count):
            page = offer.first - transfer.first + place
            if not 0 <= page < len(transfer.names) or transfer.names[page] not in transfer.awaited:
                continue
            name = transfer.names[page]
            if pool.find((name,)) or name in landing:  # it has arrived by another path
                self._mark_arrived(transfer, name)
                transfer.wake()
            else:
                wanted.append((place, name))
        if not wanted:
            self._messages.append((transfer.link, ReleaseChunk(offer.number)))
            return True
        if not landing.make_room(CHUNK_PAGES, self._wanted_names(rank), now):
            return False
        source, buffer = Source(transfer.link, offer.address), LandingBuffer(CHUNK_PAGES)  # the room of a full chunk
        for place, name in wanted:
            window = pool.num_windows > 0 and name == transfer.names[-1]
            number = landing.expect(name, self, TIER, now, buffer=buffer, window=window)
            transfer.pulling[number] = name
            self._transfer_by_landing[rank, number] = transfer
            self._pending_pulls[rank].append(_PulledPage(source, offer.number, place, number))
        return True

    def _wanted_names(self, rank: int) -> set[bytes]:
        """Return the names of pages that are in transit, or that have arrived but are not yet used by a request."""
        transfers = {*self._transfers.values(), *self._transfer_by_request.values()}
        return {name for transfer in transfers if transfer.rank == rank for name in transfer.names}

    def _mark_arrived(self, transfer: Transfer, name: bytes) -> None:
        if name in transfer.awaited:
            transfer.awaited.remove(name)
            self.pages_awaited_from[transfer.link] -= 1
        if self._transfer_by_page.get((transfer.rank, name)) is not transfer:
            return
        del self._transfer_by_page[transfer.rank, name]
        for other in self._transfers.values():
            if other.rank == transfer.rank and name in other.awaited:
                self._transfer_by_page[transfer.rank, name] = other
                return

    def _complete(self, transfer: Transfer, now: float) -> None:
        self._counts["completed"] += 1
        self.ranks[transfer.rank].landing.waits.append((TIER, now - transfer.request_time))
        for offer in transfer.offers:
            self._messages.append((transfer.link, ReleaseChunk(offer.number)))
        del self._transfers[transfer.name]
        transfer.wake()

    def _give_up(self, transfer: Transfer, notifies: bool = True) -> None:
        """End a transfer early: its requests compute the missing pages themselves."""
        self._counts["given_up"] += 1
        for request in transfer.requests:
            self._computed_locally.add(request)
        self._end(transfer, notifies)

    def _end(self, transfer: Transfer, notifies: bool = True) -> None:
        del self._transfers[transfer.name]
        for name in list(transfer.awaited):
            self._mark_arrived(transfer, name)
        for number in transfer.pulling:
            del self._transfer_by_landing[transfer.rank, number]
        self.ranks[transfer.rank].landing.give_up(transfer.pulling)
        transfer.pulling = {}
        if notifies:
            self._messages.append((transfer.link, CancelTransfer(transfer.name)))
        transfer.wake()
