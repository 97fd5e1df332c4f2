"""`KvEvents`: the engine's pages as Dynamo's router knows them. Nothing here imports Dynamo."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from dsjax.engine.page_events import AllBlocksCleared, BlockRemoved, BlockStored, Event


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
        self._places: dict[int, dict[int, set[str | None]]] = {}
        self._salts: dict[int, dict[int, str]] = {}

    def connect(self, rank: int, publisher: Publisher) -> None:
        """Tell this publisher of a DP rank's pages from now on. Before, and of ranks without one, nobody is told."""
        self._publishers[rank] = publisher

    def publish(self, rank: int, events: Sequence[Event]) -> None:
        """Translate a rank's events, and send what they change."""
        publisher = self._publishers.get(rank)
        if publisher is None:
            return
        found = [told for event in events if (told := self._translate(rank, event)) is not None]
        if found:
            publisher.publish_batch(found)

    def close(self) -> None:
        """Tell nobody any more; the publishers are Dynamo's to end."""
        self._publishers = {}

    def _translate(self, rank: int, event: Event) -> dict[str, Any] | None:
        places = self._places.setdefault(rank, {})
        salts = self._salts.setdefault(rank, {})
        if isinstance(event, BlockStored):
            salt = event.extra_keys[0][0] if event.extra_keys else salts.get(event.parent_block_hash)
            is_new = False
            for block in event.block_hashes:
                is_new |= block not in places
                places.setdefault(block, set()).add(event.medium)
                if salt is not None:
                    salts[block] = salt
            return _stored(event, salt) if is_new else None
        if isinstance(event, BlockRemoved):
            gone = []
            for block in event.block_hashes:
                held = places.get(block)
                if held is not None:
                    held.discard(event.medium)
                    if not held:
                        del places[block]
                        salts.pop(block, None)
                        gone.append(block)
        else:
            assert isinstance(event, AllBlocksCleared)
            gone = list(places)
            places.clear()
            salts.clear()
        return {"type": "removed", "block_hashes": [signed(block) for block in gone]} if gone else None


def signed(block_hash: int) -> int:
    """An unsigned 64-bit hash as the signed one of the same bits."""
    return block_hash - 2**64 if block_hash >= 2**63 else block_hash


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
