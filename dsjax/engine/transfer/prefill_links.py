"""`PrefillLinks`: the prefill sides that a decode engine reaches, and what they and its scheduler tell each other; `LocalLink`: one of this
process. Plain Python."""

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dsjax.engine.contract.executor import Progress
from dsjax.engine.transfer.incoming import Incoming
from dsjax.engine.transfer.page_transfer import (
    Forget,
    Parcel,
    PrefillLink,
    PulledParcel,
    Release,
    Source,
    ToDecode,
    ToPrefill,
)

if TYPE_CHECKING:  # it has a core, which has links
    from dsjax.engine.transfer.prefill_engine import PrefillEngine


class PrefillLinks:
    """Belongs to the engine's thread. The sides answer from threads of their own, and what they say waits until `enter`.

    Args:
        incoming: the scheduler's account of transfers, which gives and takes the messages.
        links: those that are there from the start.
        connect: makes further ones, by the address that a request names.

    Attributes:
        links: by their numbers.
        wake: set when a side has said something, or the executor has pulled something.
    """

    def __init__(
        self, incoming: Incoming, links: Sequence[PrefillLink], connect: Callable[[str], PrefillLink] | None = None
    ):
        self._incoming, self._connect = incoming, connect
        self._addresses: dict[str, int] = {}
        self._inbox: queue.SimpleQueue[tuple[int, ToDecode]] = queue.SimpleQueue()
        self._pulled: queue.SimpleQueue[PulledParcel] = queue.SimpleQueue()
        self.links: list[PrefillLink] = []
        self.wake = threading.Event()
        for link in links:
            self._add(link)

    def number_of(self, address: str) -> int:
        """The number of the side at an address."""
        if address not in self._addresses:
            link = self._connect(address)
            self._addresses[address] = self._incoming.add_link()
            self._add(link)
        return self._addresses[address]

    def enter(self, now: float) -> None:
        """Hand the scheduler what the sides have said."""
        self.wake.clear()  # what comes from now on ends the next wait at once
        while not self._inbox.empty():
            self._incoming.receive(*self._inbox.get(), now)

    def pull(self, source: Source, number: int, device: Any) -> Parcel:
        """For the executor, from any thread: a parcel on this device."""
        return self.links[source.link].pull(number, device, source.address)

    def report(self, parcel: PulledParcel) -> None:
        """For the executor, from any thread: what has come of a parcel."""
        self._pulled.put(parcel)
        self.wake.set()

    def take_pulled(self) -> list[PulledParcel]:
        """Parcels that have come, or could not, since the last time; their sides need not keep them any more."""
        found = []
        while not self._pulled.empty():
            found.append(self._pulled.get())
            self.links[found[-1].link].send(Release(found[-1].number))
        return found

    def send(self) -> None:
        """Send the sides what the scheduler has for them."""
        for link, message in self._incoming.take_messages():
            self.links[link].send(message)

    def forget(self) -> None:
        """Have all sides let no page be found that they have computed."""
        self.send()
        for link in self.links:
            link.send(Forget())

    def close(self) -> None:
        """Ask and pull nothing more."""
        for link in self.links:
            link.close()

    def _add(self, link: PrefillLink) -> None:
        self.links.append(link)
        link.connect(partial(self._receive, len(self.links) - 1))

    def _receive(self, number: int, message: ToDecode) -> None:
        self._inbox.put((number, message))
        self.wake.set()


class LocalLink:
    """Reaches a prefill engine of this process, which ends with the link.

    move: gives a parcel on another device.
    """

    def __init__(self, engine: "PrefillEngine", move: Callable[[Parcel, Any], Parcel] = lambda parcel, device: parcel):
        self.engine, self._move = engine, move
        self._receive: Callable[[ToDecode], None] = lambda message: None

    def connect(self, receive: Callable[[ToDecode], None]) -> None:
        """Have its messages handed to `receive`."""
        self._receive = receive

    def send(self, message: ToPrefill) -> None:
        """Tell it something."""
        self.engine.post(message, self._receive)

    def pull(self, number: int, device: Any, address: str = "") -> Parcel:
        """A parcel on this device."""
        return self._move(self.engine.leases.take(number), device)

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile its programs, before anything is asked of it."""
        self.engine.core.executor.warm_up(progress)

    def close(self) -> None:
        """Ask nothing more; the prefill engine ends."""
        self.engine.shutdown()
