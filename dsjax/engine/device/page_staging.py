"""``PageStaging``: moves pages from a store outside the devices into the cache: sent ahead of a step, and placed before the next."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dsjax.engine.contract.commands import FetchPages, PlacePages, ReadPages, names_of
from dsjax.engine.device.access import CommandTable, DeviceAccess, Handler, Pending, Running
from dsjax.engine.device.device_state import TransferPages, moved
from dsjax.model.cache_groups import Table

RankArrays = list[np.ndarray]
"""One int32 array per rank: page numbers, or indices into a command's pages."""


class StagedPiece(NamedTuple):
    """The pages that one program places at once.

    layout: for each rank, the index of the command's page at each place; −1: none. send: sends the pages to the devices. table: page kind.
    """

    layout: RankArrays
    send: Callable[[], TransferPages]
    table: Table = "context"


class PageStore:
    """A source of the pages numbered in `FetchPages`: host-memory slots, or pages that were read or pulled.

    read: starts reading a page, given its rank, number and name; None if the store cannot read pages by name.
    """

    read: Callable[[int, int, bytes], None] | None = None

    def take(self, wanted: RankArrays, places: RankArrays) -> tuple[list[StagedPiece], RankArrays]:
        """Return pieces for the pages in this store, and the indices of all other pages.

        wanted: for each rank the page numbers of a `FetchPages`; places: indices into them that no other store has taken yet.
        """
        raise NotImplementedError(f"{type(self).__name__} stores pages and does not say how they are sent")

    def forget(self, rank: int, number: int) -> None:
        """Release a page that has arrived or is about to arrive."""


class PageStaging:
    """Executes `FetchPages`, `PlacePages` and `ReadPages` for all stores. Without a store it registers no command."""

    def __init__(self, device: DeviceAccess):
        self._device = device
        self._stores: list[PageStore] = []
        self._staged: dict[int, list[TransferPages]] = {}
        self._layouts: dict[int, list[tuple[RankArrays, Table]]] = {}

    def add(self, store: PageStore) -> None:
        """Add a store; it is searched after the stores added earlier."""
        self._stores.append(store)

    def register(self, table: CommandTable) -> None:
        """Register the commands if there is a store."""
        if self._stores:
            table.add(FetchPages, Handler(self._fetch))
            table.add(PlacePages, Handler(self._place, keeps_last=False))
            table.add(ReadPages, Handler(self._request))

    def _fetch(self, _: Pending, command: FetchPages) -> Running:
        """Send pages to the devices and stage them there."""
        wanted = [np.frombuffer(numbers, "<i4") for numbers in command.ranks]
        places = [np.arange(len(numbers), dtype=np.int32) for numbers in wanted]
        pieces: list[StagedPiece] = []
        for store in self._stores:
            stored_pieces, places = store.take(wanted, places)
            pieces += stored_pieces
        for rank, missing in enumerate(places):
            if len(missing):
                numbers = wanted[rank][missing].tolist()
                raise ValueError(
                    f"FetchPages names the pages {numbers} of rank {rank}, which no page store of this executor has"
                )
        self._layouts[command.number] = [(piece.layout, piece.table) for piece in pieces]

        def run() -> Running:
            staged = [piece.send() for piece in pieces]
            self._staged[command.number] = staged
            for piece in staged:
                yield from [*piece.values()][:1]  # none: a stage of window-only layers has no arrays on context pages

        return run()

    def _place(self, _: Pending, command: PlacePages) -> Running:
        """Write the staged pages to the cache."""
        numbers = [np.frombuffer(own, "<i4") for own in command.ranks]
        num_pages = self._device.limits.pages_per_rank
        layouts = self._layouts.get(command.number, [])
        self._layouts = {number: layout for number, layout in self._layouts.items() if number > command.number}
        pages = []
        for layout, table in layouts:
            ranks, first = zip(layout, numbers, strict=True), num_pages if table == "window" else 0
            piece = [np.where(places < 0, 0, own[places] - first if len(own) else 0) for places, own in ranks]
            pages.append((table, self._device.send(packed(piece, table))))

        def run() -> Running:
            device = self._device
            staged_here = self._staged.get(command.number)
            self._staged = {number: staged for number, staged in self._staged.items() if number > command.number}
            if staged_here is None:
                return
            for (table, numbers), staged in zip(pages, staged_here, strict=True):
                device.state = device.programs.get("put pages", table)(device.state, staged, numbers)
                yield device.state.slots

        return run()

    def _request(self, _: Pending, command: ReadPages) -> Running:
        """Release dropped pages and start reading others."""
        read = next((store.read for store in self._stores if store.read is not None), None)
        if read is None and any(command.ranks):
            raise ValueError("ReadPages asks for pages by their names, and no page store of this executor can read any")

        def run() -> Running:
            for rank, (numbers, names, drops) in enumerate(
                zip(command.ranks, command.names, command.drops, strict=True)
            ):
                for number in np.frombuffer(drops, "<i4"):
                    for store in self._stores:
                        store.forget(rank, int(number))
                for number, name in zip(np.frombuffer(numbers, "<i4"), names_of(names), strict=True):
                    read(rank, int(number), name)
            yield from ()

        return run()


def packed(pages: Sequence[np.ndarray], table: Table = "context") -> np.ndarray:
    """Pack each rank's page numbers for a program: ``[B, moved(table)]``, 0 for none. For 2-D entries, the first column is used."""
    packed_pages = np.zeros((len(pages), moved(table)), np.int32)
    for rank, rank_pages in enumerate(pages):
        packed_pages[rank, : len(rank_pages)] = rank_pages if rank_pages.ndim == 1 else rank_pages[:, 0]
    return packed_pages


def cut(ranks: Sequence[np.ndarray], table: Table = "context") -> Iterator[list[np.ndarray]]:
    """Yield at most ``moved(table)`` entries of each rank at a time."""
    for start in range(0, max(map(len, ranks)), moved(table)):
        yield [entries[start : start + moved(table)] for entries in ranks]
