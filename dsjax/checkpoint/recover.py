"""Parameters of a new mesh from what processes hold of those of the old one; only what nobody holds is read. docs/many-hosts.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, SingleDeviceSharding
from jaxtyping import Array

from dsjax.checkpoint.held_weights import (
    Box,
    Extent,
    HeldShard,
    HeldWeights,
    Part,
    box_size,
    cover,
    difference,
    inside,
    read_inventory,
)
from dsjax.checkpoint.names import TensorNames
from dsjax.checkpoint.place import Advance, Fill, aligned_empty, local_shards
from dsjax.model.parameters import ParameterInfo
from sharding.rules import Rules

Wants = dict[int, dict[str, dict[int, list[Part]]]]
"""What is to come from other processes: by process, path and layer."""


class Peers(Protocol):
    """The other processes that change their mesh together with this one."""

    def inventories(self, inventory: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Exchange what each holds; give the others' by process."""

    def begin(self, wants: Wants) -> None:
        """Tell everybody what is wanted of whom."""

    def fetch(self, process: int, path: str, parts: Sequence[Part], out: Sequence[np.ndarray]) -> int:
        """Fill arrays with parts that a process holds. How many of them, the first ones, are right; the others' content is anything."""

    def wait_until_taken(self, path: str, layer: int) -> None:
        """Wait until no other process will ask for parts of this layer any more, or for as long as that is worth it."""

    def check(self) -> None:
        """Raise where the mesh that is being made is given up."""


def place_held(
    parameters: Mapping[str, ParameterInfo],
    mesh: Mesh,
    rules: Rules,
    names: TensorNames,
    held: HeldWeights,
    peers: Peers | None,
    fill: Fill,
    advance: Advance = lambda _: None,
) -> dict[str, jax.Array]:
    """Make every parameter as ``place`` does, from what is held here, then from what other processes hold, then with ``fill``.

    A shard that has the same parts as a held one is that one. Others are put together layer by layer, and what the old shards have of a
    layer is freed when nobody needs it any more; on accelerators, where arrays are stacks of layers, parameter by parameter. ``held`` has
    the new shards as well in the end; where this raises, what there is of both.

    Raises:
        MeshError: a dimension that the mesh does not divide, before anything is filled. Others: as ``peers.check`` and ``fill`` do.
    """
    shardings = {path: rules.sharding(mesh, info.logical_axes, info.shape) for path, info in parameters.items()}
    targets = {
        path: [
            _Target(info, region, Extent.of(info, region, names.experts_of(path)), devices)
            for region, devices in local_shards(info, shardings[path]).items()
        ]
        for path, info in parameters.items()
    }
    others = {} if peers is None else peers.inventories(held.inventory())
    work = _Work(held, peers, fill, advance, _usable(others, held.identity))
    for path, info in parameters.items():
        work.plan(path, info, targets[path])
    if peers is not None:
        peers.begin(work.wants)
    placed = {}
    for path, info in parameters.items():
        arrays = work.make(path, info, targets[path])
        placed[path] = jax.make_array_from_single_device_arrays(info.shape, shardings[path], arrays)
    return placed


@dataclass(eq=False)
class _Target:
    """A shard to be made, for these devices. like: the held shard that is the same."""

    info: ParameterInfo
    region: Box
    extent: Extent
    devices: list[jax.Device]
    like: HeldShard | None = None
    shard: HeldShard | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.region)

    def region_of(self, layer: int, slot: int, box: Box) -> tuple[slice, ...]:
        """Where a part lies in the parameter."""
        index = self.extent.index(layer, slot, box)
        return tuple(
            slice(part.start + start, part.stop + start) for part, (start, _) in zip(index, self.region, strict=True)
        )


