"""`PageEvents`: KV cache events in vLLM's format: blocks stored and removed, by tier and DP rank. No ZeroMQ here.

A block is a page. Its hash is the last 64 bits of the page's name as an unsigned integer; vLLM truncates its hashes the same way.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from dsjax.engine.contract.commands import from_int32s, int32s
from dsjax.engine.schedule.request import Request

MEDIA = {"device": "GPU", "host": "CPU_TIER1", "disk": "CPU_TIER2"}
"""Dynamo's names of the tiers, for vLLM's field `medium`. As in Dynamo, the device tier is GPU on a CPU platform too."""


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True, omit_defaults=True):
    """Consecutive blocks were stored in a tier."""

    block_hashes: list[int]
    parent_block_hash: int | None  # of the block before the first one; None: no parent
    token_ids: list[int]  # of all the blocks
    block_size: int  # tokens per block
    lora_id: int | None  # always None
    medium: str | None  # a value of `MEDIA`
    lora_name: str | None = None  # always None
    # of each block, as in vLLM: the first block of a prompt with a `cache_salt` has the salt. None: no block has any
    extra_keys: list[list[str] | None] | None = None


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True, omit_defaults=True):
    """Blocks were removed from a tier."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All blocks of this DP rank were removed, from all tiers."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventSink(Protocol):
    """Receiver of page events. Called in the engine's thread; must be fast."""

    def publish(self, rank: int, events: Sequence[Event]) -> None:
        """Receive events of a DP rank, in order."""

    def close(self) -> None:
        """Close the sink when the engine ends."""


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """One message to vLLM's subscribers: events of one DP rank."""

    ts: float  # seconds since 1970
    events: list[Event]
    data_parallel_rank: int


@dataclass(slots=True, eq=False)
class _Known:
    """A page's data for `BlockStored` (parent's name, tokens, salt), and present and pending places: (rank, tier), rank None for disk."""

    parent: bytes | None
    tokens: bytes
    salt: str | None
    places: set[tuple[int | None, str]] = field(default_factory=set)


class PageEvents:
    """Collects the events of all ranks. Disk events go to all ranks' subscribers, because each rank can fetch the page."""

    def __init__(self, num_ranks: int, page_size: int):
        self.page_size = page_size
        self._events: list[list[Event]] = [[] for _ in range(num_ranks)]
        self._known: dict[bytes, _Known] = {}
        self._gone: list[bytes] = []  # removed from the disk, event pending

    def computed(self, rank: int, request: Request, places: Sequence[int]) -> None:
        """Record pages stored on a rank's device: one event per consecutive run. places: indices into the request's pages, ascending."""
        size, names, salt = self.page_size, request.page_hashes, request.options.cache_salt
        for index in places:
            known = self._known.get(names[index])
            if known is None:
                page_tokens = int32s(request.token_ids[index * size : (index + 1) * size])
                parent = names[index - 1] if index else None
                known = self._known[names[index]] = _Known(parent, page_tokens, salt)
            known.places.add((rank, "device"))
        run_start = 0
        for run_end in range(1, len(places) + 1):
            if run_end == len(places) or places[run_end] != places[run_end - 1] + 1:
                first, stop = places[run_start], places[run_end - 1] + 1
                parent, tokens = names[first - 1] if first else None, request.token_ids[first * size : stop * size]
                self._tell(rank, _stored(names[first:stop], parent, tokens, size, "device", salt))
                run_start = run_end

    def holds(self, name: bytes) -> None:
        """Keep a page's data while the page is being written to the disk. `stored` or `removed` follows when the write has ended."""
        known = self._known.get(name)
        if known is not None:
            known.places.add((None, "disk"))

    def stored(self, rank: int | None, tier: str, name: bytes) -> None:
        """Record a page stored in a tier. rank: None for all. Only pages that this process has computed give an event."""
        known = self._known.get(name)
        if known is not None:
            known.places.add((rank, tier))
            tokens = list(from_int32s(known.tokens))
            self._tell(rank, _stored([name], known.parent, tokens, self.page_size, tier, known.salt))

    def removed(self, rank: int | None, tier: str, names: Iterable[bytes], *, told: bool = True) -> None:
        """Record pages removed from a tier. told: send the event; False if no `BlockStored` was sent for them (a failed write)."""
        hashes = []
        for name in names:
            known = self._known.get(name)
            if known is not None and (rank, tier) in known.places:
                hashes.append(block_hash(name))
                known.places.discard((rank, tier))
                if not known.places:
                    del self._known[name]
        if hashes and told:
            self._tell(rank, BlockRemoved(hashes, MEDIA[tier]))

    def gone_from_disk(self, names: Iterable[bytes]) -> None:
        """Record pages removed from the disk. The next `take` adds their event after all others."""
        self._gone += names

    def cleared(self, rank: int) -> None:
        """Drop a rank's pending events, and record that all its pages were removed from all tiers. The shared disk is empty then too."""
        self._events[rank] = [AllBlocksCleared()]
        for name, known in list(self._known.items()):
            known.places = {place for place in known.places if place[0] not in (rank, None)}
            if not known.places:
                del self._known[name]

    def take(self) -> list[tuple[int, list[Event]]]:
        """Return and clear the pending events, as (rank, events) of the ranks that have any."""
        if self._gone:
            gone, self._gone = self._gone, []
            self.removed(None, "disk", gone)
        events_of_ranks = [(rank, events) for rank, events in enumerate(self._events) if events]
        for rank, _ in events_of_ranks:
            self._events[rank] = []
        return events_of_ranks

    def _tell(self, rank: int | None, event: Event) -> None:
        for events in self._events if rank is None else (self._events[rank],):
            events.append(event)


def block_hash(name: bytes) -> int:
    """Return the block hash of a page's name: its last 64 bits, unsigned."""
    return int.from_bytes(name[-8:], "big")


def _stored(
    names: Sequence[bytes], parent: bytes | None, tokens: list[int], size: int, tier: str, salt: str | None
) -> BlockStored:
    hashes = [block_hash(name) for name in names]
    if parent is not None:
        return BlockStored(hashes, block_hash(parent), tokens, size, None, MEDIA[tier])
    keys = None if salt is None else [[salt], *[None] * (len(names) - 1)]
    return BlockStored(hashes, None, tokens, size, None, MEDIA[tier], None, keys)
