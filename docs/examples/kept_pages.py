"""A KV connector of one's own: evicted pages stay in the memory of this process, 64 of each DP rank, and come back.

    dsjax serve --page-source kept_pages        # with this file's folder on PYTHONPATH

It assumes one process: on several hosts each process sees only the shards of its own devices.
"""

from __future__ import annotations

import jax
import numpy as np

from dsjax.engine.contract.commands import Custom, int32s
from dsjax.engine.device.access import DevicePart, Handler
from dsjax.engine.device.page_staging import PageStore, StagedPiece, cut, packed
from dsjax.engine.schedule.attachment import Attachment
from dsjax.engine.schedule.page_source import CommandTurn, PageLoad, PageSource


class KeptPages(PageSource):
    """The bookkeeping, in the engine's thread: which page of a rank is in which slot."""

    slots, slot_tier, tiers = 64, "kept", ("kept",)

    def bind(self, ranks):
        self.ranks, self.slot_of, self.stores = ranks, [{} for _ in ranks], [[] for _ in ranks]

    def begin_step(self, now):
        self.fresh = set()  # stored by this plan's commands, so only the next plan can load them

    def can_load(self, rank, name):
        return name in self.slot_of[rank] and (rank, name) not in self.fresh

    def load(self, rank, name):
        return PageLoad(self.slot_of[rank][name], "kept")

    def evict(self, rank, page, name):
        slots = self.slot_of[rank]
        if name in slots:
            return
        if len(slots) == self.slots:
            slots[name] = slots.pop(next(iter(slots)))  # the slot of the oldest page
        else:
            slots[name] = min({*range(self.slots)} - {*slots.values()})
        self.fresh.add((rank, name))
        self.stores[rank] += (page, slots[name])

    def forget(self, rank, names):
        self.slot_of[rank] = {name: slot for name, slot in self.slot_of[rank].items() if name not in names}

    def clear(self, rank):
        self.slot_of[rank], self.stores[rank] = {}, []

    invalidate = clear

    def commands(self):
        if any(self.stores):
            yield CommandTurn.STORE, Custom("kept", [int32s(own) for own in self.stores])
        self.stores = [[] for _ in self.ranks]


class KeptValues(DevicePart, PageStore):
    """The values, on the host: copies pages off the devices into slots, and sends slots back."""

    def __init__(self, device, staging):
        self.device, self.shapes = device, device.programs.described_moved()
        self.memory = {
            key: np.zeros((a.shape[0], KeptPages.slots, *a.shape[2:]), a.dtype) for key, a in self.shapes.items()
        }
        staging.add(self)

    def register(self, table):
        table.add("kept", Handler(self.store))

    def store(self, pending, command):
        """Carry out the command "kept": (page, slot) pairs of each rank, before the step overwrites the pages."""
        for piece in cut([np.frombuffer(own, "<i4").reshape(-1, 2) for own in command.ranks]):
            taken = self.device.programs.get("take pages", "context")(
                self.device.state, self.device.send(packed(piece))
            )
            for key, array in taken.items():
                for rank, pairs in enumerate(piece):
                    self.memory[key][rank, pairs[:, 1]] = np.asarray(array)[rank, : len(pairs)]
            yield next(iter(taken.values()))

    def take(self, wanted, places):
        """Give the pages at `places` of the `wanted` slots of each rank, in pieces; none come later."""
        return [StagedPiece(at, lambda at=at: self.sent(wanted, at)) for at in cut(places)], [own[:0] for own in places]

    def sent(self, wanted, places):
        """Send a piece of the wanted pages to the devices."""
        arrays = {}
        for key, shape in self.shapes.items():
            values = np.zeros(shape.shape, shape.dtype)
            for rank, own in enumerate(places):
                values[rank, : len(own)] = self.memory[key][rank, wanted[rank][own]]
            arrays[key] = jax.device_put(values, shape.sharding)
        return arrays


def attachment():
    """The engine plugin that carries the bookkeeping."""
    return Attachment(KeptPages())


def device_part(device, staging):
    """The part of each process that holds the values."""
    return KeptValues(device, staging)
