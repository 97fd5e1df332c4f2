"""Which part of an executor carries out which command, and how pages from stores are staged and placed."""

from types import SimpleNamespace

import numpy as np
import pytest

from dsjax.engine.contract.commands import Custom, FetchPages, Flush, PlacePages, ReadPages, int32s
from dsjax.engine.device.access import CommandTable, Handler, Pending
from dsjax.engine.device.device_state import MOVED_PAGES
from dsjax.engine.device.page_staging import PageStaging, PageStore, StagedPiece, cut, packed


def nothing(pending: Pending, command):
    yield from ()


class Slots(PageStore):
    """A store that has the pages of some numbers, whose values are 1,000 times the rank and the number."""

    def __init__(self, numbers):
        self.numbers, self.forgotten = set(numbers), []

    def take(self, wanted, places):
        here = [
            np.array([at for at in own if wanted[rank][at] in self.numbers], int) for rank, own in enumerate(places)
        ]
        rest = [
            np.array([at for at in own if wanted[rank][at] not in self.numbers], int) for rank, own in enumerate(places)
        ]
        values = [[1000 * rank + wanted[rank][at] for at in own] for rank, own in enumerate(here)]
        pieces = [StagedPiece(piece, lambda: {"latent": values}) for piece in cut(here)] if any(map(len, here)) else []
        return pieces, rest

    def forget(self, rank, number):
        self.forgotten.append((rank, number))


class ReadingSlots(Slots):
    """A store that can also be asked for pages by their names."""

    def __init__(self, numbers):
        super().__init__(numbers)
        self.asked = []

    def read(self, rank, number, name):
        self.asked.append((rank, number, name))


class PageWrites:
    """Takes the place of a `DeviceAccess`: its state is the list of what was written to which pages."""

    def __init__(self):
        self.state = SimpleNamespace(start=None, written=[])
        self.programs = SimpleNamespace(put_pages=lambda: self._put)

    def send(self, array):
        return array

    def _put(self, state, staged, pages):
        return SimpleNamespace(start=None, written=[*state.written, (staged["latent"], pages)])


def staged_table(*stores):
    device, table = PageWrites(), CommandTable()
    staging = PageStaging(device)
    for store in stores:
        staging.add(store)
    staging.register(table)
    return device, table


def carry_out(table, command):
    list(table.launch(command).running)


def test_a_command_is_carried_out_by_the_part_that_registered_its_kind():
    table, carried_out = CommandTable(), []
    table.add(Flush, Handler(lambda pending, command: iter(carried_out.append(command) or ())))
    table.add_custom("kept", Handler(nothing))
    pending = table.launch(Flush())
    assert carried_out == [pending.command] == [Flush()]
    assert table.launch(Custom("kept", [])).handler.execute is nothing


def test_two_parts_cannot_carry_out_the_same_kind_of_command():
    table = CommandTable()
    table.add(Flush, Handler(nothing))
    table.add_custom("kept", Handler(nothing))
    with pytest.raises(ValueError, match="two parts of the executor carry out Flush, expected one"):
        table.add(Flush, Handler(nothing))
    with pytest.raises(ValueError, match="two parts of the executor carry out commands of 'kept', expected one"):
        table.add_custom("kept", Handler(nothing))


@pytest.mark.parametrize(
    ("command", "what"),
    [(Flush(), "Flush"), (Custom("kept", []), "commands of 'kept'"), (ReadPages([], [], []), "ReadPages")],
)
def test_a_command_that_no_part_carries_out_is_refused_by_its_name(command, what):
    with pytest.raises(
        ValueError,
        match=f"no part of this executor carries out {what}; it was made without the option that asks for it",
    ):
        CommandTable().launch(command)


@pytest.mark.parametrize("command", [FetchPages([b""], 1), PlacePages([b""], 1), ReadPages([b""], [b""], [b""])])
def test_without_a_page_store_no_command_that_brings_pages_is_carried_out(command):
    _, table = staged_table()
    with pytest.raises(ValueError, match=f"no part of this executor carries out {type(command).__name__}"):
        table.launch(command)


def test_pages_of_several_stores_are_written_to_the_pages_that_the_command_names_for_them():
    device, table = staged_table(Slots({1, 3}), Slots({2, 7}))
    carry_out(table, FetchPages([int32s([1, 2, 3]), int32s([7])], 1))
    carry_out(table, PlacePages([int32s([11, 12, 13]), int32s([17])], 1))
    (first, first_pages), (second, second_pages) = device.state.written
    assert first == [[1, 3], []]
    np.testing.assert_array_equal(first_pages, packed([np.array([11, 13]), np.array([], int)]))
    assert second == [[2], [1007]]
    np.testing.assert_array_equal(second_pages, packed([np.array([12]), np.array([17])]))
    assert first_pages.shape == (2, MOVED_PAGES)


def test_a_page_that_no_store_has_is_refused_before_anything_is_staged():
    device, table = staged_table(Slots({1}), Slots({2}))
    message = r"FetchPages names the pages \[5, 6\] of rank 1, which no page store of this executor has"
    with pytest.raises(ValueError, match=message):
        table.launch(FetchPages([int32s([1, 2]), int32s([5, 2, 6])], 1))
    carry_out(table, PlacePages([int32s([11, 12]), int32s([15, 16, 17])], 1))
    assert device.state.written == []


def test_pages_are_read_by_the_store_that_can_and_dropped_from_each():
    plain, reading = Slots({1}), ReadingSlots({2})
    _, table = staged_table(plain, reading)
    names = [b"a" * 32 + b"b" * 32, b"c" * 32]
    carry_out(table, ReadPages([int32s([4, 5]), int32s([6])], names, [b"", int32s([8, 9])]))
    assert reading.asked == [(0, 4, b"a" * 32), (0, 5, b"b" * 32), (1, 6, b"c" * 32)]
    assert plain.forgotten == reading.forgotten == [(1, 8), (1, 9)]


def test_where_no_store_reads_pages_can_be_dropped_and_a_request_to_read_is_refused():
    slots = Slots({1})
    _, table = staged_table(slots)
    carry_out(table, ReadPages([b""], [b""], [int32s([3])]))
    assert slots.forgotten == [(0, 3)]
    with pytest.raises(ValueError, match="ReadPages asks for pages by their names, and no page store of this executor"):
        table.launch(ReadPages([int32s([4])], [b"a" * 32], [b""]))
