"""``OffloadedPages``: the executor's host-memory pages; copies pages between the devices, host memory and the disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from dsjax.engine.contract.commands import WINDOW_NUMBERS, DropPages, StorePages, names_of
from dsjax.engine.device.access import CommandTable, DeviceAccess, DevicePart, Handler, Pending, Running
from dsjax.engine.device.device_state import TransferPages
from dsjax.engine.device.page_staging import PageStaging, PageStore, RankArrays, StagedPiece, cut, packed
from dsjax.engine.tiers.disk_pages import Shapes
from dsjax.engine.tiers.page_folder import Page
from dsjax.engine.tiers.page_tiers import PageReporter, PageReports
from dsjax.model.cache_groups import TABLES, Table

Shard = tuple[int, tuple[slice, ...], np.ndarray]
"""First rank, the shard's index within a page's array, and its values ``[ranks, MOVED_PAGES, …]``."""


class _Landing(NamedTuple):
    """Host work that runs after some device arrays are ready and after all earlier landings.

    awaited: those arrays; empty if only the order matters. land: does the work. slots: host slots that it fills, per rank; −1: none.
    """

    awaited: list[Array]
    land: Callable[[], None]
    slots: Sequence[np.ndarray] = ()


class OffloadedPages(DevicePart, PageStore):
    """Host-memory slots of every DP rank with devices in this process, and an optional disk. Window pages have slots of their own.

    To offload a page, a program gathers it and an asynchronous copy moves it to the host; only a later command that needs the page waits.
    To load it, a transfer runs beside the steps and a program writes it. Programs move ``MOVED_PAGES`` pages of each rank at once.

    disk: makes the disk store (`DiskPages`, or this process's part of `DividedPages`) from the unsharded shape and dtype of each array of a
    page in this executor, and the names of the arrays on window pages.
    """

    def __init__(
        self,
        device: DeviceAccess,
        staging: PageStaging,
        disk: Callable[[Shapes, Collection[str]], Any] | None = None,
    ):
        self._device = device
        limits = device.limits
        self._num_slots = {"context": limits.host_pages_per_rank, "window": limits.host_windows_per_rank}
        self._described = described = {table: device.programs.described_moved(table) for table in TABLES}
        self._shapes = {name: (a.shape[2:], a.dtype) for arrays in described.values() for name, a in arrays.items()}
        self._disk = disk and disk(self._shapes, described["window"].keys())
        # `np.zeros` commits memory only on first write, so unused slots and the ranks of other processes cost nothing.
        self._memory = {
            name: np.zeros((limits.num_ranks, slots, *a.shape[2:]), a.dtype)
            for table, slots in self._num_slots.items()
            for name, a in described[table].items()
        }
        self._landings: deque[_Landing] = deque()
        staging.add(self)
        if self._disk is not None:
            self.read = self._disk.read

    def register(self, table: CommandTable) -> None:
        """Register the command that stores pages and, with a disk, the one that deletes them."""
        table.add(StorePages, Handler(self._store))
        if self._disk is not None:
            table.add(DropPages, Handler(self._drop))

    def extension(self, kind: type) -> Any:
        """Return this object as the `PageReporter` of the scheduler's offload tiers."""
        return self if kind is PageReporter else None

    def _store(self, _: Pending, command: StorePages) -> Running:
        """Copy pages to slots, and write them to the disk."""
        triples = [np.frombuffer(data, "<i4").reshape(-1, 3) for data in command.ranks]  # page, slot, write number
        names = [  # for each rank: write number → page name
            dict(zip(rows[rows[:, 2] >= 0, 2].tolist(), names_of(rank_names), strict=True))
            for rows, rank_names in zip(triples, command.names, strict=False)  # no names without a disk
        ]
        pieces, first_window = [], self._device.limits.pages_per_rank
        for table in TABLES:
            first, windows = (first_window, True) if table == "window" else (0, False)
            for piece in cut([rows[(rows[:, 0] >= first_window) == windows] for rows in triples], table):
                writes = [
                    (rank, place, int(number), names[rank][int(number)])
                    for rank, rank_rows in enumerate(piece)
                    for place, number in enumerate(rank_rows[:, 2])
                    if number >= 0
                ]
                pages = packed([rank_rows[:, 0] - first for rank_rows in piece], table)
                pieces.append((table, [rank_rows[:, 1] for rank_rows in piece], writes, self._device.send(pages)))

        def run() -> Running:
            self._land()
            for table, slots, writes, pages in pieces:
                taken = self._device.programs.get("take pages", table)(self._device.state, pages)
                for array in taken.values():
                    array.copy_to_host_async()
                keep = partial(self._keep, taken, slots, writes)
                self._landings.append(_Landing(list(taken.values()), keep, slots))
                yield from [*taken.values()][:1]  # none: a stage of window-only layers has no arrays on context pages

        return run()

    def _drop(self, _: Pending, command: DropPages) -> Running:
        """Delete pages from the disk after all earlier stores have been written."""
        self._landings.append(_Landing([], partial(self._disk.drop, command.everything, names_of(command.names))))
        self._land()
        yield from ()

    def page_reports(self, seconds: float = 0.0) -> PageReports:
        """Return the disk's reports since the last call; wait up to `seconds` for the first one."""
        self._land()
        return PageReports([], []) if self._disk is None else self._disk.reports(seconds)

    def close(self) -> None:
        """Write the pages that have left the devices to the disk, and close it."""
        if self._disk is not None:
            self._land(least=len(self._landings))
            self._disk.close()

    def take(self, wanted: RankArrays, places: RankArrays) -> tuple[list[StagedPiece], RankArrays]:
        """Return staged pieces of the pages at `places`, from host slots or disk reads. No place is left over."""
        pieces = []
        for table in TABLES:
            ranks, windows = zip(wanted, places, strict=True), table == "window"
            own = [rank_places[(numbers[rank_places] >= WINDOW_NUMBERS) == windows] for numbers, rank_places in ranks]
            for piece in cut(own, table):
                numbers = [rank_numbers[rank_places] for rank_numbers, rank_places in zip(wanted, piece, strict=True)]
                pieces.append(StagedPiece(piece, partial(self._sent, table, numbers), table))
        return pieces, [rank_places[:0] for rank_places in places]

    def forget(self, rank: int, number: int) -> None:
        """Release a page that was, or is being, read from the disk."""
        if self._disk is not None:
            self._disk.forget(rank, number)

    def _land(self, least: int = 0) -> None:
        """Run the landings whose arrays are ready, in order. Wait for the first `least` of them."""
        while self._landings:
            head = self._landings[0]
            if least <= 0 and not all(array.is_ready() for array in head.awaited):
                return
            self._landings.popleft()
            head.land()
            least -= 1

    def _land_slots(self, slots: RankArrays) -> None:
        """Wait until the copies into these slots of each rank are complete. Later copies may still be in flight."""
        needed = 0
        for place, landing in enumerate(self._landings, 1):
            filled = zip(landing.slots, slots, strict=True) if landing.slots else ()
            if any(np.isin(wanted, landed[landed >= 0]).any() for landed, wanted in filled):
                needed = place
        self._land(least=needed)

    def _keep(self, taken: TransferPages, slots: list[np.ndarray], writes: list[tuple[int, int, int, bytes]]) -> None:
        """Copy pages that have left the devices to host memory, and write them to the disk.

        slots: int32, per rank; −1: not to host memory. writes: (rank, index among the rank's pages, number, name) of each disk write.
        """
        shards = {name: list(_shards(array)) for name, array in taken.items()}
        for name, array_shards in shards.items():
            for first, rest, values in array_shards:
                for rank, block in enumerate(values, start=first):
                    if (slots[rank] >= 0).all():  # the usual case, without another copy
                        self._memory[name][(rank, slots[rank] % WINDOW_NUMBERS, *rest)] = block[: len(slots[rank])]
                    else:
                        kept = np.flatnonzero(slots[rank] >= 0)
                        self._memory[name][(rank, slots[rank][kept] % WINDOW_NUMBERS, *rest)] = block[kept]
        for rank, place, number, page_name in writes:
            # A copy: `taken` holds `MOVED_PAGES` pages of each rank, too much memory to keep for one page while a slow disk writes it.
            self._disk.write(number, page_name, self._page(shards, rank, place))

    def _page(self, shards: dict[str, list[Shard]], rank: int, place: int) -> Page:
        """Assemble one page from its shards."""
        page = {}
        for name, name_shards in shards.items():
            page[name] = np.empty(*self._shapes[name])
            for first, rest, values in name_shards:
                if first <= rank < first + len(values):
                    page[name][rest] = values[rank - first, place]
        return page

    def _sent(self, table: Table, numbers: list[np.ndarray]) -> TransferPages:
        """Send pages of one kind of all ranks to the devices, sharded as the programs expect."""
        self._land_slots(numbers)
        slots, num_slots = [rank_numbers % WINDOW_NUMBERS for rank_numbers in numbers], self._num_slots[table]
        read_pages = {
            (rank, int(slot)): self._disk.take(rank, int(number))
            for rank, rank_slots in enumerate(slots)
            for slot, number in zip(rank_slots, numbers[rank], strict=True)
            if slot >= num_slots  # a page of `ReadPages`, not a host slot
        }

        def part(name: str, index: tuple[slice, ...]) -> np.ndarray:
            """Return one device's shard of an array: the pages of its ranks, from host memory and the disk."""
            ranks, _, *rest = index
            described = self._described[table][name]
            shard_ranks = range(*ranks.indices(described.shape[0]))
            whole = np.zeros((len(shard_ranks), *described.shape[1:]), described.dtype)
            for place, rank in enumerate(shard_ranks):
                in_slots = np.flatnonzero(slots[rank] < num_slots)
                whole[place, in_slots] = self._memory[name][rank, slots[rank][in_slots]]
                for index in np.flatnonzero(slots[rank] >= num_slots):
                    whole[place, index] = read_pages[rank, int(slots[rank][index])][name]
            return np.ascontiguousarray(whole[(slice(None), slice(None), *rest)])

        return {
            name: jax.make_array_from_callback(a.shape, a.sharding, lambda index, name=name: part(name, index))
            for name, a in self._described[table].items()
        }


def _shards(array: Array) -> Iterator[Shard]:
    """Yield the distinct shards of an array in this process."""
    seen = set()
    for shard in array.addressable_shards:
        if str(shard.index) in seen:  # a replica on another device of the rank
            continue
        seen.add(str(shard.index))
        ranks, _, *rest = shard.index
        yield ranks.indices(array.shape[0])[0], tuple(rest), np.asarray(shard.data)
