"""A subscriber to events of pages, which knows from them alone what is where."""

from hashlib import sha256

from dsjax.engine.contract.commands import int32s
from dsjax.engine.schedule.page_events import MEDIA, AllBlocksCleared, BlockRemoved, BlockStored, block_hash


class Subscriber:
    """Stands where the publisher does. It checks each event against those before it.

    Attributes:
        blocks: of each rank and medium, the hashes of its blocks.
    """

    def __init__(self, num_ranks: int, page_size: int, left_over=()):
        """left_over: names of pages that an earlier engine has left on the disk, of which nobody is told."""
        self.page_size = page_size
        self.left_over = {block_hash(name) for name in left_over}
        self.blocks = [{medium: set() for medium in MEDIA.values()} for _ in range(num_ranks)]
        self.tokens: dict[int, tuple[int | None, tuple[int, ...]]] = {}

    def publish(self, rank, events) -> None:
        blocks = self.blocks[rank]
        for event in events:
            if isinstance(event, AllBlocksCleared):
                for known in blocks.values():
                    known.clear()
            elif isinstance(event, BlockRemoved):
                blocks[event.medium] -= set(event.block_hashes)
            else:
                assert isinstance(event, BlockStored)
                assert event.block_size == self.page_size
                assert len(event.token_ids) == self.page_size * len(event.block_hashes)
                parent = event.parent_block_hash
                for place, name in enumerate(event.block_hashes):
                    own = tuple(event.token_ids[place * self.page_size : (place + 1) * self.page_size])
                    assert self.tokens.setdefault(name, (parent, own)) == (parent, own)
                    parent = name
                blocks[event.medium] |= set(event.block_hashes)

    def close(self) -> None:
        pass

    def check(self, scheduler, windows=frozenset()) -> None:
        """It knows what each rank's tiers hold, and no more. windows: names of window pages, of which nothing is told."""
        for index, (rank, blocks) in enumerate(zip(scheduler.ranks, self.blocks, strict=True)):
            pages = rank.pool._page_of.items()
            found = {"device": {name for name, page in pages if not rank.pool.is_window(page)}, "host": (), "disk": ()}
            for source in getattr(scheduler.source, "sources", ()):
                if getattr(source, "host", None):
                    found["host"] = set(source.host[index]._names)
                if getattr(source, "disk", None) is not None:
                    found["disk"] = set(source.disk._names) - windows
            for tier, names in found.items():
                untold = {block_hash(name) for name in names} - blocks[MEDIA[tier]]
                assert untold <= (self.left_over if tier == "disk" else set()), tier
                assert len(names) - len(untold) == len(blocks[MEDIA[tier]]), tier


def hashes_of(tokens, page_size, root=bytes(32)):
    """The block hashes of a prompt, by their definition."""
    found, parent = [], root
    for start in range(0, len(tokens) - page_size + 1, page_size):
        parent = sha256(parent + int32s(tokens[start : start + page_size])).digest()
        found.append(block_hash(parent))
    return found
