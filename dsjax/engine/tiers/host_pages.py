"""``HostPages``: the executor's memory below the devices', and how pages go there and to the disk, and come back, without a step waiting
for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from dsjax.engine.contract.commands import DropPages, FetchPages, PlacePages, ReadPages, StorePages, names_of
from dsjax.engine.contract.executor import PageReports
from dsjax.engine.device.device_state import MOVED_PAGES, PagesOnTheWay
from dsjax.engine.tiers.disk_pages import DiskPages
from dsjax.engine.tiers.page_files import Page
from sharding.arrays import put

if TYPE_CHECKING:
    from dsjax.engine.device.mesh_executor import MeshExecutor, Running
    from dsjax.engine.transfer.page_parcels import Landing, PageParcels

Shapes = Mapping[str, tuple[tuple[int, ...], np.dtype]]
"""Of a page's arrays, of all shards together: shape and dtype by name."""
Layout = list[np.ndarray]
"""Of each rank int32: which of the pages of a command stands at each place of a piece; −1: none."""
Shard = tuple[int, tuple[slice, ...], np.ndarray]
"""First rank, where the shard lies in a page's array, and its values ``[ranks, MOVED_PAGES, …]``."""


class _Leaving(NamedTuple):
    """Pages that have been taken off the devices.

    Attributes:
        slots: of each rank int32, where each page goes; −1: not to host memory.
        writes: (rank, place among the rank's pages, number, name) of those that are written to the disk.
    """

    slots: list[np.ndarray]
    writes: list[tuple[int, int, int, bytes]]
    taken: PagesOnTheWay


