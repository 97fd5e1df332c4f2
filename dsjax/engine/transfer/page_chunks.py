"""`PageChunks`: the executor plugin that sends pages to other engines and pulls theirs, without blocking steps."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from dsjax.background import WorkQueue, contained, note_failure
from dsjax.engine.contract.commands import WINDOW_NUMBERS, DropChunks, PullPages, SendPages
from dsjax.engine.device.access import CommandTable, DeviceAccess, DevicePart, Handler, Pending, Running
from dsjax.engine.device.device_state import moved
from dsjax.engine.device.page_staging import PageStaging, PageStore, RankArrays, StagedPiece, packed
from dsjax.engine.transfer.messages import Chunk, ChunkGoneError, ChunkPort, Drop, Offer, Pull, PulledChunk, Source
from dsjax.model.cache_groups import TABLES, Table

PULLERS = 2
"""Threads that pull chunks: while one waits for a chunk, the other requests the next."""


@dataclass(eq=False)
class Landing:
    """A chunk that a rank pulls. Every process tracks it, because all processes stage pages by chunks, in the same order.

    chunk: None until it has arrived, and in processes without a device of the rank.
    """

    rank: int
    source: Source
    number: int
    pages: list[int]
    chunk: Chunk | None = None

    @property
    def table(self) -> Table:
        """The kind of the chunk's pages."""
        return "window" if self.number >= WINDOW_NUMBERS else "context"


class _StagedChunk(NamedTuple):
    """A chunk whose pages a `FetchPages` stages. layout: the index of the command's page at each place of the chunk; −1: none."""

    landing: Landing
    layout: np.ndarray


def move_chunk(chunk: Chunk, device: jax.Device) -> Chunk:
    """Copy a chunk to another device of this process; complete when this returns."""
    return jax.block_until_ready({name: jax.device_put(array, device) for name, array in chunk.items()})