@dataclass(eq=False)
class _Work:
    """Makes the shards of one process."""

    held: HeldWeights
    peers: Peers | None
    fill: Fill
    advance: Advance
    others: dict[int, dict[str, list[tuple[str, Extent]]]]
    wants: Wants = field(default_factory=dict)

    def plan(self, path: str, info: ParameterInfo, targets: Sequence[_Target]) -> None:
        """Find the shards that there are already, and whom to ask for what is not here."""
        held = self.held.shards(path)
        for target in targets:
            alike = [shard for shard in held if target.extent.is_like(shard.extent) and shard.is_there.all()]
            target.like = max(alike, key=lambda shard: len(shard.arrays.keys() & set(target.devices)), default=None)
        asked: set[Part] = set()
        for target in targets:
            if target.like is not None:
                continue
            for layer in range(target.extent.first_layer, target.extent.first_layer + target.extent.layers):
                for _, part in target.extent.parts(layer):
                    if part not in asked:
                        asked.add(part)
                        self._ask_for(path, info, part)

    def _ask_for(self, path: str, info: ParameterInfo, part: Part) -> None:
        """Divide what is not here of a part among the processes that have it, another one first for each part."""
        left = self.held.look_up(path, part)[1]
        ids = sorted(self.others)
        if not left or not ids:
            return
        turn = (part.layer + max(part.expert, 0)) % len(ids)
        shards = [
            (process, extent)
            for process in ids[turn:] + ids[:turn]
            for dtype, extent in self.others[process].get(path, ())
            if dtype == str(info.storage_dtype)
        ]
        for box in left:
            for process, _, piece in cover(Part(part.layer, part.expert, box), shards)[0]:
                layers = self.wants.setdefault(process, {}).setdefault(path, {})
                layers.setdefault(part.layer, []).append(Part(part.layer, part.expert, piece))

    def make(self, path: str, info: ParameterInfo, targets: Sequence[_Target]) -> list[Array]:
        """Make the arrays of a parameter on this process's devices, and free what is left of the old ones."""
        for target in targets:
            if target.like is not None:
                self._keep(path, target)
        rest = [target for target in targets if target.like is None]
        if self.held.is_on_host(targets[0].devices[0]) if targets else True:
            self._make_on_host(path, rest, targets)
        else:
            self._make_on_devices(path, rest, targets)
        return [target.shard.arrays[device] for target in targets for device in target.devices]

    def _keep(self, path: str, target: _Target) -> None:
        """Have a held shard for a target, without a copy where devices share their memory or have it already."""
        old = target.like
        arrays = {}
        for device in target.devices:
            array = old.arrays.get(device)
            if array is None:
                array = jax.device_put(old.values, device, may_alias=True)
                if not isinstance(old.values, np.ndarray):
                    self.held.counts.moved += old.values.nbytes
            arrays[device] = array
        self.held.counts.kept += old.values.nbytes
        self.advance(old.values.nbytes)
        target.shard = HeldShard(target.extent, old.values, arrays, np.ones(target.extent.layers, bool))
        self.held.add(path, target.shard)
        self.held.remove(path, old)

    def _make_on_host(self, path: str, targets: Sequence[_Target], all_targets: Sequence[_Target]) -> None:
        for target in targets:
            values = aligned_empty(target.shape, target.info.storage_dtype)
            target.shard = HeldShard(target.extent, values, {}, np.zeros(target.extent.layers, bool))
            self.held.add(path, target.shard)
        keeping, waiting = [target.shard for target in all_targets], []
        for layer in self._layers(path, all_targets):
            self._check()
            missing: dict[Part, np.ndarray] = {}
            there: dict[Part, tuple[HeldShard, int]] = {}
            unread: list[tuple[_Target, int, Part]] = []
            for target in targets:
                if not target.extent.first_layer <= layer < target.extent.first_layer + target.extent.layers:
                    continue
                for slot, part in target.extent.parts(layer):
                    if part in there:  # a second copy on this process
                        unread.append((target, slot, part))
                        continue
                    there[part] = target.shard, slot
                    self._copy(path, target, slot, part, missing)
            self._complete(path, targets, missing, there)
            for target, slot, part in unread:
                first, place = there[part]
                view = target.shard.values[target.extent.index(layer, slot, part.box)]
                view[...] = first.read(layer, place, part.box)
                self._count("moved", view.nbytes)
            for target in targets:
                if target.extent.first_layer <= layer < target.extent.first_layer + target.extent.layers:
                    target.shard.is_there[layer - target.extent.first_layer] = True
            waiting.append(layer)
            if len(waiting) > 1:
                self._give_back(path, waiting.pop(0), keeping)
        for target in targets:
            target.shard.values.flags.writeable = False
            for device in target.devices:
                target.shard.arrays[device] = jax.device_put(target.shard.values, device, may_alias=True)
        for layer in waiting:
            self._give_back(path, layer, keeping)

    def _copy(self, path: str, target: _Target, slot: int, part: Part, missing: dict[Part, np.ndarray]) -> None:
        """Copy what is here of a part, and note the views for what is not, by the part that they are."""
        pieces, left = self.held.look_up(path, part)
        extent, values = target.extent, target.shard.values
        for piece in pieces:
            view = values[extent.index(part.layer, slot, piece.box)]
            view[...] = piece.shard.read(part.layer, piece.slot, piece.box)
            self._count("moved", view.nbytes)
        for box in left:
            missing[Part(part.layer, part.expert, box)] = values[extent.index(part.layer, slot, box)]

    def _complete(
        self,
        path: str,
        targets: Sequence[_Target],
        missing: dict[Part, np.ndarray],
        there: Mapping[Part, tuple[HeldShard, int]],
    ) -> None:
        """Fill what is not here: from other processes, and what they do not give, from the checkpoint."""
        if not missing:
            return
        left = self._fetch(path, missing)
        slots = {id(target.shard): target for target in targets}
        runs: list[tuple[_Target, int, int, Part]] = []  # neighbouring slots are read together
        for part in left:
            whole = next(one for one in there if _is_within(part, one))
            shard, slot = there[whole]
            target = slots[id(shard)]
            last = runs[-1] if runs else None
            if last and last[0] is target and last[2] == slot and last[3].box == part.box:
                runs[-1] = (target, last[1], slot + 1, part)
            else:
                runs.append((target, slot, slot + 1, part))
        for target, start, stop, part in runs:
            first = target.extent.index(part.layer, start, part.box)
            region = target.region_of(part.layer, start, part.box)
            if target.extent.experts is not None:
                axis = int(target.extent.is_stacked)
                first = (*first[:axis], slice(start, stop), *first[axis + 1 :])
                offset = target.region[axis][0]
                region = (*region[:axis], slice(start + offset, stop + offset), *region[axis + 1 :])
            view = target.shard.values[first]
            self.fill(view, path, region)
            self._count("read", view.nbytes)

    def _fetch(self, path: str, missing: dict[Part, np.ndarray]) -> list[Part]:
        """Take from other processes what they were asked for; give the parts that are still missing."""
        layer = next(iter(missing)).layer
        if self.peers is None:
            return list(missing)
        done: dict[Part, list[Box]] = {}
        for process, paths in self.wants.items():
            parts, views = [], []
            for part in paths.get(path, {}).get(layer, ()):
                for whole, view in missing.items():
                    if _is_within(part, whole):
                        parts.append(part)
                        views.append(view[inside(part.box, whole.box, view.ndim)])
            if not parts:
                continue
            for part, view in list(zip(parts, views, strict=True))[: self.peers.fetch(process, path, parts, views)]:
                whole = next(one for one in missing if _is_within(part, one))
                done.setdefault(whole, []).append(part.box)
                self._count("received", view.nbytes)
        left = []
        for part in missing:
            boxes = [part.box]
            for got in done.get(part, ()):
                boxes = [rest for box in boxes for rest in _without(box, got)]
            left += [Part(part.layer, part.expert, box) for box in boxes]
        return left

    def _make_on_devices(self, path: str, targets: Sequence[_Target], all_targets: Sequence[_Target]) -> None:
        """Put shards together on their devices, as a host holds no second copy of them."""
        for target in targets:
            self._check()
            device = target.devices[0]
            values = _zeros(target.shape, target.info.storage_dtype, device)
            for layer in range(target.extent.first_layer, target.extent.first_layer + target.extent.layers):
                for slot, part in target.extent.parts(layer):
                    values = self._put_part(path, target, values, slot, part)
            arrays = {device: values} | {other: jax.device_put(values, other) for other in target.devices[1:]}
            jax.block_until_ready(list(arrays.values()))
            target.shard = HeldShard(target.extent, values, arrays, np.ones(target.extent.layers, bool))
            self.held.add(path, target.shard)
        keeping = [target.shard for target in all_targets]
        for layer in self._layers(path, all_targets):
            self._give_back(path, layer, keeping)

    def _put_part(self, path: str, target: _Target, values: Array, slot: int, part: Part) -> Array:
        pieces, left = self.held.look_up(path, part, target.devices[0])
        extent = target.extent
        for piece in pieces:
            moved = jax.device_put(piece.shard.read(part.layer, piece.slot, piece.box), target.devices[0])
            values = _write(values, moved, _starts(extent.index(part.layer, slot, piece.box)))
            self._count("moved", moved.nbytes)
        missing = {
            Part(part.layer, part.expert, box): np.empty(extent.piece_shape(box), target.info.storage_dtype)
            for box in left
        }
        unread = set(self._fetch(path, missing)) if missing else set()
        for whole, buffer in missing.items():
            for rest in [one for one in unread if _is_within(one, whole)]:
                view = buffer[inside(rest.box, whole.box, buffer.ndim)]
                self.fill(view, path, target.region_of(part.layer, slot, rest.box))
                self._count("read", view.nbytes)
            sent = jax.device_put(buffer, target.devices[0])
            values = _write(values, sent, _starts(extent.index(part.layer, slot, whole.box)))
        return values

    def _layers(self, path: str, targets: Sequence[_Target]) -> list[int]:
        """All layers of a parameter, of the new shards and of the old ones."""
        extents = [target.extent for target in targets] + [shard.extent for shard in self.held.shards(path)]
        return sorted({extent.first_layer + layer for extent in extents for layer in range(extent.layers)})

    def _give_back(self, path: str, layer: int, keeping: Sequence[HeldShard]) -> None:
        if self.peers is not None:
            self.peers.wait_until_taken(path, layer)
        self.held.give_back(path, layer, keeping)

    def _check(self) -> None:
        if self.peers is not None:
            self.peers.check()

    def _count(self, source: str, nbytes: int) -> None:
        setattr(self.held.counts, source, getattr(self.held.counts, source) + nbytes)
        self.advance(nbytes)