class HostPages:
    """Slots of host memory, of every DP rank that this process has devices of; and the disk below, where there is one.

    A page leaves by a program that gathers it and a copy to the host that nobody waits for, until a later command needs it. It
    comes back by a transfer to the devices, which goes on beside the steps, and a program that writes it where it belongs. Programs
    move ``MOVED_PAGES`` pages of each rank at once.

    disk: made from the arrays of a page, of all shards together. parcels: has pages that other engines have sent.
    """

    def __init__(
        self,
        executor: MeshExecutor,
        disk: Callable[[Shapes], DiskPages] | None = None,
        parcels: PageParcels | None = None,
    ):
        self._executor, self._parcels = executor, parcels
        described = executor.programs.described_moved()
        slots, ranks = executor.limits.host_pages_per_rank, executor.limits.num_ranks
        self._num_slots = slots
        self._disk = disk and disk({name: (a.shape[2:], a.dtype) for name, a in described.items()})
        # Zeros are not in memory before they are written: room that is never used, and other processes' ranks, cost nothing.
        self._memory = {name: np.zeros((ranks, slots, *a.shape[2:]), a.dtype) for name, a in described.items()}
        self._described = described
        self._leaving: deque[_Leaving | DropPages] = deque()
        self._staged: dict[int, list[PagesOnTheWay]] = {}
        self._layouts: dict[int, list[Layout]] = {}

    def store(self, command: StorePages) -> Running:
        """Copy pages to slots, and write them to the disk."""
        stored = [np.frombuffer(own, "<i4").reshape(-1, 3) for own in command.ranks]
        names = [iter(names_of(own)) for own in command.names]
        pieces = []
        for piece in _pieces(stored):
            writes = [
                (rank, place, int(number), next(names[rank]))
                for rank, own in enumerate(piece)
                for place, number in enumerate(own[:, 2])
                if number >= 0
            ]
            pieces.append(([own[:, 1] for own in piece], writes, self._send(piece)))

        def run() -> Running:
            self._land(waiting=False)
            for slots, writes, pages in pieces:
                taken = self._executor.programs.take_pages()(self._executor.state, pages)
                for array in taken.values():
                    array.copy_to_host_async()
                self._leaving.append(_Leaving(slots, writes, taken))
                yield next(iter(taken.values()))

        return run()

    def drop(self, command: DropPages) -> Running:
        """Delete pages from the disk, when what was stored before has been written."""

        def run() -> Running:
            self._leaving.append(command)
            self._land(waiting=False)
            yield from ()

        return run()

    def read(self, command: ReadPages) -> Running:
        """Begin to read pages from the disk."""

        def run() -> Running:
            for rank, (numbers, names, drops) in enumerate(
                zip(command.ranks, command.names, command.drops, strict=True)
            ):
                for number in np.frombuffer(drops, "<i4"):
                    for place in (self._disk, self._parcels):
                        if place is not None:
                            place.forget(rank, int(number))
                for number, name in zip(np.frombuffer(numbers, "<i4"), names_of(names), strict=True):
                    self._disk.read(rank, int(number), name)
            yield from ()

        return run()

    def reports(self, seconds: float) -> PageReports:
        """What came of pages and the disk since the last time; wait so long for the first of it."""
        self._land(waiting=False)
        return PageReports([], []) if self._disk is None else self._disk.reports(seconds)

    def close(self) -> None:
        """Write what has left the devices to the disk, and end."""
        if self._parcels is not None:
            self._parcels.close()
        if self._disk is not None:
            self._land(waiting=True)
            self._disk.close()

    def fetch(self, command: FetchPages) -> Running:
        """Send what is in slots, was read from the disk or has come in parcels to the devices, and stage it there."""
        pieces = self._pieces_of([np.frombuffer(own, "<i4") for own in command.ranks])
        self._layouts[command.number] = [layout for layout, _ in pieces]

        def run() -> Running:
            self._land(waiting=True)
            staged = [make() for _, make in pieces]
            self._staged[command.number] = staged
            for piece in staged:
                yield next(iter(piece.values()))

        return run()

    def place(self, command: PlacePages) -> Running:
        """Write what was staged to pages."""
        numbers = [np.frombuffer(own, "<i4") for own in command.ranks]
        layouts = self._layouts.get(command.number, [])
        self._layouts = {number: own for number, own in self._layouts.items() if number > command.number}
        pages = [
            self._send(
                [
                    np.where(places < 0, 0, own[places] if len(own) else 0)
                    for places, own in zip(layout, numbers, strict=True)
                ]
            )
            for layout in layouts
        ]

        def run() -> Running:
            executor = self._executor
            staged_here = self._staged.get(command.number)
            self._staged = {number: staged for number, staged in self._staged.items() if number > command.number}
            if staged_here is None:
                return
            for numbers, staged in zip(pages, staged_here, strict=True):
                executor.state = executor.programs.put_pages()(executor.state, staged, numbers)
                yield executor.state.start

        return run()

    def _land(self, waiting: bool) -> None:
        """Write to memory and disk what has left the devices; ``waiting``: also what is still on its way."""
        while self._leaving:
            head = self._leaving[0]
            if isinstance(head, DropPages):
                self._disk.drop(head.everything, names_of(head.names))
                self._leaving.popleft()
                continue
            if not waiting and not all(array.is_ready() for array in head.taken.values()):
                return
            self._leaving.popleft()
            shards = {name: list(_shards(array)) for name, array in head.taken.items()}
            for name, own in shards.items():
                for first, rest, values in own:
                    for rank, block in enumerate(values, start=first):
                        slots = head.slots[rank]
                        if (slots >= 0).all():  # the usual case, without another copy
                            self._memory[name][(rank, slots, *rest)] = block[: len(slots)]
                        else:
                            kept = np.flatnonzero(slots >= 0)
                            self._memory[name][(rank, slots[kept], *rest)] = block[kept]
            for rank, place, number, page_name in head.writes:
                # A copy: what was taken has room for `MOVED_PAGES` of each rank, and must not wait for a slow disk for the sake of one.
                self._disk.write(number, page_name, self._page(shards, rank, place))

    def _pieces_of(self, wanted: list[np.ndarray]) -> list[tuple[Layout, Callable[[], PagesOnTheWay]]]:
        """What is staged for a `FetchPages`, piece by piece, and how: parcels as they came, and the rest as it fits."""
        rest: list[np.ndarray] = []
        groups: list[list[tuple[Landing, np.ndarray]]] = []
        for rank, own in enumerate(wanted):
            by_parcel: dict[int, tuple[Landing, np.ndarray]] = {}
            others = []
            for position, number in enumerate(own.tolist()):
                if self._parcels is None or not self._parcels.has(rank, number):
                    others.append(position)
                    continue
                landing, place = self._parcels.take(rank, number)
                _, places = by_parcel.setdefault(id(landing), (landing, np.full(MOVED_PAGES, -1, np.int32)))
                places[place] = position
            rest.append(np.array(others, np.int32))
            groups.append(list(by_parcel.values()))
        found: list[tuple[Layout, Callable[[], PagesOnTheWay]]] = []
        for turn in range(max(map(len, groups))):
            now = [own[turn] if turn < len(own) else None for own in groups]
            layout = [np.full(MOVED_PAGES, -1, np.int32) if one is None else one[1] for one in now]
            found.append((layout, partial(self._parcels.stage, [one and one[0] for one in now])))
        for piece in _pieces(rest):
            slots = [own[places] for own, places in zip(wanted, piece, strict=True)]
            found.append((piece, partial(self._sent, slots)))
        return found

    def _page(self, shards: dict[str, list[Shard]], rank: int, place: int) -> Page:
        """One page out of what has left the devices, its shards put together."""
        page = {}
        for name, own in shards.items():
            described = self._described[name]
            page[name] = np.empty(described.shape[2:], described.dtype)
            for first, rest, values in own:
                if first <= rank < first + len(values):
                    page[name][rest] = values[rank - first, place]
        return page

    def _sent(self, slots: list[np.ndarray]) -> PagesOnTheWay:
        """Pages of all ranks, as a program takes them."""
        read = {
            (rank, int(number)): self._disk.take(rank, int(number))
            for rank, own in enumerate(slots)
            for number in own[own >= self._num_slots]
        }

        def part(name: str, index: tuple[slice, ...]) -> np.ndarray:
            ranks, _, *rest = index
            described = self._described[name]
            numbers = range(*ranks.indices(described.shape[0]))
            whole = np.zeros((len(numbers), *described.shape[1:]), described.dtype)
            for place, rank in enumerate(numbers):
                here = np.flatnonzero(slots[rank] < self._num_slots)
                whole[place, here] = self._memory[name][rank, slots[rank][here]]
                for index in np.flatnonzero(slots[rank] >= self._num_slots):
                    whole[place, index] = read[rank, int(slots[rank][index])][name]
            return np.ascontiguousarray(whole[(slice(None), slice(None), *rest)])

        return {
            name: jax.make_array_from_callback(a.shape, a.sharding, lambda index, name=name: part(name, index))
            for name, a in self._described.items()
        }

    def _send(self, piece: list[np.ndarray]) -> Array:
        """``[B, MOVED_PAGES]`` page numbers, 0 for none; of triples the first ones."""
        packed = np.zeros((len(piece), MOVED_PAGES), np.int32)
        for rank, own in enumerate(piece):
            packed[rank, : len(own)] = own if own.ndim == 1 else own[:, 0]
        return put(packed, self._executor.programs.rows)


def _shards(array: Array) -> Iterator[Shard]:
    """The distinct ones that this process has."""
    seen = set()
    for shard in array.addressable_shards:
        if str(shard.index) in seen:  # a replica on another device of the rank
            continue
        seen.add(str(shard.index))
        ranks, _, *rest = shard.index
        yield ranks.indices(array.shape[0])[0], tuple(rest), np.asarray(shard.data)


def _pieces(ranks: list[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """At most ``MOVED_PAGES`` entries of each rank at a time."""
    for start in range(0, max(map(len, ranks)), MOVED_PAGES):
        yield [own[start : start + MOVED_PAGES] for own in ranks]
