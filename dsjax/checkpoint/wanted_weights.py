"""`Wanted`: what a process takes from others of the parameters of a new mesh, and whom it asks for which part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dsjax.checkpoint.held_weights import Box, Extent, HeldWeights, Part, box_size, cover, difference, inside
from dsjax.model.parameters import ParameterInfo

Wants = dict[int, dict[str, dict[int, list[Part]]]]
"""What is to come from other processes: by process, path and layer."""


class Peers(Protocol):
    """The other processes that change their mesh together with this one."""

    def inventories(self, inventory: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Exchange what each holds; give the others' by process."""

    def begin(self, wants: Wants) -> None:
        """Tell everybody what is wanted of whom."""

    def fetch(self, process: int, path: str, parts: Sequence[Part], out: Sequence[np.ndarray]) -> int:
        """Fill arrays with parts that a process holds, in a thread for each process.

        How many of them, the first ones, are right; the others' content is anything.
        """

    def wait_until_taken(self, path: str, layer: int) -> None:
        """Wait until no other process will ask for parts of this layer any more, or for as long as that is worth it."""

    def check(self) -> None:
        """Raise where the mesh that is being made is given up."""


@dataclass(frozen=True, eq=False)
class Asked:
    """What one process was asked for of a layer.

    Attributes:
        pairs: each part with the missing one that it lies in. views: the arrays to fill. count: of how many, the first ones, the content
            is right.
    """

    pairs: list[tuple[Part, Part]]
    views: list[np.ndarray]
    count: Future[int]


class Wanted:
    """Parts that are asked for.

    Args:
        others: what each process holds: by path, (dtype, extent).

    Attributes:
        wants: what is to come, and from whom.
    """

    def __init__(
        self, held: HeldWeights, peers: Peers | None, others: Mapping[int, Mapping[str, Sequence[tuple[str, Extent]]]]
    ):
        self._held, self._peers, self._others = held, peers, others
        self.wants: Wants = {}
        self._threads = ThreadPoolExecutor(max(1, len(others)), thread_name_prefix="weights")

    def plan(self, path: str, info: ParameterInfo, part: Part) -> None:
        """Divide what is not here of a part among the processes that have it, another one first for each part."""
        left = self._held.look_up(path, part)[1]
        ids = sorted(self._others)
        if not left or not ids:
            return
        turn = (part.layer + max(part.expert, 0)) % len(ids)
        shards = [
            (process, extent)
            for process in ids[turn:] + ids[:turn]
            for dtype, extent in self._others[process].get(path, ())
            if dtype == str(info.storage_dtype)
        ]
        for box in left:
            for process, _, piece in cover(Part(part.layer, part.expert, box), shards)[0]:
                layers = self.wants.setdefault(process, {}).setdefault(path, {})
                layers.setdefault(part.layer, []).append(Part(part.layer, part.expert, piece))

    def ask(self, path: str, missing: Mapping[Part, np.ndarray]) -> list[Asked]:
        """Have other processes fill arrays with what they were told is wanted of them, each in a thread."""
        if not missing:
            return []
        layer = next(iter(missing)).layer
        of_expert: dict[int, list[Part]] = {}
        for whole in missing:
            of_expert.setdefault(whole.expert, []).append(whole)
        asked = []
        for process, paths in self.wants.items():
            pairs = [
                (part, whole)
                for part in paths.get(path, {}).get(layer, ())
                for whole in of_expert.get(part.expert, ())
                if is_within(part, whole)
            ]
            if not pairs:
                continue
            views = [missing[whole][inside(part.box, whole.box, missing[whole].ndim)] for part, whole in pairs]
            count = self._threads.submit(self._peers.fetch, process, path, [part for part, _ in pairs], views)
            asked.append(Asked(pairs, views, count))
        return asked

    def receive(self, missing: Mapping[Part, np.ndarray], asked: Sequence[Asked]) -> tuple[list[Part], int]:
        """Wait for those that were asked. Give the parts that are still missing, and how many bytes have come."""
        done: dict[Part, list[Box]] = {}
        nbytes = 0
        for each in asked:
            count = each.count.result()
            for (part, whole), view in zip(each.pairs[:count], each.views[:count], strict=True):
                done.setdefault(whole, []).append(part.box)
                nbytes += view.nbytes
        left = []
        for part in missing:
            boxes = [part.box]
            for got in done.get(part, ()):
                boxes = [rest for box in boxes for rest in _without(box, got)]
            left += [Part(part.layer, part.expert, box) for box in boxes]
        return left, nbytes

    def close(self) -> None:
        """Wait for whoever is still asked."""
        self._threads.shutdown()


def is_within(part: Part, whole: Part) -> bool:
    """Whether a part lies in another one."""
    same = (part.layer, part.expert) == (whole.layer, whole.expert)
    return same and all(a >= c and b <= d for (a, b), (c, d) in zip(part.box, whole.box, strict=True))


def _without(box: Box, taken: Box) -> list[Box]:
    """A box without what it shares with another."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, taken, strict=True))
    return difference(box, common) if box_size(common) > 0 and all(a < b for a, b in common) else [box]
