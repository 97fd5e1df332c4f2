"""Pages that leave the devices are waited for only by those who need them."""

from types import SimpleNamespace
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from fake_executor import SIZES

from dsjax.engine.contract.commands import StorePages, int32s
from dsjax.engine.contract.executor import ExecutorLimits
from dsjax.engine.device.access import CommandTable
from dsjax.engine.device.page_staging import PageStaging
from dsjax.engine.tiers.offloaded_pages import OffloadedPages


class Leaving:
    """An array of pages on its way from the devices to the host."""

    shape = (2, 64, 2, 4, 6)

    def __init__(self, value: int):
        self.has_come = False
        self._shards = [SimpleNamespace(index=(slice(0, 2), slice(None)), data=np.full(self.shape, value))]

    def copy_to_host_async(self):
        pass

    def is_ready(self):
        return self.has_come

    @property
    def addressable_shards(self):
        self.has_come = True  # whoever reads it has waited for it
        return self._shards


def offloaded(arrays, disk=None):
    """Return `OffloadedPages` that get these arrays one after the other, and a function that has two ranks store pages."""
    described, taken = {"latent": jax.ShapeDtypeStruct(Leaving.shape, np.int64)}, iter(arrays)
    device = Mock(limits=ExecutorLimits(**SIZES | {"num_ranks": 2, "host_pages_per_rank": 8}))
    device.programs.described_moved = lambda table: described if table == "context" else {}
    device.programs.get = lambda *key: lambda *_: {"latent": next(taken)}
    pages, table = OffloadedPages(device, PageStaging(device), disk), CommandTable()
    pages.register(table)

    def store(*ranks, **names):
        list(table[StorePages].execute(None, StorePages([int32s(own) for own in ranks], **names)))

    return pages, store


@pytest.fixture
def leaving():
    """(pages of host memory that are on their way there, each of its own slot; the `OffloadedPages`)."""
    arrays = [Leaving(value) for value in range(3)]
    pages, store = offloaded(arrays)
    for slot in range(3):
        store([1, slot, -1], [1, 7 - slot, -1])
    return arrays, pages


def test_a_page_goes_to_the_disk_from_its_rank_and_place_and_whole_though_several_devices_have_parts_of_it():
    written = {}
    write = lambda number, name, page: written.update({(number, name): page["latent"]})  # noqa: E731
    disk = SimpleNamespace(write=write, read=None, close=lambda: None)
    left, values = Leaving(0), np.arange(np.prod(Leaving.shape)).reshape(Leaving.shape)
    index = slice(0, 2), slice(None)
    parts = [
        SimpleNamespace(index=(*index, at, slice(None)), data=values[:, :, at]) for at in (slice(0, 1), slice(1, 2))
    ]
    left._shards = [parts[0], *parts]  # two devices have the first one
    pages, store = offloaded([left], lambda shapes, windows: disk)
    first, second, third = (bytes([number]) * 32 for number in range(3))
    store([5, 0, 7, 6, -1, 8], [4, 0, -1, 3, 1, 9], names=[first + second, third])
    pages.close()
    places = {(7, first): (0, 0), (8, second): (0, 1), (9, third): (1, 1)}
    assert written.keys() == places.keys()
    assert all(np.array_equal(written[key], values[place]) for key, place in places.items())
    assert np.array_equal(pages._memory["latent"][0, 0], values[0, 0])
    assert np.array_equal(pages._memory["latent"][1, :2], values[1, :2])


@pytest.mark.parametrize(
    ("slots", "waited"),
    [
        (([1], []), [True, True, False]),  # what left before comes first
        (([], [5]), [True, True, True]),
        (([4], [0]), [False, False, False]),
        (([], []), [False, False, False]),
    ],
)
def test_a_load_waits_for_the_pages_of_its_own_slots_and_for_none_that_left_later(leaving, monkeypatch, slots, waited):
    arrays, pages = leaving
    monkeypatch.setattr(jax, "make_array_from_callback", lambda shape, sharding, make: None)
    places = [np.arange(len(own), dtype=np.int32) for own in slots]
    pieces, _ = pages.take([np.array(own, np.int32) for own in slots], places)
    for piece in pieces:
        piece.send()
    assert [array.has_come for array in arrays] == waited
    for rank, own in enumerate(slots):
        for slot in own:
            written = slot if rank == 0 else 7 - slot
            expected = written if written < 3 else 0
            assert (pages._memory["latent"][rank, slot] == expected).all()
