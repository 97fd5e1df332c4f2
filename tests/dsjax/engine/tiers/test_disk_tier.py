"""The table of what is on the disk: pages that have been written, room that is never exceeded, and a disk that fails."""

from dsjax.engine.contract.backoff import FIRST_SECONDS
from dsjax.engine.tiers.disk_tier import MOST_WRITING, DiskTier


def tier_of(pages, **left):
    """left: pages of an earlier run, with the room that each takes."""
    tier = DiskTier(pages)
    tier.listed({name.encode(): room for name, room in left.items()})
    return tier


def written(tier, *names, ok=True, now=0.0):
    numbers = [tier.write(name) for name in names]
    assert all(number >= 0 for number in numbers)
    for number in numbers:
        tier.written(number, ok, now)


def test_a_page_is_found_on_the_disk_when_it_has_been_written_and_only_then():
    tier = DiskTier(4)
    assert tier.write(b"a") == -1, "what an earlier run left is not known yet"
    tier.listed({})
    number = tier.write(b"a")
    assert b"a" not in tier
    assert tier.write(b"a") == -1, "it is on its way"
    tier.written(number, True, 0.0)
    assert b"a" in tier
    assert tier.counts()[:6] == (1, 4, 1, 0, 0, 0)


def test_the_disks_room_is_never_exceeded_and_what_was_asked_for_stays():
    tier = tier_of(4, old=1, new=1)
    written(tier, b"a")
    tier.fetch(b"old")
    written(tier, b"b", b"c")
    assert tier.take_dropped() == (False, [b"new"])
    written(tier, b"d")
    assert tier.take_dropped() == (False, [b"a"])
    assert [name for name in (b"old", b"new", b"a", b"b", b"c", b"d") if name in tier] == [b"old", b"b", b"c", b"d"]
    smaller = tier_of(1, old=1, new=1)
    assert b"new" in smaller
    assert smaller.take_dropped() == (False, [b"old"])


def test_a_page_that_is_forgotten_while_it_is_written_is_deleted_and_never_found():
    tier = tier_of(4)
    for forget, dropped in ((lambda: tier.forget([b"a"]), (False, [b"a"])), (tier.flush, (True, []))):
        number = tier.write(b"a")
        forget()
        tier.written(number, True, 0.0)
        assert b"a" not in tier
        assert tier.take_dropped() == dropped


def test_a_disk_that_cannot_be_written_is_left_alone_for_longer_and_longer():
    tier = tier_of(1000, old=1)
    written(tier, b"a", b"b", ok=False, now=10.0)
    tier.begin_step(10.0 + FIRST_SECONDS / 2)
    assert tier.write(b"c") == -1
    assert b"old" in tier, "it can still be read"
    tier.begin_step(10.0 + FIRST_SECONDS)
    written(tier, b"c", ok=False, now=20.0)
    tier.begin_step(20.0 + 1.5 * FIRST_SECONDS)
    assert tier.write(b"d") == -1
    tier.begin_step(20.0 + 2 * FIRST_SECONDS)
    written(tier, b"d", now=30.0)
    written(tier, b"e", ok=False, now=40.0)
    tier.begin_step(40.0 + FIRST_SECONDS)
    assert all(tier.write(f"page {n}".encode()) >= 0 for n in range(MOST_WRITING))
    assert tier.write(b"one too many") == -1


def test_a_page_that_takes_the_room_of_several_is_written_where_so_much_can_be_freed():
    tier = tier_of(5, large=3, small=1)
    assert tier.counts().used_pages == 4
    number = tier.write(b"other", 3)
    assert tier.take_dropped() == (False, [b"large"])
    assert tier.write(b"more", 3) == -1, "what is being written cannot be freed, and the small page has too little"
    tier.written(number, True, 0.0)
    assert (tier.counts().used_pages, b"other" in tier) == (3, True)
    tier.forget([b"other"])
    assert tier.counts().used_pages == 0
