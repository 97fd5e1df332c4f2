"""Attention and experts in turn: schedules that can be told by hand."""

import itertools
from dataclasses import replace

import pytest

from dsjax.plan.moves import AfdExchange
from dsjax.plan.turns import ATTENTION, EXPERTS, HOST, LayerTimes, simulate_layers

EXCHANGE = AfdExchange(there=2, back=2)
LAYER = LayerTimes(attend=3, share=1, receive=1, compute=4, exchange=EXCHANGE)


def test_one_batch_takes_every_part_but_what_is_computed_while_its_rows_are_away():
    played = simulate_layers([LAYER], 5)
    assert played.seconds == 5 * (3 + 2 + 4 + 2 + 1)  # the shared experts' second is hidden
    assert played.busy[ATTENTION] == 5 * (3 + 1 + 1)


def test_two_batches_hide_each_others_way_and_the_busier_side_counts():
    one, two, three = (simulate_layers([LAYER] * n, 60) for n in (1, 2, 3))
    assert one.seconds == 60 * 12
    # A batch of a layer takes 12 from attention to attention, in which two of them fit: neither side is then busy all the time.
    assert two.seconds / 120 == pytest.approx(6, rel=0.02)
    assert three.seconds / 180 == pytest.approx(5, rel=0.02)  # attention is busy throughout
    assert three.busy[ATTENTION] / three.seconds > 0.98
    assert three.busy[EXPERTS] == 60 * 3 * 4


def test_a_host_that_starts_everything_bounds_what_both_sides_do():
    slow = LAYER._replace(exchange=replace(EXCHANGE, launch=2, begin_there=3, begin_back=3))
    played = simulate_layers([slow] * 3, 40)
    assert played.seconds / 120 == pytest.approx(4 * 2 + 3 + 3, rel=0.05)
    assert played.busy[HOST] / played.seconds > 0.95


def test_calls_over_one_connection_follow_each_other():
    call = LAYER._replace(exchange=replace(EXCHANGE, one_call=True))
    alone, called = (simulate_layers([one] * 2, 40).seconds / 80 for one in (LAYER, call))
    # Way there, experts and way back are one call.
    assert (alone, called) == pytest.approx((6, 2 + 4 + 2), rel=0.02)


def test_the_spans_of_a_thread_never_overlap():
    exchange = replace(EXCHANGE, launch=0.5, begin_there=0.2, begin_back=0.1)
    played = simulate_layers([LAYER._replace(exchange=exchange)] * 3, 7)
    for thread in played.busy:
        spans = sorted((span.begin, span.end) for span in played.spans if span.thread == thread)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
