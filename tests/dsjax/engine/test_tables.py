"""Page tables on the host: always what the requests hold now, page 0 past their ends."""

import numpy as np
from dsjax.engine.tables import PageTables
from hypothesis import given
from hypothesis import strategies as st

from dsjax.engine.request import Request
from dsjax.engine.sampling_params import SamplingParams

SLOTS, MOST = 3, 5


def running(slot: int, pages: list[int], admissions: int = 1) -> Request:
    request = Request(f"in {slot}", [1], 1, SamplingParams(), 1, 0)
    request.slot, request.pages, request.admissions = slot, pages, admissions
    return request


def rows(tables, rank, *requests):
    return tables.rows(rank, list(requests)).tolist()


def test_rows_come_in_the_order_asked_for_with_page_0_past_the_end():
    tables = PageTables(2, SLOTS, MOST)
    a, b = running(2, [7, 3]), running(0, [4])
    assert rows(tables, 1, a, b) == [[7, 3, 0, 0, 0], [4, 0, 0, 0, 0]]
    assert rows(tables, 1, b, a) == [[4, 0, 0, 0, 0], [7, 3, 0, 0, 0]]
    assert tables.rows(1, [a]).dtype == np.int32


def test_pages_that_a_request_gains_are_entered():
    tables = PageTables(1, SLOTS, MOST)
    request = running(1, [9])
    assert rows(tables, 0, request) == [[9, 0, 0, 0, 0]]
    request.pages += [2]
    request.pages += [6]
    assert rows(tables, 0, request) == [[9, 2, 6, 0, 0]]


def test_a_slot_forgets_who_was_there_before():
    tables = PageTables(1, SLOTS, MOST)
    rows(tables, 0, running(1, [1, 2, 3, 4]))
    assert rows(tables, 0, running(1, [8])) == [[8, 0, 0, 0, 0]]


def test_a_preempted_request_that_comes_back_to_its_slot_brings_other_pages():
    tables = PageTables(1, SLOTS, MOST)
    request = running(1, [1, 2, 3])
    rows(tables, 0, request)
    request.pages, request.admissions = [5, 4, 7], 2
    assert rows(tables, 0, request) == [[5, 4, 7, 0, 0]]


def test_ranks_and_slots_are_apart():
    tables = PageTables(2, SLOTS, MOST)
    here, there, beside = running(1, [1, 2]), running(1, [3]), running(2, [4])
    assert rows(tables, 0, here) == [[1, 2, 0, 0, 0]]
    assert rows(tables, 1, there) == [[3, 0, 0, 0, 0]]
    assert rows(tables, 0, beside, here) == [[4, 0, 0, 0, 0], [1, 2, 0, 0, 0]]


@given(st.lists(st.tuples(st.integers(0, SLOTS - 1), st.sampled_from(["come", "grow", "return", "look"])), max_size=40))
def test_after_any_history_a_row_is_the_request_s_pages(history):
    tables, at, next_page = PageTables(1, SLOTS, MOST), {}, 1
    for slot, event in history:
        request = at.get(slot)
        if event == "come" or request is None:
            at[slot] = request = running(slot, [next_page])
        elif event == "grow" and len(request.pages) < MOST:
            request.pages.append(next_page)
        elif event == "return":
            request.pages, request.admissions = [next_page, next_page + 100], request.admissions + 1
        next_page += 1
        if event != "grow":  # pages may be gained twice between two looks
            assert rows(tables, 0, request) == [request.pages + [0] * (MOST - len(request.pages))]
