"""``HostPages``: the executor's memory below the devices', and how pages go there and come back without a step waiting for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
from jaxtyping import Array

from dsjax.engine.commands import FetchPages, PlacePages, StorePages
from dsjax.engine.device_state import MOVED_PAGES, PagesOnTheWay
from sharding.arrays import put

if TYPE_CHECKING:
    from dsjax.engine.mesh_executor import MeshExecutor, Running


class HostPages:
    """Slots of host memory, of every DP rank that this process has devices of.

    A page leaves by a program that gathers it and a copy to the host that nobody waits for, until a later command needs it. It
    comes back by a transfer to the devices, which goes on beside the steps, and a program that writes it where it belongs. Programs
    move ``MOVED_PAGES`` pages of each rank at once.
    """

    def __init__(self, executor: MeshExecutor):
        self._executor = executor
        described = executor.programs.described_moved()
        slots, ranks = executor.limits.host_pages_per_rank, executor.limits.num_ranks
        # Zeros are not in memory before they are written: room that is never used, and other processes' ranks, cost nothing.
        self._memory = {name: np.zeros((ranks, slots, *a.shape[2:]), a.dtype) for name, a in described.items()}
        self._described = described
        self._leaving: deque[tuple[list[Sequence[int]], PagesOnTheWay]] = deque()
        self._staged: deque[list[PagesOnTheWay]] = deque()

    def store(self, command: StorePages) -> Running:
        """Copy pages to slots."""
        pairs = [np.frombuffer(own, "<i4").reshape(-1, 2) for own in command.ranks]
        pieces = [([own[:, 1] for own in piece], self._send(piece)) for piece in _pieces(pairs)]

        def run() -> Running:
            self._land(waiting=False)
            for slots, pages in pieces:
                taken = self._executor.programs.take_pages()(self._executor.state, pages)
                for array in taken.values():
                    array.copy_to_host_async()
                self._leaving.append((slots, taken))
                yield next(iter(taken.values()))

        return run()

    def fetch(self, command: FetchPages) -> Running:
        """Send what is in slots to the devices, and stage it there."""
        wanted = [np.frombuffer(own, "<i4") for own in command.ranks]

        def run() -> Running:
            self._land(waiting=True)
            staged = [self._sent(piece) for piece in _pieces(wanted)]
            self._staged.append(staged)
            for piece in staged:
                yield next(iter(piece.values()))

        return run()

    def place(self, command: PlacePages) -> Running:
        """Write what was staged first to pages."""
        pages = [self._send(piece) for piece in _pieces([np.frombuffer(own, "<i4") for own in command.ranks])]

        def run() -> Running:
            executor = self._executor
            for numbers, staged in zip(pages, self._staged.popleft(), strict=True):
                executor.state = executor.programs.put_pages()(executor.state, staged, numbers)
                yield executor.state.start

        return run()

    def _land(self, waiting: bool) -> None:
        """Write to memory what has left the devices; ``waiting``: also what is still on its way."""
        while self._leaving:
            slots, taken = self._leaving[0]
            if not waiting and not all(array.is_ready() for array in taken.values()):
                return
            self._leaving.popleft()
            for name, array in taken.items():
                seen = set()
                for shard in array.addressable_shards:
                    if str(shard.index) in seen:  # a replica on another device of the rank
                        continue
                    seen.add(str(shard.index))
                    values, (ranks, _, *rest) = np.asarray(shard.data), shard.index
                    for place, rank in enumerate(range(*ranks.indices(array.shape[0]))):
                        count = len(slots[rank])
                        self._memory[name][(rank, slots[rank], *rest)] = values[place, :count]

    def _sent(self, slots: list[np.ndarray]) -> PagesOnTheWay:
        """Pages of all ranks, as a program takes them."""

        def part(name: str, index: tuple[slice, ...]) -> np.ndarray:
            ranks, _, *rest = index
            described = self._described[name]
            numbers = range(*ranks.indices(described.shape[0]))
            whole = np.zeros((len(numbers), *described.shape[1:]), described.dtype)
            for place, rank in enumerate(numbers):
                whole[place, : len(slots[rank])] = self._memory[name][rank, slots[rank]]
            return np.ascontiguousarray(whole[(slice(None), slice(None), *rest)])

        return {
            name: jax.make_array_from_callback(a.shape, a.sharding, lambda index, name=name: part(name, index))
            for name, a in self._described.items()
        }

    def _send(self, piece: list[np.ndarray]) -> Array:
        """``[B, MOVED_PAGES]`` page numbers, 0 for none; of pairs the first ones."""
        packed = np.zeros((len(piece), MOVED_PAGES), np.int32)
        for rank, own in enumerate(piece):
            packed[rank, : len(own)] = own if own.ndim == 1 else own[:, 0]
        return put(packed, self._executor.programs.rows)


def _pieces(ranks: list[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """At most ``MOVED_PAGES`` entries of each rank at a time."""
    for start in range(0, max(map(len, ranks)), MOVED_PAGES):
        yield [own[start : start + MOVED_PAGES] for own in ranks]
