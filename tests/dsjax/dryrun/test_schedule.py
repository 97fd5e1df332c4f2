"""Schedules of hand-made programs, whose times can be told with a pencil; and what holds for every schedule."""

import itertools
from fractions import Fraction

from hlo_text import computation
from hlo_text import program_of as entry
from hypothesis import given, settings
from hypothesis import strategies as st

from dsjax.dryrun.program import COMPUTE, OperationCost, play, program_collectives

MESH = {"dp": 2, "ep": 1, "tp": 4}
ALONG = {"tp": "[2,4]<=[8]", "dp": "[4,2]<=[2,4]T(1,0)"}


class Named:
    """Seconds by the operation's name; a collective along ``tp`` is on the link X, along ``dp`` on Y."""

    def __init__(self, turn=0, **seconds):
        self.seconds, self.each = seconds, turn

    def operation(self, program, computation, operation):
        return OperationCost(self.seconds.get(operation.name, 0))

    def transfer(self, collective):
        return {{("tp",): "X", ("dp",): "Y"}[collective.axes]: OperationCost(self.seconds[collective.name])}

    def copy(self, computation, operation):
        return {"copies": OperationCost(self.seconds[operation.name])}

    def loop_overhead(self, loop, known):
        return OperationCost(0 if known else self.each)


def compute(name, of="x"):
    return f"%{name} = f32[8]{{0}} negate(%{of})"


def start(name, axis):
    return f"%{name} = f32[8]{{0}} all-reduce-start(%x), channel_id=1, replica_groups={ALONG[axis]}"


def done(name):
    return f"%{name}.done = f32[8]{{0}} all-reduce-done(%{name})"


def played(text, trip_count=lambda loop: None, **seconds):
    collectives = program_collectives(text, MESH, host_devices=4, trip_count=trip_count)
    return play(text, Named(**seconds), collectives, trip_count)


def path(schedule):
    return [schedule.spans[index].operation.name for index in schedule.critical_path()]


def busy(schedule, thread):
    return sum(span.seconds for span in schedule.spans if span.thread == thread)


PARAMETER = "%x = f32[8]{0} parameter(0)"
SECONDS = {"a": 1, "g": 4, "b": 2, "h": 5, "c": 1, "d": 1, "e": 1}


def two(first, second):
    return entry(
        PARAMETER, compute("a"), start("g", first), compute("b"), start("h", second), compute("c"), done("g"),
        compute("d"), done("h"), compute("e"),
    )  # fmt: skip


def test_transfers_on_two_links_overlap_each_other_and_what_stands_between_and_on_one_link_follow_each_other():
    found = played(two("tp", "dp"), **SECONDS)
    times = {span.operation.name: (span.begin, span.end) for span in found.spans}
    assert times == {"a": (0, 1), "g": (1, 5), "b": (1, 3), "h": (3, 8), "c": (3, 4), "d": (5, 6), "e": (8, 9)}
    assert (found.seconds, path(found)) == (9, ["a", "b", "h", "e"])
    assert busy(found, COMPUTE) == 6  # so that three seconds of the network are exposed
    found = played(two("tp", "tp"), **SECONDS)
    assert (found.seconds, path(found)) == (1 + 4 + 5 + 1, ["a", "g", "h", "e"])


def test_a_synchronous_collective_stops_the_compute_thread():
    sync = f"%g = f32[8]{{0}} all-reduce(%x), channel_id=1, replica_groups={ALONG['tp']}"
    found = played(entry(PARAMETER, compute("a"), sync, compute("b", "g")), a=1, g=4, b=2)
    assert (found.seconds, path(found)) == (7, ["a", "g", "b"])


CONDITION = computation("condition", "%t = f32[8]{0} parameter(0)", "ROOT %less = pred[] compare(%t, %t), direction=LT")


def loop(*lines, count=None):
    known = f', backend_config={{"known_trip_count":{{"n":"{count}"}}}}' if count else ""
    line = f"%w = f32[8]{{0}} while(%x), condition=%condition, body=%body{known}"
    return line, CONDITION + computation("body", PARAMETER, *lines)


