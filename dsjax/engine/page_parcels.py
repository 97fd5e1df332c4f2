"""``PageParcels``: the executor's part in sending pages to other engines and pulling theirs, without a step waiting for either."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from dsjax.engine.commands import PullPages, SendPages
from dsjax.engine.page_transfer import Parcel, ParcelGoneError, PrefillLink, Release
from sharding.arrays import put

if TYPE_CHECKING:
    from dsjax.engine.mesh_executor import MeshExecutor, Running

PULLERS = 2
"""Threads that pull: while one waits for a parcel, the other asks for the next."""

_log = logging.getLogger(__name__)


class LandedPage(NamedTuple):
    """A page that has come: the parcel that it came in, and its place there."""

    parcel: Parcel
    place: int


def move_parcel(parcel: Parcel, device: jax.Device) -> Parcel:
    """A parcel on another device of this process; complete when this returns."""
    return jax.block_until_ready({name: jax.device_put(array, device) for name, array in parcel.items()})


class PageParcels:
    """Pages go to parcels by the program that takes pages to host memory; a thread waits until they are there, and offers them.

    A parcel is one device's part of what that program gives: the arrays of ``describe_moved`` for one DP rank, on one of its devices; with
    a latent layout they all have the same. Parcels that were pulled lie on the first device of their rank until they are staged.
    """

    def __init__(self, executor: MeshExecutor):
        self._executor = executor
        self._described = executor.programs.described_moved()
        self._devices = self._devices_of_ranks()
        self._offer: Callable[[int, Parcel], None] | None = None
        self._links: Sequence[PrefillLink] = ()
        self._wake: Callable[[], None] = lambda: None
        self._leaving: queue.SimpleQueue[tuple[int, Parcel] | None] = queue.SimpleQueue()
        self._wanted: queue.SimpleQueue[tuple[int, int, int, list[tuple[int, int]]] | None] = queue.SimpleQueue()
        self._landed: dict[tuple[int, int], LandedPage | None] = {}
        self._reports: list[tuple[int, int, bool]] = []
        self._lock = threading.Lock()
        self._zeros: dict[tuple[str, jax.Device], Array] = {}
        self._threads: list[threading.Thread] = []

    def send_to(self, offer: Callable[[int, Parcel], None]) -> None:
        """Have parcels offered as ``offer(number, parcel)``, in a thread of their own."""
        self._offer = offer
        self._start(self._offer_on, "dsjax-parcels")

    def pull_from(self, links: Sequence[PrefillLink], wake: Callable[[], None]) -> None:
        """Pull parcels of these engines; ``wake`` is called when a page has come or could not."""
        self._links, self._wake = links, wake
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
                        self._leaving.put((parcel[0], self._part(taken, rank)))
                yield next(iter(taken.values()))

        return run()

    def pull(self, command: PullPages) -> Running:
        """Begin to pull."""

        def run() -> Running:
            for rank, own in enumerate(command.ranks):
                wanted: dict[tuple[int, int], list[tuple[int, int]]] = {}
                for link, parcel, place, number in np.frombuffer(own, "<i4").reshape(-1, 4).tolist():
                    with self._lock:
                        self._landed[rank, number] = None
                    wanted.setdefault((link, parcel), []).append((place, number))
                for (link, parcel), pages in wanted.items():
                    self._wanted.put((rank, link, parcel, pages))
            yield from ()

        return run()

    def has(self, rank: int, number: int) -> bool:
        """Whether a page of this number has come, or is being pulled."""
        return (rank, number) in self._landed

    def take(self, rank: int, number: int) -> LandedPage:
        """A page that was reported as come; it is kept no longer."""
        with self._lock:
            page = self._landed.pop((rank, number))
        assert page is not None, "only pages that have come are taken"
        return page

    def forget(self, rank: int, number: int) -> None:
        """Keep a page no longer that was pulled, or is being pulled."""
        with self._lock:
            self._landed.pop((rank, number), None)

    def reports(self) -> list[tuple[int, int, bool]]:
        """(rank, number, whether it has come) of pages since the last time."""
        with self._lock:
            found, self._reports = self._reports, []
        return found

    def stage(self, parcels: Sequence[Parcel | None]) -> dict[str, Array]:
        """Parcels of all ranks as the program that places pages takes them; None: nothing of that rank."""
        staged = {}
        for name, described in self._described.items():
            pieces = []
            for device, index in described.sharding.addressable_devices_indices_map(described.shape).items():
                rank = index[0].indices(described.shape[0])[0]
                parcel = parcels[rank]
                piece = self._nothing(name, device) if parcel is None else jax.device_put(parcel[name], device)
                pieces.append(piece)
            staged[name] = jax.make_array_from_single_device_arrays(described.shape, described.sharding, pieces)
        return staged

    def close(self) -> None:
        """End the threads."""
        self._leaving.put(None)
        for _ in range(PULLERS):
            self._wanted.put(None)

    def _start(self, run: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _devices_of_ranks(self) -> list[jax.Device]:
        """The first device of each rank."""
        described = next(iter(self._described.values()))
        found: dict[int, jax.Device] = {}
        for device, index in described.sharding.addressable_devices_indices_map(described.shape).items():
            found.setdefault(index[0].indices(described.shape[0])[0], device)
        return [found[rank] for rank in sorted(found)]

    def _part(self, taken: dict[str, Array], rank: int) -> Parcel:
        device = self._devices[rank]
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
            number, parcel = task
            try:
                self._offer(number, jax.block_until_ready(parcel))
            except Exception:  # the step that made it has failed, which the engine finds out by itself
                _log.exception("A parcel of pages could not be offered.")

    def _pull_on(self) -> None:
        while (task := self._wanted.get()) is not None:
            rank, link, number, pages = task
            parcel = None
            with self._lock:
                wanted = any((rank, page) in self._landed for _, page in pages)
            if wanted:
                parcel = self._pulled(link, number, self._devices[rank])
            self._links[link].send(Release(number))
            with self._lock:
                for place, page in pages:
                    if (rank, page) not in self._landed:  # dropped meanwhile
                        continue
                    if parcel is None:
                        del self._landed[rank, page]
                    else:
                        self._landed[rank, page] = LandedPage(parcel, place)
                    self._reports.append((rank, page, parcel is not None))
            self._wake()

    def _pulled(self, link: int, number: int, device: Any) -> Parcel | None:
        try:
            return self._links[link].pull(number, device)
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
