"""`Incoming`: what a decode scheduler has asked prefill sides for, what they have offered, and when it goes on without. Plain Python."""

import itertools
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dsjax.engine.contract.commands import int32s
from dsjax.engine.schedule.pages import PagePool
from dsjax.engine.schedule.request import Request
from dsjax.engine.tiers.disk_tier import Pause
from dsjax.engine.tiers.page_tiers import PageMoves
from dsjax.engine.transfer.page_transfer import (
    Ask,
    Cancel,
    Failed,
    Offer,
    PulledPages,
    Release,
    Source,
    ToDecode,
    ToPrefill,
    UnderWay,
)


class TransferCounts(NamedTuple):
    """What has come of transfers since the start.

    Attributes:
        asked, completed, given_up: transfers; those that are neither completed nor given up are under way or were not wanted any more.
        pages: that have come. under_way: transfers.
        landed: pages that lie on the devices beside the cache, or are being pulled there, of all ranks.
    """

    asked: int = 0
    completed: int = 0
    given_up: int = 0
    pages: int = 0
    under_way: int = 0
    landed: int = 0


@dataclass(eq=False)
class Transfer:
    """Pages that one prefill side computes for one rank.

    Attributes:
        names: of the pages, the first of which is page `first` of its requests.
        awaited: names of those that have not come. pulling: by the number under which each lands.
        owner: the request that it was asked for. requests: that wait for it; where there is none left it is cancelled. waiters: those of
            them that need not be looked at before something has come.
        since: when it was last heard of. began: when it was asked for.
        cached: tokens that the prefill side had cached. seen: parcels that were offered; an offer may come twice.
    """

    name: str
    link: int
    rank: int
    first: int
    names: list[bytes]
    began: float
    since: float
    awaited: set[bytes]
    owner: Request
    requests: set[Request] = field(default_factory=set)
    waiters: set[Request] = field(default_factory=set)
    offers: deque[Offer] = field(default_factory=deque)
    pulling: dict[int, bytes] = field(default_factory=dict)
    cached: int = 0
    seen: set[int] = field(default_factory=set)

    def wake(self) -> None:
        """Have those who wait looked at again."""
        for request in self.waiters:
            request.is_arriving = False
        self.waiters.clear()


