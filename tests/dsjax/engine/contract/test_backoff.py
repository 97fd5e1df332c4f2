"""What failed is left alone for longer and longer, and for the shortest time again once it has done its work."""

from dsjax.engine.contract.backoff import FIRST_SECONDS, LONGEST_SECONDS, Backoff


def test_what_fails_again_is_left_alone_twice_as_long_up_to_a_minute():
    backoff, now, waits = Backoff(), 0.0, []
    assert not backoff.holds(now)
    for _ in range(9):
        backoff.begin(now)
        waits.append(next(n for n in range(1, 1000) if not backoff.holds(now + n)))
        now += waits[-1]
    assert waits == [FIRST_SECONDS, 2, 4, 8, 16, 32, LONGEST_SECONDS, LONGEST_SECONDS, LONGEST_SECONDS]


def test_what_fails_while_it_is_left_alone_was_begun_before_and_makes_that_no_longer():
    backoff = Backoff()
    for _ in range(3):
        backoff.begin(10.0)
    assert backoff.holds(10.0 + 0.99 * FIRST_SECONDS)
    assert not backoff.holds(10.0 + FIRST_SECONDS)


def test_after_work_that_was_done_it_begins_with_the_shortest_time():
    backoff = Backoff()
    backoff.begin(0.0)
    backoff.begin(5.0)
    assert backoff.holds(5.0 + 1.5 * FIRST_SECONDS)
    backoff.end()
    backoff.begin(50.0)
    assert not backoff.holds(50.0 + FIRST_SECONDS)