def _usable(
    others: Mapping[int, dict[str, Any]], identity: str | None
) -> dict[int, dict[str, list[tuple[str, Extent]]]]:
    """The inventories of processes that hold parts of this checkpoint in this form."""
    return {
        process: read_inventory(inventory)
        for process, inventory in others.items()
        if inventory.get("identity") == identity
    }


def _is_within(part: Part, whole: Part) -> bool:
    same = (part.layer, part.expert) == (whole.layer, whole.expert)
    return same and all(a >= c and b <= d for (a, b), (c, d) in zip(part.box, whole.box, strict=True))


def _without(box: Box, taken: Box) -> list[Box]:
    """A box without what it shares with another."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, taken, strict=True))
    return difference(box, common) if box_size(common) > 0 and all(a < b for a, b in common) else [box]


def _starts(index: Sequence[slice]) -> tuple[np.int32, ...]:
    return tuple(np.int32(part.start) for part in index)


@partial(jax.jit, donate_argnums=0)
def _write(values: Array, piece: Array, starts: tuple[np.int32, ...]) -> Array:
    return lax.dynamic_update_slice(values, piece, starts)


def _zeros(shape: tuple[int, ...], dtype: np.dtype, device: jax.Device) -> Array:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=SingleDeviceSharding(device))()
