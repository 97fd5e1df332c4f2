"""``RemoteExperts``: experts in other processes, which may die and come back while the attention side keeps its caches and requests."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Array

from dsjax.engine.afd.expert_link import Errand, ExpertLink
from dsjax.engine.afd.expert_side import Side
from dsjax.engine.afd.layer_programs import OnHost
from dsjax.engine.afd.link_counts import ExpertLinks, LinkCounts
from dsjax.engine.afd.messages import VERSION, Call, Hello, Place, Stage
from dsjax.hosts.credentials import Credentials
from dsjax.model.apart import LayerPass
from dsjax.model.parameters import ParameterInfo
from sharding import MeshSpec
from sharding.arrays import put
from sharding.dispatch.between import Between


class RemoteExperts(Side):
    """The experts' side as the attention side's process sees it: a link to each process that has a run of the expert devices.

    Calls to all of them are under way at the same time, and each may go and come back by itself.

    Args:
        addresses: ``HOST:PORT`` of the processes, in the order of their devices. patience, silence: as of ``ExpertLink``.

    Attributes:
        space: as of ``Hello``; assigned before the first call. name: by which processes know this attention side, likewise: where it has
            experts moved, they let in a connection of this name alone. placement: the logical expert in each physical slot of each
            layer; likewise. A process that comes back is told of it, and takes from the checkpoint what it had not.
    """

    padded = False

    def __init__(
        self,
        spec: MeshSpec,
        infos: Mapping[str, ParameterInfo],
        addresses: Sequence[str],
        credentials: Sequence[Credentials],
        *,
        waits: bool,
        patience: float,
        silence: int,
    ):
        super().__init__(spec, infos, waits=waits)
        self.parts = len(addresses)
        self.space: dict[str, Any] = {}
        self.placement = np.zeros((0, 0), np.int32)
        self.name = secrets.token_bytes(8)
        self.links = [
            ExpertLink(address, own, partial(self._hello, part), patience=patience, silence=silence)
            for part, (address, own) in enumerate(zip(addresses, credentials, strict=True))
        ]

    @property
    def counts(self) -> Sequence[LinkCounts]:
        """What the link to each process has done so far."""
        return [link.counts for link in self.links]

    def extension(self, kind: type) -> Any:
        """Offer the links' counts to the metrics."""
        return self if kind is ExpertLinks else None

    def _hello(self, part: int) -> Hello:
        first = part * (self.spec.ep_size // self.parts)
        return Hello(VERSION, self.space, self.placement.astype("<i4").tobytes(), self.name, first)

    def stage(self, row: int, moves: Sequence[tuple[int, int]]) -> None:
        """Have the processes bring experts of a layer to the devices that will have them: each takes its own from the others."""
        self._everywhere(Stage(row, np.array(moves, "<i4").tobytes()))

    def place(self, row: int, experts: np.ndarray) -> None:
        """Have the slots of a layer hold these logical experts, on all processes; one that goes meanwhile comes back so."""
        placement = self.placement.copy()
        placement[row] = experts
        self.placement = placement
        self._everywhere(Place(row, experts.astype("<i4").tobytes()))

    def _everywhere(self, message: Call | Stage | Place) -> None:
        """Have all processes do something, at the same time, and wait for all of them."""
        for done in [link.begin(lambda: Errand(message)) for link in self.links]:
            done.result()

    def connect(self) -> None:
        """Connect to all processes; errors as of ``ExpertLink.connect``."""
        for link in self.links:
            link.connect()

    def way(self, through: LayerPass) -> WayToProcesses:
        """Have the experts' processes compile for the rows of a pass, all at once."""
        between = through.between()
        call = Call(through.stack, -1, between.tokens, between.senders * between.capacity, b"")
        self._everywhere(call)
        return WayToProcesses(self, through.stack, between)

    def close(self) -> None:
        """End the connections and their threads."""
        for link in self.links:
            link.close()


@dataclass(frozen=True, eq=False)
class WayToProcesses:
    """``Way`` to other processes: through this host's memory. Of the rows' cells those that are filled travel, and their answers."""

    side: RemoteExperts
    stack: str
    between: Between

    def call(self, rows: Sequence[Array], counts: OnHost, layer: int, r: int = 0) -> list[_CallOfPart]:
        """Begin to send each process its rows."""
        begun = []
        for part, link in enumerate(self.side.links):
            one = _CallOfPart(self.between, self.stack, layer, part, r, rows[part], counts)
            one.done = link.begin(one.prepare)
            begun.append(one)
        return begun

    def returned(self, away: list[_CallOfPart]) -> Sequence[Array]:
        """Wait for the answers, and send them to the tokens' devices."""
        return [
            put(one.in_cells(), described.sharding)
            for one, described in zip(away, self.between.described_returns, strict=True)
        ]


@dataclass(eq=False)
class _CallOfPart:
    """Rows to one process and its answers, as they travel: the filled cells alone, sorted by expert device, token device and place.

    rows, counts: of ``Between.pack``; nobody waits for them before ``prepare``, which the link's thread calls. done: when all is back.
    """

    between: Between
    stack: str
    layer: int
    part: int
    r: int
    rows: Array
    counts: OnHost
    done: Future[None] | None = None

    def prepare(self) -> Errand:
        """Take the filled cells out of the rows."""
        between, devices, C = self.between, self.between.part_devices, self.between.capacity
        of_part = self.counts.values[:, self.part * devices : (self.part + 1) * devices].T
        filled = np.clip(of_part - self.r * C, 0, C)
        e, s, c = np.nonzero(np.arange(C) < filled[:, :, None])
        self._cells = (s * devices + e) * C + c
        self._answers = np.empty((len(self._cells), between.columns, between.wire.width), between.wire.dtype)
        cells, told = between.senders * C, filled.astype("<i4").tobytes()
        sent = np.ascontiguousarray(np.asarray(self.rows)[self._cells])
        return Errand(Call(self.stack, self.layer, between.tokens, cells, told), sent, self._answers)

    def in_cells(self) -> np.ndarray:
        """Wait for the answers, and give them where ``Between.add`` looks for them; nobody looks into cells that are not filled."""
        self.done.result()
        between = self.between
        cells = between.senders * between.part_devices * between.capacity
        answers = np.zeros((cells, *self._answers.shape[1:]), self._answers.dtype)
        answers[self._cells] = self._answers
        return answers.reshape(cells * between.columns, between.wire.width)
