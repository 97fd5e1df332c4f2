"""Replica groups of collectives, parsed from every format that XLA prints, and the mesh axes along which they run."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

import numpy as np

Groups = tuple[tuple[int, ...], ...]
"""Groups of devices, by their index in the flattened mesh; one tuple per group."""

_LISTS = re.compile(r"replica_groups={(({[\d,]*},?)*)}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? ?{([^}]*)}")
_PAIRS = re.compile(r"source_target_pairs={(({\d+,\d+},?)*)}")


def replica_groups(attributes: str, devices: int) -> Groups:
    """Return a collective's groups from its attributes; without any, all ``devices`` form one group."""
    if match := _MESH.search(attributes):
        axes = re.findall(r"'?([\w\-.]+)'?=(\d+)", match.group(1))
        names = [name for name, _ in axes]
        sizes = [int(size) for _, size in axes]
        ids = _iota(match.group(2) or str(np.prod(sizes)), match.group(3)).reshape(sizes)
        return _along(ids, [names.index(name) for name in re.findall(r"'?([\w\-.]+)'?(?:,|$)", match.group(4))])
    if match := _IOTA.search(attributes):
        shape = [int(size) for size in match.group(1).split(",")]
        return _rows(_iota(match.group(2), match.group(3)).reshape(shape))
    if (match := _LISTS.search(attributes)) and match.group(1):
        return tuple(tuple(int(i) for i in part.split(",")) for part in re.findall(r"{([\d,]+)}", match.group(1)))
    return (tuple(range(devices)),)


def source_target_pairs(attributes: str) -> Groups:
    """Return the ``(source, target)`` pairs of a permutation."""
    match = _PAIRS.search(attributes)
    pairs = re.findall(r"{(\d+),(\d+)}", match.group(1)) if match else []
    return tuple((int(a), int(b)) for a, b in pairs)


def mesh_axes(groups: Groups, mesh: Mapping[str, int]) -> tuple[str, ...] | None:
    """Return the mesh axes along which the groups run, in the mesh's order; None if they follow no axes.

    mesh: axis → size, major axis first; ``i`` in a group is the ``i``-th device of the flattened mesh. Axes of size 1 are
    never returned.
    """
    real = [axis for axis, size in mesh.items() if size > 1]
    ids = np.arange(int(np.prod([*mesh.values(), 1]))).reshape(list(mesh.values()))
    wanted = {frozenset(group) for group in groups}
    for count in range(len(real) + 1):
        for axes in itertools.combinations(real, count):
            if {frozenset(g) for g in _along(ids, [list(mesh).index(a) for a in axes])} == wanted:
                return axes
    return None


def _iota(sizes: str, permutation: str | None) -> np.ndarray:
    shape = [int(size) for size in sizes.split(",")]
    ids = np.arange(int(np.prod(shape))).reshape(shape)
    return ids.transpose([int(axis) for axis in permutation.split(",")]) if permutation else ids


def _along(ids: np.ndarray, axes: Sequence[int]) -> Groups:
    """Return the groups of ids that differ only along ``axes``, the first axis slowest."""
    others = [axis for axis in range(ids.ndim) if axis not in axes]
    size = int(np.prod([ids.shape[axis] for axis in axes]))
    return _rows(ids.transpose([*others, *axes]).reshape(-1, size))


def _rows(ids: np.ndarray) -> Groups:
    return tuple(tuple(int(i) for i in row) for row in ids.reshape(-1, ids.shape[-1]))