class PageChunks(DevicePart, PageStore):
    """Copies pages into chunks with the program that also copies pages to host memory. A thread offers the chunks once they are computed.

    A chunk is one device's part of that program's result: the arrays of `describe_moved` for one DP rank. If a rank has devices in
    several processes, the process with the first device keeps the rank's chunks; each process pulls to its own first device of the rank.

    chunk_shapes, window_shapes, processes_of_ranks: see `ChunkPort`.
    """

    def __init__(self, device: DeviceAccess, staging: PageStaging):
        self._device = device
        self._described = {table: device.programs.described_moved(table) for table in TABLES}
        self.chunk_shapes, self.window_shapes = (
            {name: ((1, *a.shape[1:]), np.dtype(a.dtype)) for name, a in described.items()}
            for described in self._described.values()
        )
        self._devices, self.processes_of_ranks = self._devices_of_ranks()
        cost = "Chunks that nobody wants are kept until the mesh changes."
        self._offers = WorkQueue("chunk offer", "dsjax-chunks", cost=cost)
        self._pulls = WorkQueue("chunk pull", "dsjax-pull", threads=PULLERS)
        self._landed: dict[tuple[int, int], tuple[Landing, int]] = {}
        self._closed = False
        self._lock = threading.Lock()
        self._empty_arrays: dict[tuple[str, jax.Device], Array] = {}
        staging.add(self)

    def register(self, table: CommandTable) -> None:
        """Add the commands that send, pull and drop chunks."""
        table.add(SendPages, Handler(self._send))
        table.add(PullPages, Handler(self._begin_pulls))
        table.add(DropChunks, Handler(self._drop_sent))

    def extension(self, kind: type) -> Any:
        """Return this object as the `ChunkPort`."""
        return self if kind is ChunkPort else None

    def send_chunks(self, offer: Offer, drop: Drop = lambda numbers: None) -> None:
        """Start the thread that offers and drops chunks."""
        self._offer, self._drop = offer, drop
        self._offers.start()

    def pull_chunks(self, pull: Pull, report: Callable[[PulledChunk], None]) -> None:
        """Start the threads that pull chunks with `pull` and report the result of each."""
        self._pull, self._report = pull, report
        self._pulls.start()

    def _send(self, _: Pending, command: SendPages) -> Running:
        pairs = [np.frombuffer(rank_pairs, "<i4").reshape(-1, 2) for rank_pairs in command.ranks]
        device = self._device
        launches = []
        for table in TABLES:
            windows, first = table == "window", device.limits.pages_per_rank if table == "window" else 0
            ranks = [
                _chunks(rank_pairs[(rank_pairs[:, 0] >= WINDOW_NUMBERS) == windows] - [0, first])
                for rank_pairs in pairs
            ]
            for rank_chunks in itertools.zip_longest(*ranks):
                pages = packed([np.zeros(0, np.int32) if chunk is None else chunk[1] for chunk in rank_chunks], table)
                launches.append((table, rank_chunks, device.send(pages)))

        def run() -> Running:
            for table, rank_chunks, pages in launches:
                gathered = device.programs.get("take pages", table)(device.state, pages)
                for rank, chunk in enumerate(rank_chunks):
                    if chunk is not None:
                        is_kept = self.processes_of_ranks[rank][0] == jax.process_index()
                        part = self._shard(gathered, rank if is_kept else None)
                        self._offers.put(partial(self._offer_when_computed, chunk[0], part, is_kept=is_kept))
                # None: a model of window-only layers has no arrays on context pages.
                yield from [*gathered.values()][:1]

        return run()

    def _drop_sent(self, _: Pending, command: DropChunks) -> Running:
        numbers = np.frombuffer(command.numbers, "<i4").tolist()
        self._offers.put(lambda: self._drop(numbers))
        yield from ()

    def _begin_pulls(self, _: Pending, command: PullPages) -> Running:
        """Start pulling the chunks of ranks with a device of this process, and register the chunks of all ranks.

        They are registered at once, because a `FetchPages` may be prepared before earlier commands are done.
        """
        landings: dict[tuple[int, int, int], Landing] = {}
        for rank, quadruples in enumerate(command.ranks):
            for source, chunk, place, number in np.frombuffer(quadruples, "<i4").reshape(-1, 4).tolist():
                key = rank, source, chunk
                if key not in landings:
                    landings[key] = Landing(rank, Source(*command.sources[source]), chunk, [])
                landings[key].pages.append(number)
                with self._lock:
                    self._landed[rank, number] = landings[key], place

        def run() -> Running:
            for landing in landings.values():
                if landing.rank in self._devices:
                    self._pulls.put(partial(self._pull_and_report, landing))
            yield from ()

        return run()

    def take(self, wanted: RankArrays, places: RankArrays) -> tuple[list[StagedPiece], RankArrays]:
        """Return pieces of the pages that came in chunks, with one chunk per rank in each piece, and the places of all other pages."""
        rest: RankArrays = []
        chunks: dict[Table, list[list[_StagedChunk]]] = {table: [] for table in TABLES}  # by rank
        for rank, (numbers, rank_places) in enumerate(zip(wanted, places, strict=True)):
            rank_chunks, others = self._take_chunks(rank, numbers, rank_places)
            rest.append(np.array(others, np.int32))
            for table, by_rank in chunks.items():
                by_rank.append([chunk for chunk in rank_chunks if chunk.landing.table == table])
        pieces = []
        for table, by_rank in chunks.items():
            for piece in itertools.zip_longest(*by_rank):
                layout = [np.full(moved(table), -1, np.int32) if chunk is None else chunk.layout for chunk in piece]
                landings = [None if chunk is None else chunk.landing for chunk in piece]
                pieces.append(StagedPiece(layout, partial(self.stage, landings, table), table))
        return pieces, rest

    def _take_chunks(self, rank: int, numbers: np.ndarray, places: np.ndarray) -> tuple[list[_StagedChunk], list[int]]:
        """Take a rank's landed pages. Return their chunks, and the places of the pages that did not come in chunks."""
        chunks: dict[int, _StagedChunk] = {}
        others = []
        for position in places.tolist():
            with self._lock:
                landing, place = self._landed.pop((rank, int(numbers[position])), (None, -1))
            if landing is None:
                others.append(position)
                continue
            empty = np.full(moved(landing.table), -1, np.int32)
            chunks.setdefault(id(landing), _StagedChunk(landing, empty)).layout[place] = position
        return list(chunks.values()), others

    def forget(self, rank: int, number: int) -> None:
        """Drop a page that was pulled or is being pulled."""
        with self._lock:
            self._landed.pop((rank, number), None)

    def stage(self, landings: Sequence[Landing | None], table: Table = "context") -> dict[str, Array]:
        """Join chunks of one kind, one per rank, into the input of the program that places pages. None: the rank has no chunk."""
        staged = {}
        for name, described in self._described[table].items():
            pieces = []
            for device, index in described.sharding.addressable_devices_indices_map(described.shape).items():
                landing = landings[index[0].indices(described.shape[0])[0]]
                pieces.append(
                    self._empty_array(name, described, device)
                    if landing is None
                    else jax.device_put(landing.chunk[name], device)
                )
            staged[name] = jax.make_array_from_single_device_arrays(described.shape, described.sharding, pieces)
        return staged

    def close(self) -> None:
        """Stop the threads. Pulls in progress are not reported."""
        with self._lock:
            self._closed = True
        self._offers.close()
        self._pulls.close()

    def _devices_of_ranks(self) -> tuple[dict[int, jax.Device], list[list[int]]]:
        """Return this process's first device of each local rank, and each rank's processes in the order of its devices."""
        described = next(iter((self._described["context"] or self._described["window"]).values()))
        first_devices: dict[int, jax.Device] = {}
        processes: list[list[int]] = [[] for _ in range(described.shape[0])]
        for device, index in described.sharding.devices_indices_map(described.shape).items():
            rank = index[0].indices(described.shape[0])[0]
            if device.process_index not in processes[rank]:
                processes[rank].append(device.process_index)
            if device.process_index == jax.process_index():
                first_devices.setdefault(rank, device)
        return first_devices, processes

    def _shard(self, gathered: dict[str, Array], rank: int | None) -> Chunk:
        """Return a rank's shard of the taken pages. None: the shard of any rank, only to wait for it."""
        device = self._devices[rank] if rank is not None else next(iter(self._devices.values()))
        return {
            name: next(shard.data for shard in array.addressable_shards if shard.device == device)
            for name, array in gathered.items()
        }

    def _empty_array(self, name: str, described: jax.ShapeDtypeStruct, device: jax.Device) -> Array:
        if (name, device) not in self._empty_arrays:
            self._empty_arrays[name, device] = jax.device_put(
                np.zeros((1, *described.shape[1:]), described.dtype), device
            )
        return self._empty_arrays[name, device]

    # Run in the threads.

    def _offer_when_computed(self, number: int, chunk: Chunk, *, is_kept: bool) -> None:
        """Wait for a chunk and offer it. is_kept: whether this process keeps it."""
        try:
            jax.block_until_ready(chunk)
            self._offer(number, chunk if is_kept else None)
        except Exception as error:  # the step that made it may have failed, which the engine detects by itself
            note_failure("chunk offer", error, "Who wants the chunk is told that it is gone, and computes its pages.")
            with contained("chunk offer"):
                self._offer(number, None)
            if is_kept:  # another process may know of it from process 0 and be waiting for it here
                self._drop([number])

    def _pull_and_report(self, landing: Landing) -> None:
        rank, pages = landing.rank, landing.pages
        with self._lock:
            wanted = any((rank, page) in self._landed for page in pages)
        landing.chunk = self._pull_chunk(landing) if wanted else None
        pulled = PulledChunk(rank, landing.source.link, landing.number, pages, landing.chunk is not None)
        with self._lock:
            if not self._closed:
                self._report(pulled)

    def _pull_chunk(self, landing: Landing) -> Chunk | None:
        try:
            return self._pull(landing.source, landing.number, self._devices[landing.rank])
        except ChunkGoneError:  # its lease has expired, or its transfer was cancelled
            return None
        except Exception as error:
            note_failure("chunk pull", error, "The chunk's pages are computed again.")
            return None


def _chunks(pairs: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Return (number, pages) of each chunk in the pairs of a `SendPages`."""
    if not len(pairs):
        return []
    ends = np.flatnonzero(np.diff(pairs[:, 0])) + 1
    return [(int(part[0, 0]), part[:, 1]) for part in np.split(pairs, ends)]
