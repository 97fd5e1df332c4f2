"""``PageParcels``: the executor's part in sending pages to other engines and pulling theirs, without a step waiting for either."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Array

from dsjax.engine.contract.commands import DropParcels, PullPages, SendPages
from dsjax.engine.transfer.page_transfer import Parcel, ParcelGoneError, Pull, PulledParcel, Source
from sharding.arrays import put

if TYPE_CHECKING:
    from dsjax.engine.device.mesh_executor import MeshExecutor, Running

PULLERS = 2
"""Threads that pull: while one waits for a parcel, the other asks for the next."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Landing:
    """A parcel that a rank pulls. Every process knows of it, for pages are staged by parcels, in the same order everywhere.

    Attributes:
        parcel: None until it has come, and where this process has no device of the rank.
    """

    rank: int
    source: Source
    number: int
    pages: list[int]
    parcel: Parcel | None = None


def move_parcel(parcel: Parcel, device: jax.Device) -> Parcel:
    """A parcel on another device of this process; complete when this returns."""
    return jax.block_until_ready({name: jax.device_put(array, device) for name, array in parcel.items()})


class PageParcels:
    """Pages go to parcels by the program that takes pages to host memory; a thread waits until they are there, and offers them.

    A parcel is one device's part of what that program gives: the arrays of ``describe_moved`` for one DP rank, on one of its devices; with
    a latent layout they all have the same. On a mesh of several processes, the one that has the first device of a rank keeps the
    rank's parcels. Each that has a device of a rank pulls what the rank pulls, to the first device of it here, where it lies until
    it is staged on all of them.

    Attributes:
        processes: of each rank those that have devices of it, in the order of the devices.
    """

    def __init__(self, executor: MeshExecutor):
        self._executor = executor
        self._described = executor.programs.described_moved()
        self._devices, self.processes = self._places_of_ranks()
        self._offer: Callable[[int, Parcel | None], None] | None = None
        self._drop: Callable[[Sequence[int]], None] = lambda numbers: None
        self._pull: Pull | None = None
        self._report: Callable[[PulledParcel], None] = lambda parcel: None
        self._leaving: queue.SimpleQueue[tuple[int, Any, bool] | list[int] | None] = queue.SimpleQueue()
        self._wanted: queue.SimpleQueue[Landing | None] = queue.SimpleQueue()
        self._landed: dict[tuple[int, int], tuple[Landing, int]] = {}
        self._closed = False
        self._lock = threading.Lock()
        self._zeros: dict[tuple[str, jax.Device], Array] = {}
        self._threads: list[threading.Thread] = []

    def send_to(self, offer: Callable[[int, Parcel | None], None], drop: Callable[[Sequence[int]], None]) -> None:
        """Have parcels offered as ``offer(number, parcel)``, and dropped, in a thread of their own. Others' have no parcel here."""
        self._offer, self._drop = offer, drop
        self._start(self._offer_on, "dsjax-parcels")

    def pull_by(self, pull: Pull, report: Callable[[PulledParcel], None]) -> None:
        """Pull parcels by this; what came of each is reported in a thread of its own."""
        self._pull, self._report = pull, report
        for _ in range(PULLERS):
            self._start(self._pull_on, "dsjax-pull")

    def send(self, command: SendPages) -> Running:
        """Copy pages to parcels."""
        ranks = [_parcels(np.frombuffer(own, "<i4").reshape(-1, 2)) for own in command.ranks]
        programs = self._executor.programs
        launches = []
        for turn in range(max(map(len, ranks))):
            own = [parcels[turn] if turn < len(parcels) else None for parcels in ranks]
            packed = np.zeros((len(own), next(iter(self._described.values())).shape[1]), np.int32)
            for rank, parcel in enumerate(own):
                if parcel is not None:
                    packed[rank, : len(parcel[1])] = parcel[1]
            launches.append((own, put(packed, programs.rows)))

        def run() -> Running:
            for own, pages in launches:
                taken = programs.take_pages()(self._executor.state, pages)
                for rank, parcel in enumerate(own):
                    if parcel is not None:
                        kept = self.processes[rank][0] == jax.process_index()
                        self._leaving.put((parcel[0], self._part(taken, rank if kept else None), kept))
                yield next(iter(taken.values()))

        return run()

    def drop(self, command: DropParcels) -> Running:
        """Keep parcels no longer that `send` has made."""

        def run() -> Running:
            self._leaving.put(np.frombuffer(command.numbers, "<i4").tolist())
            yield from ()

        return run()

    def pull(self, command: PullPages) -> Running:
        """Begin to pull what ranks with a device of this process are to have; of all others know that it is pulled.

        That is known from here on, before earlier commands are done: a `FetchPages` may be laid out before they are.
        """
        landings: dict[tuple[int, int, int], Landing] = {}
        for rank, own in enumerate(command.ranks):
            for source, parcel, place, number in np.frombuffer(own, "<i4").reshape(-1, 4).tolist():
                key = rank, source, parcel
                if key not in landings:
                    landings[key] = Landing(rank, Source(*command.sources[source]), parcel, [])
                landings[key].pages.append(number)
                with self._lock:
                    self._landed[rank, number] = landings[key], place

        def run() -> Running:
            for landing in landings.values():
                if landing.rank in self._devices:
                    self._wanted.put(landing)
            yield from ()

        return run()

    def has(self, rank: int, number: int) -> bool:
        """Whether a page of this number has come, or is being pulled, here or by other processes."""
        return (rank, number) in self._landed

    def take(self, rank: int, number: int) -> tuple[Landing, int]:
        """The parcel of a page that was reported as come, and its place there; it is kept no longer."""
        with self._lock:
            landing, place = self._landed.pop((rank, number))
        assert landing.parcel is not None or rank not in self._devices, "only pages that have come are taken"
        return landing, place

    def forget(self, rank: int, number: int) -> None:
        """Keep a page no longer that was pulled, or is being pulled."""
        with self._lock:
            self._landed.pop((rank, number), None)

    def stage(self, landings: Sequence[Landing | None]) -> dict[str, Array]:
        """Parcels of all ranks as the program that places pages takes them; None: nothing of that rank."""
        staged = {}
        for name, described in self._described.items():
            pieces = []
            for device, index in described.sharding.addressable_devices_indices_map(described.shape).items():
                landing = landings[index[0].indices(described.shape[0])[0]]
                nothing = landing is None
                pieces.append(self._nothing(name, device) if nothing else jax.device_put(landing.parcel[name], device))
            staged[name] = jax.make_array_from_single_device_arrays(described.shape, described.sharding, pieces)
        return staged

    def close(self) -> None:
        """End the threads. What is being pulled is not waited for, and not reported."""
        with self._lock:
            self._closed = True
        self._leaving.put(None)
        for _ in range(PULLERS):
            self._wanted.put(None)

    def _start(self, run: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _places_of_ranks(self) -> tuple[dict[int, jax.Device], list[list[int]]]:
        """The first device of each rank that has any here; and of each rank the processes that have one, in the order of the devices."""
        described = next(iter(self._described.values()))
        here: dict[int, jax.Device] = {}
        processes: list[list[int]] = [[] for _ in range(described.shape[0])]
        for device, index in described.sharding.devices_indices_map(described.shape).items():
            rank = index[0].indices(described.shape[0])[0]
            if device.process_index not in processes[rank]:
                processes[rank].append(device.process_index)
            if device.process_index == jax.process_index():
                here.setdefault(rank, device)
        return here, processes

    def _part(self, taken: dict[str, Array], rank: int | None) -> Parcel:
        """A rank's part of what was taken; None: of any rank, to wait for it."""
        device = self._devices[rank] if rank is not None else next(iter(self._devices.values()))
        return {
            name: next(shard.data for shard in array.addressable_shards if shard.device == device)
            for name, array in taken.items()
        }

    def _nothing(self, name: str, device: jax.Device) -> Array:
        if (name, device) not in self._zeros:
            described = self._described[name]
            self._zeros[name, device] = jax.device_put(np.zeros((1, *described.shape[1:]), described.dtype), device)
        return self._zeros[name, device]

    # In threads of their own.

    def _offer_on(self) -> None:
        while (task := self._leaving.get()) is not None:
            if isinstance(task, list):
                self._drop(task)
                continue
            number, parcel, kept = task
            try:
                jax.block_until_ready(parcel)
                self._offer(number, parcel if kept else None)
            except Exception:  # the step that made it has failed, which the engine finds out by itself
                _log.exception("A parcel of pages could not be offered.")

    def _pull_on(self) -> None:
        while (landing := self._wanted.get()) is not None:
            rank, pages = landing.rank, landing.pages
            with self._lock:
                wanted = any((rank, page) in self._landed for page in pages)
            landing.parcel = self._pulled(landing) if wanted else None
            found = PulledParcel(rank, landing.source.link, landing.number, pages, landing.parcel is not None)
            with self._lock:
                if not self._closed:
                    self._report(found)

    def _pulled(self, landing: Landing) -> Parcel | None:
        try:
            return self._pull(landing.source, landing.number, self._devices[landing.rank])
        except ParcelGoneError:  # its lease is over, or its transfer cancelled
            return None
        except Exception as error:
            _log.warning("A parcel of pages could not be pulled, so they are computed again: %s", error)
            return None


def _parcels(pairs: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """(number, pages) of the parcels, from the pairs of a `SendPages`."""
    if not len(pairs):
        return []
    ends = np.flatnonzero(np.diff(pairs[:, 0])) + 1
    return [(int(part[0, 0]), part[:, 1]) for part in np.split(pairs, ends)]
