"""`DeviceOrders`: in which order a generation's devices stand in its mesh, so that no group of collectives that broke is formed again.

gloo names a group of collectives by the ids of its devices in their order, and keeps both the group and, in the coordination service's
store, the addresses of its members. A group that lost a member, or in which one was interrupted, is never whole again under its name; under
another order it is another group. Plain Python and NumPy.
"""

import itertools
import random
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from dsjax.errors import UserError

_TRIES = 4096
Group = tuple[int, ...]


class DeviceOrders:
    """Remembers what was formed and what broke. process_of: of each device's id, the process that it belongs to."""

    def __init__(self, process_of: Mapping[int, int]):
        self._process_of = dict(process_of)
        self._formed: set[Group] = set()
        self._current: set[Group] = set()
        self._broken: set[Group] = set()

    def choose(self, device_ids: Sequence[int], shape: tuple[int, ...]) -> list[int]:
        """The devices for a mesh of this shape, `(dp, ep, tp)`, row by row: by process and id, or the first order after it in which
        nothing is formed again that broke. The devices of a tensor-parallel group stay together.

        device_ids: by process and id.

        Raises:
            UserError: there is no such order left.
        """
        order = self.find(device_ids, shape)
        if order is None:
            raise UserError(
                f"the {len(device_ids)} devices that are left have been in every order that a mesh of {' × '.join(map(str, shape))} can "
                "have, and each has broken; start all processes again"
            )
        self._current = self._groups(order, shape)
        self._formed |= self._current
        return order

    def find(self, device_ids: Sequence[int], shape: tuple[int, ...]) -> list[int] | None:
        """What `choose` would choose; None where there is nothing."""
        blocks = _blocks(device_ids, shape[-1], self._process_of)
        orders = (_order(blocks, attempt) for attempt in range(_TRIES))
        return next((order for order in orders if not self._groups(order, shape) & self._broken), None)

    def break_current(self, lost: Collection[int]) -> None:
        """The current mesh broke; these processes are gone, and with them every group that they were ever in."""
        self._broken |= self._current
        self.break_with(lost)

    def break_with(self, ended: Collection[int]) -> None:
        """These processes have ended, or are about to: every group that they were ever in is broken, whoever comes under their ids."""
        self._broken |= {group for group in self._formed if {self._process_of[i] for i in group} & set(ended)}

    def _groups(self, order: Sequence[int], shape: tuple[int, ...]) -> set[Group]:
        """The ordered groups in which collectives over any of the mesh's axes take place, as far as they span processes."""
        grid, across = np.array(order).reshape(shape), set()
        axes = [axis for axis in range(len(shape)) if shape[axis] > 1]
        ways = [way for count in range(1, len(axes) + 1) for way in itertools.combinations(axes, count)]
        # Experts over ep and tp, widths over etp: dispatch counts the ranks that share a width last.
        ways += [(1, 3, 2)] if len(shape) == 4 else []
        for within in ways:
            others = [axis for axis in range(len(shape)) if axis not in within]
            size = int(np.prod([shape[axis] for axis in within]))
            rows = grid.transpose(*others, *within).reshape(-1, size).tolist()
            across |= {tuple(row) for row in rows if len({self._process_of[i] for i in row}) > 1}
        return across


def _blocks(device_ids: Sequence[int], tp: int, process_of: Mapping[int, int]) -> list[list[list[int]]]:
    """The tensor-parallel groups, process by process."""
    groups = [list(device_ids[at : at + tp]) for at in range(0, len(device_ids), tp)]
    return [list(block) for _, block in itertools.groupby(groups, key=lambda group: process_of[group[0]])]


def _order(blocks: list[list[list[int]]], attempt: int) -> list[int]:
    """The first order is the natural one; then processes take turns at the front, as many times as there are; then chance decides: of
    the order of each process's groups, later of all groups, and at last of the devices in them.
    """
    count, rng = len(blocks), random.Random(attempt)
    if attempt < count:
        turned = blocks[attempt:] + blocks[:attempt]
    elif attempt < _TRIES // 4:
        turned = rng.sample([rng.sample(block, len(block)) for block in blocks], count)
    else:
        groups = [group for block in blocks for group in block]
        turned = [rng.sample(groups, len(groups))]
        if attempt >= _TRIES // 2:
            turned = [[rng.sample(group, len(group)) for group in block] for block in turned]
    return [device for block in turned for group in block for device in group]
