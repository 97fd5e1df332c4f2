"""`KvEvents`: the engine's pages as Dynamo's router knows them. Nothing here imports Dynamo."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from dsjax.engine.schedule.page_events import AllBlocksCleared, BlockRemoved, BlockStored, Event


class Publisher(Protocol):
    """What is needed of Dynamo's `KvEventPublisher`: one DP rank's way to the router."""

    def publish_batch(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Send these, in this order; returns at once."""


class KvEvents:
    """An `EventSink` that tells each DP rank's publisher which pages can be found there.

    Dynamo's blocks are the engine's pages; a block's hash is the last 64 bits of the page's name as a signed integer. The interface has
    no tiers, so a page counts as cached from when it is first stored in any tier of a rank until it has left the last one: wherever it is,
    it need not be computed. Used by the engine's thread, except for `connect`.
    """

    def __init__(self):
        self._publishers: dict[int, Publisher] = {}
        self._ranks: dict[int, _Rank] = {}

    def connect(self, rank: int, publisher: Publisher) -> None:
        """Tell this publisher of a DP rank's pages from now on. Before, and of ranks without one, nobody is told."""
        self._publishers[rank] = publisher

    def publish(self, rank: int, events: Sequence[Event]) -> None:
        """Translate a rank's events, and send what they change."""
        publisher = self._publishers.get(rank)
        if publisher is not None:
            changes = self._ranks.setdefault(rank, _Rank()).apply(events)
            if changes:
                publisher.publish_batch(changes)

    def close(self) -> None:
        """Tell nobody any more; the publishers are Dynamo's to end."""
        self._publishers = {}


class _Rank:
    """What the router knows of one rank, and what it may not be told yet.

    A page that goes from one tier to another may be nowhere in between, and pages leave a tier last page first: they come to the next one
    before those that they follow. The router has no place for a block whose parent it does not know, so such a block waits for its parent.
    """

    def __init__(self):
        self._places: dict[int, set[str | None]] = {}  # by block: the tiers that have it
        self._salts: dict[int, str] = {}
        self._published: set[int] = set()
        self._waiting: dict[
            int, dict[int, BlockStored]
        ] = {}  # by unknown parent, then by block: the event of that one block
        self._parents: dict[int, int] = {}  # of each block that waits, the parent that it waits for

    def apply(self, events: Sequence[Event]) -> list[dict[str, Any]]:
        """Make what the router is to be told: what several events come to together, new blocks before those that have gone."""
        changes: list[dict[str, Any]] = []
        left: list[int] = []
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event, changes)
            elif isinstance(event, BlockRemoved):
                left += event.block_hashes
                for block in event.block_hashes:
                    self._leave(block, event.medium)
            else:
                assert isinstance(event, AllBlocksCleared)
                left += self._places
                self._places.clear()
                self._waiting.clear()
                self._parents.clear()
        gone = [block for block in dict.fromkeys(left) if block in self._published and block not in self._places]
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
            self._publish(event, changes)
            return
        for one in _blocks(event):
            if one.block_hashes[0] in self._published:
                continue
            if self._knows(one.parent_block_hash):
                self._publish(one, changes)
            else:
                self._waiting.setdefault(one.parent_block_hash, {})[one.block_hashes[0]] = one
                self._parents[one.block_hashes[0]] = one.parent_block_hash

    def _publish(self, event: BlockStored, changes: list[dict[str, Any]]) -> None:
        due = [event]
        while due:  # a chain of waiting blocks may be longer than Python's stack
            event = due.pop()
            salt = event.extra_keys[0][0] if event.extra_keys else self._salts.get(event.parent_block_hash)
            changes.append(_stored(event, salt))
            self._published.update(event.block_hashes)
            for block in event.block_hashes:
                if salt is not None:
                    self._salts[block] = salt
                for child, waiting in self._waiting.pop(block, {}).items():
                    del self._parents[child]
                    if child not in self._published:
                        due.append(waiting)

    def _leave(self, block: int, medium: str | None) -> None:
        held = self._places.get(block)
        if held is not None:
            held.discard(medium)
            if not held:
                del self._places[block]
                parent = self._parents.pop(block, None)
                if parent is not None:  # the parent may never come
                    del self._waiting[parent][block]
                    if not self._waiting[parent]:
                        del self._waiting[parent]

    def _knows(self, parent: int | None) -> bool:
        return parent is None or parent in self._published


def signed(block_hash: int) -> int:
    """An unsigned 64-bit hash as the signed one of the same bits."""
    return block_hash - 2**64 if block_hash >= 2**63 else block_hash


def _blocks(event: BlockStored) -> list[BlockStored]:
    """Split an event of several blocks into one for each."""
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