def test_loops_with_transfers_are_played_turn_by_turn_and_one_from_before_delays_the_first_turn_only():
    line, body = loop(compute("a"), start("g", "tp"), compute("b"), done("g"), compute("c"), count=3)
    found = played(entry(PARAMETER, line, compute("e"), others=body), a=1, g=4, b=2, c=1, e=1, less=100)
    assert found.seconds == 3 * (1 + 4 + 1) + 1  # the count is known: the condition is not looked at
    assert [(one.index, one.times, one.begin, one.end) for one in found.iterations] == [
        (0, 3, 0, 6), (1, 3, 6, 12), (2, 3, 12, 18),
    ]  # fmt: skip
    assert path(found) == ["a", "g", "c"] * 3 + ["e"]
    line, body = loop(start("g", "tp"), compute("b"), done("g"), count=3)
    found = played(entry(PARAMETER, start("h", "tp"), line, done("h"), others=body), h=10, g=2, b=2)
    assert [one.end for one in found.iterations] == [12, 14, 16]


def test_a_loop_without_transfers_is_one_span_however_long_it_is():
    line, body = loop(compute("a"), compute("b"))
    found = played(entry(PARAMETER, line, others=body), lambda loop: 1_000_000, a=3, b=2, less=1, turn=4)
    (whole,) = found.spans
    assert found.seconds == 1_000_000 * (4 + 1 + 3 + 2)
    assert (whole.times, [inner.operation.name for inner in whole.body]) == (1_000_000, ["w", "less", "a", "b"])
    assert sum(times * leaf.seconds for leaf, times in whole.leaves()) == found.seconds


def test_of_a_conditional_the_longest_branch_runs():
    branches = computation("yes", PARAMETER, compute("a")) + computation("no", PARAMETER, compute("b"))
    line = "%c = f32[8]{0} conditional(%x, %x, %x), branch_computations={%yes, %no}"
    assert path(played(entry(PARAMETER, line, others=branches), a=3, b=5)) == ["b"]


def test_copies_have_a_thread_of_their_own_and_a_done_without_its_start_waits_for_all_on_its_way():
    lines = "%s = (f32[8]{0}, f32[8]{0}, u32[]) copy-start(%x)", compute("a"), "%d = f32[8]{0} copy-done(%s)"
    found = played(entry(PARAMETER, *lines), s=3, a=1)
    assert (found.seconds, path(found), busy(found, "copies")) == (3, ["s"], 3)
    text = entry(PARAMETER, start("g", "tp"), compute("a"), done("elsewhere"), compute("b"))
    assert played(text, g=5, a=1, b=1).seconds == 6


@st.composite
def schedules(draw):
    """Programs of operations, starts and dones in any order in which a done follows its start, with whole seconds."""
    lines, seconds, waiting = [PARAMETER], {}, []
    for index in range(draw(st.integers(1, 12))):
        what, name = draw(st.sampled_from(("compute", "tp", "dp", "done"))), f"o{index}"
        if what == "done" and waiting:
            lines.append(done(waiting.pop(draw(st.integers(0, len(waiting) - 1)))))
        elif what in ALONG:
            lines.append(start(name, what))
            waiting.append(name)
        else:
            lines.append(compute(name))
        seconds[name] = draw(st.integers(0, 9))
    return entry(*lines, *map(done, waiting)), seconds


@settings(max_examples=60, deadline=None)
@given(schedules(), st.integers(2, 5))
def test_the_critical_path_is_unbroken_and_as_long_as_the_step(drawn, slower):
    text, seconds = drawn
    found = played(text, **seconds)
    spans = [found.spans[index] for index in found.critical_path()]
    assert sum(Fraction(span.seconds) for span in spans) == found.seconds
    assert [span.begin for span in spans] == [0, *(span.end for span in spans)][: len(spans)]
    for thread in (COMPUTE, "X", "Y"):
        mine = [span for span in found.spans if span.thread == thread]
        assert all(a.end <= b.begin for a, b in itertools.pairwise(mine))
    assert max(busy(found, thread) for thread in (COMPUTE, "X", "Y")) <= found.seconds
    assert found.seconds <= sum(span.seconds for span in found.spans)
    # Prices may be intervals only because a schedule never gets faster when something in it gets slower.
    one = next(iter(seconds))
    assert played(text, **seconds | {one: slower * seconds[one]}).seconds >= found.seconds
