"""A KV connector of one's own: evicted pages stay in the memory of this process, 64 of each kind and DP rank, and come back.

    dsjax serve --page-source kept_pages        # with this file's folder on PYTHONPATH

It assumes one process: on several hosts each process sees only the shards of its own devices.
"""

from __future__ import annotations

from functools import partial

import jax
import numpy as np

from dsjax.engine.contract.commands import WINDOW_NUMBERS, Custom, int32s
from dsjax.engine.device.access import DevicePart, Handler
from dsjax.engine.device.page_staging import PageStore, StagedPiece, cut, packed
from dsjax.engine.schedule.attachment import Attachment
from dsjax.engine.schedule.page_source import CommandTurn, PageLoad, PageSource
from dsjax.model.cache_groups import TABLES


class KeptPages(PageSource):
    """The bookkeeping, in the engine's thread: which page of a rank is in which slot. Window pages have slots of their own."""

    slots, slot_tier, tiers, keeps_windows = 64, "kept", ("kept",), True

    def bind(self, ranks):
        self.ranks, self.slot_of, self.stores = ranks, [{} for _ in ranks], [[] for _ in ranks]

    def begin_step(self, now):
        self.fresh = set()  # stored by this plan's commands, so only the next plan can load them

    def can_load(self, rank, name):
        return name in self.slot_of[rank] and (rank, name) not in self.fresh

    def load(self, rank, name):
        return PageLoad(self.slot_of[rank][name], "kept")

    def evict(self, rank, page, name):
        slots, first = self.slot_of[rank], WINDOW_NUMBERS if self.ranks[rank].pool.is_window(page) else 0
        if name in slots:
            return
        own = range(first, first + self.slots)
        if not (free := {*own} - {*slots.values()}):
            free = {slots.pop(next(old for old, slot in slots.items() if slot in own))}  # the slot of the oldest page
        slots[name] = min(free)
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
        self.device, self.shapes = device, {table: device.programs.described_moved(table) for table in TABLES}
        arrays = self.shapes["context"] | self.shapes["window"]
        self.memory = {key: np.zeros((a.shape[0], KeptPages.slots, *a.shape[2:]), a.dtype) for key, a in arrays.items()}
        staging.add(self)

    def register(self, table):
        table.add("kept", Handler(self.store))

    def store(self, pending, command):
        """Carry out the command "kept": (page, slot) pairs of each rank, before the step overwrites the pages."""
        first = {"context": 0, "window": self.device.limits.pages_per_rank}  # numbers of the pages of each kind
        stored = [np.frombuffer(own, "<i4").reshape(-1, 2) for own in command.ranks]
        for table in TABLES:
            own = [pairs[(pairs[:, 1] >= WINDOW_NUMBERS) == (table == "window")] for pairs in stored]
            for piece in cut(own, table):
                pages = self.device.send(packed([pairs[:, 0] - first[table] for pairs in piece], table))
                taken = self.device.programs.get("take pages", table)(self.device.state, pages)
                for key, array in taken.items():
                    for rank, pairs in enumerate(piece):
                        slots = pairs[:, 1] % WINDOW_NUMBERS
                        self.memory[key][rank, slots] = np.asarray(array)[rank, : len(slots)]
                yield next(iter(taken.values()))

    def take(self, wanted, places):
        """Give the pages at `places` of the `wanted` slots of each rank, in pieces; none come later."""
        pieces, ranks = [], list(zip(wanted, places, strict=True))
        for table in TABLES:
            own = [at[(slots[at] >= WINDOW_NUMBERS) == (table == "window")] for slots, at in ranks]
            pieces += [StagedPiece(at, partial(self.sent, table, wanted, at), table) for at in cut(own, table)]
        return pieces, [own[:0] for own in places]

    def sent(self, table, wanted, places):
        """Send a piece of the wanted pages to the devices."""
        arrays = {}
        for key, shape in self.shapes[table].items():
            values = np.zeros(shape.shape, shape.dtype)
            for rank, own in enumerate(places):
                values[rank, : len(own)] = self.memory[key][rank, wanted[rank][own] % WINDOW_NUMBERS]
            arrays[key] = jax.device_put(values, shape.sharding)
        return arrays


def attachment():
    """The engine plugin that carries the bookkeeping."""
    return Attachment(KeptPages())


def device_part(device, staging):
    """The part of each process that holds the values."""
    return KeptValues(device, staging)
