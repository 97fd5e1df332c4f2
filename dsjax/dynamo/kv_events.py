"""`KvEvents`: the engine's page events in the form of Dynamo's router. Nothing here imports Dynamo."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from dsjax.engine.schedule.page_events import AllBlocksCleared, BlockRemoved, BlockStored, Event


class Publisher(Protocol):
    """The part of Dynamo's `KvEventPublisher` that is used here: it sends one DP rank's events to the router."""

    def publish_batch(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Send the events in order; return at once."""


class KvEvents:
    """An `EventSink` that tells each DP rank's publisher which pages the rank has cached.

    Dynamo's blocks are the engine's pages; a block's hash is the last 64 bits of the page's name as a signed integer. Dynamo's interface
    has no tiers, so a page counts as cached while any tier of the rank has it: no tier requires recomputation. The engine's thread
    calls all methods except `connect`.
    """

    def __init__(self):
        self._publishers: dict[int, Publisher] = {}
        self._ranks: dict[int, _Rank] = {}

    def connect(self, rank: int, publisher: Publisher) -> None:
        """Send a DP rank's events to this publisher from now on. Events of ranks without a publisher are dropped."""
        self._publishers[rank] = publisher

    def publish(self, rank: int, events: Sequence[Event]) -> None:
        """Translate a rank's events, and send the changes."""
        publisher = self._publishers.get(rank)
        if publisher is not None:
            changes = self._ranks.setdefault(rank, _Rank()).apply(events)
            if changes:
                publisher.publish_batch(changes)

    def close(self) -> None:
        """Stop sending events. Dynamo closes the publishers."""
        self._publishers = {}


class _Rank:
    """Blocks of one rank that the router knows, and blocks that wait for their parent.

    The router cannot place a block with an unknown parent, so such a block waits for its parent. This happens when pages change tiers: the
    last page of a sequence moves first, and a page may be in no tier in between.
    """

    def __init__(self):
        self._places: dict[int, set[str | None]] = {}  # block → tiers that have it
        self._salts: dict[int, str] = {}  # published block → `cache_salt` of its sequence
        self._published: set[int] = set()
        self._waiting: dict[int, dict[int, BlockStored]] = {}  # unknown parent → block → the event of that block
        self._parents: dict[int, int] = {}  # waiting block → the parent that it waits for

    def apply(self, events: Sequence[Event]) -> list[dict[str, Any]]:
        """Return the changes for the router: the net effect of the events, stored blocks before removed ones."""
        changes: list[dict[str, Any]] = []
        removed: list[int] = []
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event, changes)
            elif isinstance(event, BlockRemoved):
                removed += event.block_hashes
                for block in event.block_hashes:
                    self._leave(block, event.medium)
            else:
                assert isinstance(event, AllBlocksCleared)
                removed += self._places
                self._places.clear()
                self._waiting.clear()
                self._parents.clear()
        gone = [block for block in dict.fromkeys(removed) if block in self._published and block not in self._places]
        if gone:
            self._published.difference_update(gone)
            for block in gone:
                self._salts.pop(block, None)
            changes.append({"type": "removed", "block_hashes": [signed(block) for block in gone]})
        return changes

    def _store(self, event: BlockStored, changes: list[dict[str, Any]]) -> None:
        for block in event.block_hashes:
            self._places.setdefault(block, set()).add(event.medium)
        if self._published.isdisjoint(event.block_hashes) and self._knows(event.parent_block_hash):
            self._publish(event, changes)  # the usual case: one event for all blocks
            return
        for block_event in _blocks(event):
            if block_event.block_hashes[0] in self._published:
                continue
            if self._knows(block_event.parent_block_hash):
                self._publish(block_event, changes)
            else:
                self._waiting.setdefault(block_event.parent_block_hash, {})[block_event.block_hashes[0]] = block_event
                self._parents[block_event.block_hashes[0]] = block_event.parent_block_hash

    def _publish(self, event: BlockStored, changes: list[dict[str, Any]]) -> None:
        due = [event]
        while due:  # no recursion: a chain of waiting blocks may be longer than Python's stack
            event = due.pop()
            salt = event.extra_keys[0][0] if event.extra_keys else self._salts.get(event.parent_block_hash)
            changes.append(_stored(event, salt))
            self._published.update(event.block_hashes)
            for block in event.block_hashes:
                if salt is not None:
                    self._salts[block] = salt
                for child, child_event in self._waiting.pop(block, {}).items():
                    del self._parents[child]
                    if child not in self._published:
                        due.append(child_event)

    def _leave(self, block: int, medium: str | None) -> None:
        tiers = self._places.get(block)
        if tiers is not None:
            tiers.discard(medium)
            if not tiers:
                del self._places[block]
                parent = self._parents.pop(block, None)
                if parent is not None:  # stop waiting: the parent may never arrive
                    del self._waiting[parent][block]
                    if not self._waiting[parent]:
                        del self._waiting[parent]

    def _knows(self, parent: int | None) -> bool:
        return parent is None or parent in self._published


def signed(block_hash: int) -> int:
    """Reinterpret an unsigned 64-bit hash as a signed integer."""
    return block_hash - 2**64 if block_hash >= 2**63 else block_hash


def _blocks(event: BlockStored) -> list[BlockStored]:
    """Split an event of several blocks into one event per block."""
    parents = [event.parent_block_hash, *event.block_hashes]
    size = event.block_size
    return [
        msgspec.structs.replace(
            event,
            block_hashes=[block],
            parent_block_hash=parents[place],
            token_ids=event.token_ids[place * size : (place + 1) * size],
            extra_keys=event.extra_keys[:1] if event.extra_keys and not place else None,
        )
        for place, block in enumerate(event.block_hashes)
    ]


def _stored(event: BlockStored, salt: str | None) -> dict[str, Any]:
    parent = event.parent_block_hash
    return {
        "type": "stored",
        "token_ids": event.token_ids,
        "num_block_tokens": [event.block_size] * len(event.block_hashes),
        "block_hashes": [signed(block) for block in event.block_hashes],
        "parent_hash": None if parent is None else signed(parent),
        "cache_salt": salt,
    }
