"""`DeviceOrders` orders the devices of each new mesh so that gloo never has to form a broken group again.

gloo names a group by the ordered ids of its devices. It keeps the group, and its members' addresses in the coordination service's store, so
a group that lost a member or was interrupted stays broken under that name. The same devices in another order are a new group. Plain Python
and NumPy.
"""

import itertools
import random
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from dsjax.errors import UserError

_TRIES = 4096
"""Number of orders to try for a mesh."""
Group = tuple[int, ...]


class DeviceOrders:
    """Remembers which groups were formed and which are broken. process_of: device id to the process that owns the device."""

    def __init__(self, process_of: Mapping[int, int]):
        self._process_of = dict(process_of)
        self._formed: set[Group] = set()
        self._current: set[Group] = set()
        self._broken: set[Group] = set()

    def choose(self, device_ids: Sequence[int], shape: tuple[int, ...]) -> list[int]:
        """Return the devices of a new mesh row by row, in the first order that forms no broken group, and remember its groups.

        device_ids: sorted by process and id, which is the first order that is tried. shape: of the mesh, `(dp, ep, tp)` or
        `(dp, ep, etp, tp)`. Devices of a tensor-parallel group stay together.

        Raises:
            UserError: every order has a broken group.
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
        """Return what `choose` would, without remembering it; None if every order has a broken group."""
        blocks = _blocks(device_ids, shape[-1], self._process_of)
        orders = (_order(blocks, attempt) for attempt in range(_TRIES))
        return next((order for order in orders if not self._groups(order, shape) & self._broken), None)

    def break_current(self, lost: Collection[int]) -> None:
        """Mark the groups of the current mesh as broken, and every group with a device of the `lost` processes."""
        self._broken |= self._current
        self.break_with(lost)

    def break_with(self, ended: Collection[int]) -> None:
        """Mark all groups with a device of these processes as broken. A new process with the same id cannot join them."""
        self._broken |= {group for group in self._formed if {self._process_of[i] for i in group} & set(ended)}

    def _groups(self, order: Sequence[int], shape: tuple[int, ...]) -> set[Group]:
        """Return the ordered groups of collectives, over any combination of mesh axes, that span several processes."""
        grid = np.array(order).reshape(shape)
        across = set()
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
    """Return the tensor-parallel groups of each process."""
    groups = [list(device_ids[start : start + tp]) for start in range(0, len(device_ids), tp)]
    return [list(block) for _, block in itertools.groupby(groups, key=lambda group: process_of[group[0]])]


def _order(blocks: list[list[list[int]]], attempt: int) -> list[int]:
    """Return the devices in the order with the number `attempt`.

    First come the rotations of the processes (0 is the natural order), then random orders that shuffle more and more: processes and their
    groups, all groups, and from half of `_TRIES` on also the devices within a group.
    """
    count = len(blocks)
    rng = random.Random(attempt)
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