class Incoming:
    """The transfers of all ranks of a decode scheduler.

    The caller sends what `take_messages` gives, hands what comes to `receive`, and has `pools` of the ranks entered before the first step.

    Attributes:
        awaited: of each prefill side, pages that were asked of it and have not come.
        waits: ("prefill", seconds from asking to the last page) of completed transfers. Whoever reads it empties it.

    Args:
        num_links: prefill sides that any request may be sent to.
        local_tokens: a request that lacks fewer tokens is computed here.
        timeout: seconds after which a transfer that is not heard of is given up.
    """

    def __init__(self, num_links: int, local_tokens: int, timeout: float):
        self.local_tokens, self.timeout = local_tokens, timeout
        self.pools: list[PagePool] = []
        self._counts = TransferCounts()
        self.waits: list[tuple[str, float]] = []
        self._transfers: dict[str, Transfer] = {}
        self._expected: dict[tuple[int, bytes], Transfer] = {}
        self._pulling: dict[tuple[int, int], Transfer] = {}
        self._of: dict[Request, Transfer] = {}
        self._any = range(num_links)
        self.awaited = [0] * num_links
        self._pauses = [Pause() for _ in range(num_links)]
        self._messages: list[tuple[int, ToPrefill]] = []
        self._prefix, self._numbers = os.urandom(6).hex(), itertools.count()

    def add_link(self) -> int:
        """The number of another prefill side, which only requests that name it are sent to."""
        self._pauses.append(Pause())
        self.awaited.append(0)
        return len(self._pauses) - 1

    @property
    def num_under_way(self) -> int:
        """Transfers that have not ended."""
        return len(self._transfers)

    @property
    def counts(self) -> TransferCounts:
        """What has come of transfers so far."""
        landed = sum(pool.below.num_pulled for pool in self.pools)
        return self._counts._replace(under_way=len(self._transfers), landed=landed)

    def take_messages(self) -> list[tuple[int, ToPrefill]]:
        """(prefill side, message) that are to be sent; each is given once."""
        messages, self._messages = self._messages, []
        return messages

    def begin_step(self, now: float) -> None:
        """Another step is planned: what was not heard of for too long is given up."""
        for transfer in [one for one in self._transfers.values() if now - one.since > self.timeout]:
            # Where what was offered has found no room here, that is not the link's fault.
            if transfer.pulling or not transfer.offers:
                self._pauses[transfer.link].begin(now)
            self._give_up(transfer)

    def awaits(self, rank: int, request: Request, name: bytes) -> bool:
        """Whether a page is on its way to a rank; the request then waits for it, and need not be looked at before."""
        transfer = self._expected.get((rank, name))
        if transfer is None:
            return False
        self._join(request, transfer)
        transfer.waiters.add(request)
        request.is_arriving = True
        return True

    def may_ask(self, request: Request, found: int, pages: int, now: float) -> bool:
        """Whether a prefill side is to compute the pages behind the `found` ones, up to `pages`, for a request."""
        joined = self._of.get(request)
        if found >= pages or request.computes_prompt or (joined is not None and joined.owner is request):
            return False
        lacking = len(request.token_ids) - found * self.pools[0].page_size
        return lacking >= self.local_tokens and bool(self._links(request, now))

    def reserved(self, rank: int) -> tuple[int, int]:
        """Requests of a rank that wait for transfers, and pages that they will need for what has not come."""
        own = [transfer for transfer in self._transfers.values() if transfer.rank == rank]
        requests = sum(len(transfer.requests) for transfer in own)
        return requests, sum(len(transfer.awaited) for transfer in own) + requests

    def ask(self, rank: int, request: Request, found: int, names: Sequence[bytes], now: float) -> None:
        """Have a prefill side compute the pages behind the `found` ones; `may_ask` has allowed it."""
        link = min(self._links(request, now), key=lambda link: self.awaited[link])
        rest = list(names[found:])
        handed, request.prefill_transfer = request.prefill_transfer, None
        if handed in self._transfers:  # of another request; nobody would hear any more of what that one awaits
            handed = None
        transfer = Transfer(
            handed or f"{self._prefix}-{next(self._numbers)}", link, rank, found, rest, now, now, set(rest), request
        )
        self._transfers[transfer.name] = transfer
        self.awaited[link] += len(transfer.awaited)
        for name in rest:
            self._expected.setdefault((rank, name), transfer)
        tokens = request.token_ids[: len(names) * self.pools[rank].page_size + 1]
        salt, priority = request.options.cache_salt, request.options.priority
        self._messages.append((link, Ask(transfer.name, int32s(tokens), found, len(names), salt, priority)))
        self._count(asked=1)
        self.awaits(rank, request, rest[0])

    def receive(self, link: int, message: ToDecode, now: float) -> None:
        """A prefill side has said something."""
        if isinstance(message, Failed):
            gone = [one for one in self._transfers.values() if one.link == link and message.transfer in ("", one.name)]
            if not message.transfer:
                self._pauses[link].begin(now)
            for transfer in gone:
                self._give_up(transfer, tells=False)
            return
        if isinstance(message, UnderWay):
            for name in message.transfers:
                transfer = self._transfers.get(name)
                if transfer is not None and not transfer.offers and not transfer.pulling:  # else it is this side's turn
                    transfer.since = now
            return
        transfer = self._transfers.get(message.transfer)
        places = range(message.first, message.first + message.count)
        if transfer is not None and message.number in transfer.seen:
            return
        if transfer is None or places.stop <= transfer.first or transfer.first + len(transfer.names) <= places.start:
            self._messages.append((link, Release(message.number)))
            return
        self._pauses[link].end()
        transfer.since = now
        transfer.cached = message.cached
        transfer.seen.add(message.number)
        transfer.offers.append(message)

    def pull(self, rank: int, moves: PageMoves, now: float) -> None:
        """Have what was offered to a rank pulled, as far as there is room for it to land."""
        for transfer in [one for one in self._transfers.values() if one.rank == rank and one.offers]:
            while transfer.offers and self._pull(transfer, transfer.offers[0], moves, now):
                transfer.offers.popleft()
            if not transfer.awaited:
                self._complete(transfer, now)

    def landed(self, rank: int, number: int, ok: bool, now: float) -> None:
        """A page that was to be pulled has come, or could not be."""
        transfer = self._pulling.pop((rank, number), None)
        if transfer is None:
            return
        name = transfer.pulling.pop(number)
        if not ok:
            self._give_up(transfer)
            return
        self._arrived(transfer, name)
        self._count(pages=1)
        transfer.since = now
        transfer.wake()
        if not transfer.awaited:
            self._complete(transfer, now)

    def leave(self, request: Request) -> None:
        """A request waits no longer: it has begun, or is gone. What nobody else waits for is cancelled."""
        if request.prefill_transfer is not None:  # it needs nothing of what is computed for it elsewhere
            self._messages.append((request.prefill_link, Cancel(request.prefill_transfer)))
            request.prefill_transfer = None
        transfer = self._of.pop(request, None)
        if transfer is None:
            return
        transfer.requests.discard(request)
        transfer.waiters.discard(request)
        if not transfer.requests and transfer.name in self._transfers:
            self._end(transfer)

    def forget(self, rank: int) -> None:
        """Give up every transfer of a rank: its pages are not to be found, or nobody knows what became of them."""
        for transfer in [one for one in self._transfers.values() if one.rank == rank]:
            self._give_up(transfer)

    def void(self) -> None:
        """Give up every transfer: nobody knows what became of what was being pulled, as the executor that did is gone.

        Requests may have others asked for, on whichever rank they are then.
        """
        for transfer in list(self._transfers.values()):
            self._give_up(transfer)
        self._of.clear()

    def num_cached_elsewhere(self, request: Request) -> int:
        """Of the pages that have come for a request, how many its prefill side had cached."""
        transfer = self._of.get(request)
        if transfer is None:
            return 0
        page_size = self.pools[transfer.rank].page_size
        return min(request.num_prefill_pages, max(0, transfer.cached // page_size - transfer.first))

    def _links(self, request: Request, now: float) -> list[int]:
        """Prefill sides that may be asked for a request now."""
        links = self._any if request.prefill_link is None else (request.prefill_link,)
        return [link for link in links if not self._pauses[link].holds(now)]

    def _join(self, request: Request, transfer: Transfer) -> None:
        before = self._of.get(request)
        if before is not transfer:
            if before is not None:
                self.leave(request)
            self._of[request] = transfer
            transfer.requests.add(request)

    def _pull(self, transfer: Transfer, offer: Offer, moves: PageMoves, now: float) -> bool:
        """False where there is no room for what the offer has."""
        rank, pool = transfer.rank, self.pools[transfer.rank]
        wanted = []
        for place in range(offer.count):
            page = offer.first - transfer.first + place
            if not 0 <= page < len(transfer.names) or transfer.names[page] not in transfer.awaited:
                continue
            name = transfer.names[page]
            if pool.find((name,)) or pool.below.lands(name):  # it has come another way
                self._arrived(transfer, name)
                transfer.wake()
            else:
                wanted.append((place, name))
        if not wanted:
            self._messages.append((transfer.link, Release(offer.number)))
            return True
        if not pool.below.make_room(len(wanted), self._names_on_their_way(rank), now):
            return False
        pulled = []
        for place, name in wanted:
            number = pool.below.expect(name, now)
            transfer.pulling[number] = name
            self._pulling[rank, number] = transfer
            pulled.append((place, number))
        moves.pulls.append(PulledPages(Source(transfer.link, offer.address), offer.number, pulled))
        return True

    def _names_on_their_way(self, rank: int) -> set[bytes]:
        return {name for transfer in self._transfers.values() if transfer.rank == rank for name in transfer.names}

    def _arrived(self, transfer: Transfer, name: bytes) -> None:
        if name in transfer.awaited:
            transfer.awaited.remove(name)
            self.awaited[transfer.link] -= 1
        if self._expected.get((transfer.rank, name)) is not transfer:
            return
        del self._expected[transfer.rank, name]
        for other in self._transfers.values():
            if other.rank == transfer.rank and name in other.awaited:
                self._expected[transfer.rank, name] = other
                return

    def _complete(self, transfer: Transfer, now: float) -> None:
        self._count(completed=1)
        self.waits.append(("prefill", now - transfer.began))
        for offer in transfer.offers:
            self._messages.append((transfer.link, Release(offer.number)))
        del self._transfers[transfer.name]
        transfer.wake()

    def _give_up(self, transfer: Transfer, tells: bool = True) -> None:
        """Go on without what has not come: its requests compute the rest."""
        self._count(given_up=1)
        for request in transfer.requests:
            request.computes_prompt = True
        self._end(transfer, tells)

    def _end(self, transfer: Transfer, tells: bool = True) -> None:
        del self._transfers[transfer.name]
        for name in list(transfer.awaited):
            self._arrived(transfer, name)
        for number in transfer.pulling:
            del self._pulling[transfer.rank, number]
        self.pools[transfer.rank].below.give_up(transfer.pulling)
        transfer.pulling = {}
        if tells:
            self._messages.append((transfer.link, Cancel(transfer.name)))
        transfer.wake()

    def _count(self, **more: int) -> None:
        self._counts = self._counts._replace(
            **{name: getattr(self._counts, name) + value for name, value in more.items()}
        )
