"""The pool of pages: which are given out first, and which is found of several with the same tokens."""

import pytest

from dsjax.engine.schedule.pages import PagePool


def test_pages_without_content_are_given_out_before_cached_ones_and_those_from_the_end_of_the_oldest_chain():
    pool = PagePool(7, 4)
    old, new = pool.allocate(2), pool.allocate(2)
    for page, name in zip(old + new, (b"old 0", b"old 1", b"new 0", b"new 1"), strict=True):
        pool.seal(page, name)
    pool.release(old)
    pool.release(new)
    assert (pool.num_free, pool.num_cached, pool.num_used) == (6, 4, 0)
    pool.allocate(2)
    assert pool.num_cached == 4
    pool.hold(pool.find([b"old 0"]))
    pool.release(pool.find([b"old 0"]))  # used just now
    evicted = []
    while pool.num_cached:
        before = set(pool._page_of)
        pool.allocate(1)
        evicted += before - set(pool._page_of)
    assert evicted == [b"old 1", b"new 1", b"new 0", b"old 0"]


def test_of_two_pages_with_the_same_tokens_the_first_is_found():
    pool = PagePool(4, 4)
    first, second = pool.allocate(2)
    pool.seal(first, b"same")
    pool.seal(second, b"same")
    assert pool.find([b"same"]) == [first]
    pool.release([second])
    assert (pool.num_cached, pool.num_free) == (0, 2)


def test_a_page_given_back_twice_is_a_fault():
    pool = PagePool(4, 16)
    pages = pool.allocate(2)
    pool.release(pages)
    for wrong in ([pages[0]], [0]):
        with pytest.raises(ValueError, match="given back"):
            pool.release(wrong)
