"""Pages that were sent ahead are placed where a command says, from the first store that has them. Also tests `device/access.py`."""

from types import SimpleNamespace

import numpy as np
import pytest

from dsjax.engine.contract.commands import NAME_BYTES, FetchPages, PlacePages, ReadPages, int32s
from dsjax.engine.device.access import CommandTable
from dsjax.engine.device.device_state import MOVED_PAGES
from dsjax.engine.device.page_staging import PageStaging, PageStore, StagedPiece, cut, packed


class Numbered(PageStore):
    """Has the pages of some numbers, and makes each piece an array of its ranks' numbers."""

    def __init__(self, numbers):
        self.numbers, self.forgotten = numbers, []

    def take(self, wanted, places):
        taken = [own[np.isin(numbers[own], self.numbers)] for numbers, own in zip(wanted, places, strict=True)]
        left = [own[~np.isin(numbers[own], self.numbers)] for numbers, own in zip(wanted, places, strict=True)]
        layout = [np.pad(own, (0, 3 - len(own)), constant_values=-1) for own in taken]
        numbers = [np.where(own < 0, -1, of[own]) for own, of in zip(layout, wanted, strict=True)]
        return [StagedPiece(layout, lambda: {"page": np.array(numbers)})], left

    def forget(self, rank, number):
        self.forgotten.append((rank, number))


def staging(ranks: int, *stores):
    """Return, for each rank, a dict from a placed page to the number that was staged for it, and a function that executes a command."""
    tables, commands = [{} for _ in range(ranks)], CommandTable()

    def put(state, staged, pages):
        for table, numbers, places in zip(tables, staged["page"], pages, strict=True):
            table |= {int(page): int(number) for number, page in zip(numbers, places, strict=False) if page}
        return state

    state, limits = SimpleNamespace(slots="placed"), SimpleNamespace(pages_per_rank=100)
    programs = SimpleNamespace(get=lambda *key: put)
    pages = PageStaging(SimpleNamespace(state=state, limits=limits, programs=programs, send=lambda array: array))
    for store in stores:
        pages.add(store)
    pages.register(commands)
    return tables, lambda command: list(commands[type(command)].execute(None, command))


def ranks_of(*numbers):
    return [int32s(own) for own in numbers]


def test_each_page_comes_from_the_store_that_has_it_to_the_place_that_its_rank_names():
    tables, run = staging(2, Numbered([5, 6]), Numbered([70, 71]))
    run(FetchPages(ranks_of([70, 5, 71], [6]), 1))
    run(PlacePages(ranks_of([11, 12, 13], [14]), 1))
    assert tables == [{11: 70, 12: 5, 13: 71}, {14: 6}]


def test_what_was_staged_before_the_pages_that_are_placed_is_dropped_and_what_came_later_waits():
    tables, run = staging(1, Numbered([5, 6, 7]))
    for number in (1, 2, 3):
        run(FetchPages(ranks_of([number + 4]), number))
    run(PlacePages(ranks_of([12]), 2))
    run(PlacePages(ranks_of([11]), 1))  # its step was given up
    run(PlacePages(ranks_of([13]), 3))
    assert tables == [{12: 6, 13: 7}]


def test_pages_to_be_read_are_asked_for_by_rank_number_and_name_and_others_forgotten_everywhere():
    stores = Numbered([]), Numbered([])
    _, run = staging(2, *stores)
    asked = []
    stores[1].read = lambda *page: asked.append(page)
    first, second = b"a" * NAME_BYTES, b"b" * NAME_BYTES
    run(ReadPages(ranks_of([], [8, 9]), [b"", first + second], ranks_of([4], [])))
    assert asked == [(1, 8, first), (1, 9, second)]
    assert [store.forgotten for store in stores] == [[(0, 4)]] * 2


@pytest.mark.parametrize("command", [FetchPages([b""], 1), PlacePages([b""], 1), ReadPages([b""], [b""], [b""])])
def test_without_a_page_store_no_command_that_brings_pages_is_carried_out(command):
    _, run = staging(1)
    with pytest.raises(ValueError, match=f"no part of this executor carries out {type(command).__name__}"):
        run(command)


def test_a_page_that_no_store_has_is_refused_before_anything_is_staged():
    tables, run = staging(2, Numbered([1]), Numbered([2]))
    message = r"FetchPages names the pages \[5, 6\] of rank 1, which no page store of this executor has"
    with pytest.raises(ValueError, match=message):
        run(FetchPages(ranks_of([1, 2], [5, 2, 6]), 1))
    run(PlacePages(ranks_of([11, 12], [15, 16, 17]), 1))
    assert tables == [{}, {}]


def test_where_no_store_reads_pages_can_be_dropped_and_a_request_to_read_is_refused():
    store = Numbered([1])
    _, run = staging(1, store)
    run(ReadPages([b""], [b""], ranks_of([3])))
    assert store.forgotten == [(0, 3)]
    with pytest.raises(ValueError, match="ReadPages asks for pages by their names, and no page store of this executor"):
        run(ReadPages(ranks_of([4]), [b"a" * NAME_BYTES], [b""]))


def test_pages_are_packed_with_nothing_behind_them_and_cut_into_what_a_program_moves():
    pairs = np.array([[3, 90], [4, 91]])
    table = packed([np.array([7]), pairs])
    assert table.shape == (2, MOVED_PAGES)
    assert [row[row > 0].tolist() for row in table] == [[7], [3, 4]]
    long, short = np.arange(MOVED_PAGES + 2), np.arange(1)
    assert [[len(own) for own in part] for part in cut([long, short])] == [[MOVED_PAGES, 1], [2, 0]]
