"""``WeightPeers``: the other processes from which a process takes parameters while the mesh changes, and to which it gives them.

Each says what it holds, then what it will take from whom. Who takes asks over a secure channel, part by part, and goes to the checkpoint
for what it does not get: a giver that dies, hangs or has nothing costs bytes and no answer. docs/many-hosts.md.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from dsjax.checkpoint.held_weights import HeldWeights, Part, assemble
from dsjax.checkpoint.wanted_weights import Wants
from dsjax.errors import UserError
from dsjax.hosts.group import GroupError, HostGroup
from dsjax.hosts.secure_channel import SecureChannel, closed_on_failure, connect
from dsjax.hosts.secure_listener import SecureListener
from dsjax.hosts.wire import decoded

_SERVICE = "weights"
_MOST_REQUEST = 1 << 24
_LOOK_SECONDS = 0.2
_HELD, _WANTED = "weights held", "weights wanted"

_log = logging.getLogger(__name__)


class _Take(msgspec.Struct, frozen=True, array_like=True):
    """Parts of one layer of a parameter that are wanted, each as (expert, box)."""

    path: str
    layer: int
    parts: list[tuple[int, list[tuple[int, int]]]]


_openings = msgspec.msgpack.Decoder(tuple[int, int])
_takes = msgspec.msgpack.Decoder(_Take)


class WeightPeers:
    """One change of mesh, for one process. ``close`` must be called when it is over.

    Args:
        group: in the generation that is being made. held: of this process. givers: processes without a part in it that hold parameters.
    """

    def __init__(self, group: HostGroup, held: HeldWeights, givers: Sequence[int] = ()):
        self._group, self._held, self._givers = group, held, list(givers)
        self._generation = group.generation
        self._seconds = float(group.options.heartbeat_timeout)
        self._channels: dict[int, SecureChannel | None] = {}
        self._addresses: dict[int, tuple[str, int]] = {}
        # Parts of this process that each taker wants and has taken, by path and layer. It may take before it is known here what it wants.
        self._wanted: dict[int, Counter[tuple[str, int]]] = {}
        self._taken: dict[int, Counter[tuple[str, int]]] = {}
        self._dismissed: set[int] = set()  # takers that nobody waits for: they have ended, or take nothing
        self._changed = threading.Condition()
        self._stages: list[str] = [_HELD, _WANTED]
        self._listener = _listen(group, self._give)

    # The part of those that are in the new mesh.

    def inventories(self, inventory: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Exchange what each holds; give the others' by process.

        Raises:
            GroupError: one is gone, or cannot go on.
        """
        self._stages.remove(_HELD)
        told = dict(zip(self._ids(), self._group.agreement.ask(_HELD, self._offer(inventory)), strict=True))
        for process in self._givers:
            said = self._wait_for(_offer_key(self._group, process))
            if said is not None:
                told[process] = msgspec.msgpack.decode(said)
        told.pop(self._group.options.process_id)
        members = {member.process_id: member for member in self._group.members}
        self._addresses = {process: (members[process].address, offer["port"]) for process, offer in told.items()}
        return {process: offer["inventory"] for process, offer in told.items() if offer["port"]}

    def begin(self, wants: Wants) -> None:
        """Tell everybody what is wanted of whom.

        Raises:
            GroupError: one is gone, or cannot go on.
        """
        counts = {
            process: [[path, layer, len(parts)] for path, layers in paths.items() for layer, parts in layers.items()]
            for process, paths in wants.items()
        }
        self._stages.remove(_WANTED)
        here = self._group.options.process_id
        for process, wanted in zip(self._ids(), self._group.agreement.ask(_WANTED, counts), strict=True):
            rows = wanted.get(here, ())
            with self._changed:
                self._wanted[process] = Counter({(path, layer): count for path, layer, count in rows})
        for process in wants:
            self._channels[process] = self._connect(process)

    def fetch(self, process: int, path: str, parts: Sequence[Part], out: Sequence[np.ndarray]) -> int:
        """Fill arrays with parts that a process holds; see ``dsjax.checkpoint.wanted_weights.Peers``."""
        channel, done = self._channels.get(process), 0
        if channel is None:
            return 0
        try:
            boxes = [(part.expert, [tuple(one) for one in part.box]) for part in parts]
            channel.send(msgspec.msgpack.encode(_Take(path, parts[0].layer, boxes)))
            for view in out:
                if channel.receive(1) != b"y":
                    return done
                _receive(channel, view)
                done += 1
        except (OSError, EOFError) as error:
            _log.warning(
                "Process %d gives no more weights (%s); the rest is read from the checkpoint.",
                process,
                str(error) or type(error).__name__,
            )
            channel.close()
            self._channels[process] = None
        return done

    def wait_until_taken(self, path: str, layer: int) -> None:
        """Wait until no other process will ask for parts of this layer any more, or takes nothing for the heartbeat's timeout."""
        with self._changed:
            began, before = time.monotonic(), self._total_taken()
            while waiting := self._waits_for(path, layer):
                self._changed.wait(_LOOK_SECONDS)
                self.check()
                if self._total_taken() != before:
                    began, before = time.monotonic(), self._total_taken()
                elif time.monotonic() - began > self._seconds:
                    _log.warning("Nobody waits any more for processes %s to take weights; they read them.", waiting)
                    self._dismissed.update(waiting)

    def _waits_for(self, path: str, layer: int) -> list[int]:
        """Who has yet to take parts of a layer."""
        return [
            taker
            for taker, wanted in self._wanted.items()
            if taker not in self._dismissed and wanted[path, layer] > self._taken.get(taker, {}).get((path, layer), 0)
        ]

    def _total_taken(self) -> int:
        return sum(taken.total() for taken in self._taken.values())

    def check(self) -> None:
        """Raise where the generation is given up.

        Raises:
            GroupError: one of its processes is gone, or another generation has begun.
        """
        self._group.check()
        news = self._group.announcements
        if news is not None and news.latest > self._generation:
            raise GroupError(f"generation {self._generation} was given up while its weights were loaded")

    def give_up(self, error: BaseException) -> None:
        """Say, where nobody was told what is held or wanted here, that this process cannot go on."""
        for stage in self._stages:
            self._group.agreement.tell(
                stage, error=str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            )
        self._stages = []

    def finish(self) -> None:
        """Process 0's, when all have what they need: those without a part in the mesh need not keep anything."""
        if self._group.is_leader and self._givers:
            self._group.store.set(_done_key(self._group), b"1")

    # The part of one that is not.

    def stand_by(self) -> bool:
        """Give until all have what they need (True), or the generation is given up."""
        offer = msgspec.msgpack.encode(self._offer(self._held.inventory()))
        self._group.store.set(_offer_key(self._group, self._group.options.process_id), offer)
        news = self._group.announcements
        while news is None or news.latest <= self._generation:
            if self._group.store.get(_done_key(self._group), _LOOK_SECONDS) is not None:
                return True
        return False

    def close(self) -> None:
        """End all connections."""
        for channel in self._channels.values():
            if channel is not None:
                channel.close()
        if self._listener is not None:
            self._listener.close(connections=True)

    def _offer(self, inventory: dict[str, Any]) -> dict[str, Any]:
        return {"port": self._listener.port if self._listener is not None else 0, "inventory": inventory}

    def _ids(self) -> list[int]:
        return [member.process_id for member in self._group.present]

    def _wait_for(self, key: str) -> bytes | None:
        """A process's word that it need not give; None where it does not come in time."""
        deadline = time.monotonic() + self._seconds
        while time.monotonic() < deadline:
            said = self._group.store.get(key, _LOOK_SECONDS)
            if said is not None:
                return said
            self.check()
        return None

    def _connect(self, process: int) -> SecureChannel | None:
        try:
            with closed_on_failure(connect(self._addresses[process], _SERVICE, self._group.credentials)) as channel:
                channel.settimeout(self._seconds)
                channel.send(msgspec.msgpack.encode([self._generation, self._group.options.process_id]))
            return channel
        except (OSError, EOFError, UserError) as error:
            _log.warning(
                "Process %d cannot be asked for weights (%s); they are read from the checkpoint.", process, error
            )
            return None

    def _give(self, channel: SecureChannel) -> None:
        """Give one process what it asks for, in a thread of the listener."""
        channel.settimeout(self._seconds)
        try:
            generation, taker = decoded(_openings, channel.receive(64))
        except msgspec.MsgspecError as error:
            raise ConnectionError(
                f"{channel.peer} does not begin as a process that takes weights does: {error}"
            ) from error
        try:
            if generation != self._generation:
                return
            channel.settimeout(None)  # the other side may read a layer from the checkpoint before it asks for the next
            while True:
                take = decoded(_takes, channel.receive(_MOST_REQUEST))
                self._give_parts(channel, take)
                with self._changed:
                    self._taken.setdefault(taker, Counter())[take.path, take.layer] += len(take.parts)
                    self._changed.notify_all()
        except msgspec.MsgspecError as error:
            _log.warning("Process %d asked for weights in a way that this one does not know: %s", taker, error)
        finally:
            with self._changed:
                self._dismissed.add(taker)
                self._changed.notify_all()
            channel.close()

    def _give_parts(self, channel: SecureChannel, take: _Take) -> None:
        for expert, box in take.parts:
            part = Part(take.layer, expert, tuple(box))
            with self._held.reading(take.path, part) as pieces:
                if pieces is None:
                    channel.send(b"n")  # the other side asks for no more of this layer
                    return
                values = assemble(part, pieces)
                channel.send(b"y")
                channel.send_bytes(memoryview(values.reshape(-1).view(np.uint8)))


def _receive(channel: SecureChannel, view: np.ndarray) -> None:
    """Fill an array, through a copy where it is not one run of memory."""
    run = view if view.flags.c_contiguous else np.empty(view.shape, view.dtype)
    channel.receive_into(memoryview(run.reshape(-1).view(np.uint8)))
    if run is not view:
        view[...] = run


def _listen(group: HostGroup, give: Any) -> SecureListener | None:
    """Listen where other hosts reach this one; None where that cannot be done: then nobody takes from here."""
    address = group.options.address
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.bind((address, 0))
        return SecureListener(
            listener, group.credentials, {_SERVICE: give}, "dsjax-weights", most_connections=len(group.members) + 1
        )
    except OSError:
        listener.close()
        return None


def _offer_key(group: HostGroup, process: int) -> str:
    return group.key("weights", "offer", process)


def _done_key(group: HostGroup) -> str:
    return group.key("weights", "done")
