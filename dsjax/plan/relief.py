"""Relief: of a separated deployment whose prefill is too busy for the TTFT, the most requests that leave it time enough.

Each takes some twenty trials of other batches, and among many devices there are thousands of such deployments. What one could give at best
is known from its prefill side (`_hope`), so that only those that could be shown are worked out: branch and bound.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsjax.plan.candidate import Candidate, PrefillPool, first_beside, quick_separated, separated_middles
from dsjax.plan.figure import Middle
from dsjax.plan.question import SHOWN, Question, users_told_apart

_FINE = 1 << 24
"""Parts of a DP rank's batch that are told apart where prefill and decode have hosts of their own."""
_HALVINGS = 10
_SLACK = 1.002
"""By so much a hope is better than it need be: a settled step (`PrefillPool.share_at`) is known to a thousandth."""
_NEARER = 6
"""Times that a hope is brought nearer at most."""
_LEAST = 1e-3
"""A batch below all that are tried; no step of decodes is shorter than its."""


@dataclass(frozen=True)
class Busy:
    """A deployment that breaks the TTFT's objective of `bound` seconds."""

    pool: PrefillPool
    late: Candidate
    bound: float


def relieved(question: Question, busy: list[Busy], known: Sequence[Candidate]) -> dict[int, Candidate]:
    """`id` of a late deployment → the same with the most requests that keep the TTFT, where any do and it could be shown.

    A plan shows the best of `SHOWN` rows of its table and the Pareto front. Left out is what even at its hope would be in neither, as
    `known` and what was worked out before it say. Where what a plan shows is more than that (no deployment meets the objectives, or a
    throughput is one), or where times need not grow with the batch (measured modules, dry runs), nothing is left out.
    """
    options, reliefs = question.options, {}
    busy = [one for one in busy if one.pool.alone.value <= one.bound]
    if not busy:
        return {}
    if question.bounds.throughput is not None or options.measured or options.compiled:
        answers = {id(one.late): _worked_out(one) for one in busy}
        return {late: answer for late, answer in answers.items() if answer is not None}
    shown = _Shown(question)
    for candidate in known:
        if candidate.ttft.value <= busy[0].bound:
            shown.note(candidate)
    order, answers = question.order, {}
    hopes = [(_hope(one), one) for one in busy]
    for hope, one in sorted(hopes, key=lambda pair: order(pair[0].candidate)):
        only_late = set(one.late.misses(question.bounds)) == {"ttft"}
        if only_late and not _may_be_shown(shown, hope):
            continue
        late = one.late
        # The most requests that keep the TTFT are the same, whichever batch it was that did not.
        key = (id(one.pool), late.prefill_count, id(late.decode), late.count)
        if key not in answers:
            answers[key] = _worked_out(one)
            if answers[key] is not None:
                shown.note(answers[key])
        if answers[key] is not None:
            reliefs[id(late)] = answers[key]
    return reliefs


class _Shown:
    """What a plan would show of the candidates so far: the best of each row of its table, and the Pareto front."""

    def __init__(self, question: Question):
        self._question, self._order = question, question.order
        self._rows: dict[tuple, tuple[float, ...]] = {}
        self._orders: list[tuple[float, ...]] = []
        self._front: list[tuple[float, float]] = []
        """(tokens a second a user, a device), ascending in the first and descending in the second."""

    def note(self, candidate: Candidate) -> None:
        """Count it in; it keeps the TTFT."""
        if candidate.meets(self._question.bounds):
            order, before = self._order(candidate), self._rows.get(candidate.row)
            if before is None or order < before:
                if before is not None:
                    self._orders.pop(bisect.bisect_left(self._orders, before))
                bisect.insort(self._orders, order)
                self._rows[candidate.row] = order
        user, device = _both(candidate)
        at = bisect.bisect_left(self._front, (user, -math.inf))
        if at == len(self._front) or self._front[at][1] < device:
            first = at
            while first and self._front[first - 1][1] <= device:
                first -= 1
            same = at < len(self._front) and self._front[at][0] == user
            self._front[first : at + same] = [(user, device)]

    def may_have(self, hope: Candidate) -> bool:
        """Whether a candidate that is no better than this one could be shown."""
        last = self._orders[SHOWN - 1] if len(self._orders) >= SHOWN else (math.inf,)
        if not self._rows or self._order(hope) <= min(last, self._rows.get(hope.row, last)):
            return True
        # Of those on the front whose users are no slower, the first gives most tokens a second a device.
        user, device = _both(hope)
        at = bisect.bisect_left(self._front, (user, -math.inf))
        return at == len(self._front) or self._front[at][1] <= device


def _both(candidate: Candidate) -> tuple[float, float]:
    return 1.0 / candidate.tpot.value, candidate.throughput.value / candidate.devices


@dataclass(frozen=True)
class _Hope:
    """What a relieved deployment can have at best.

    candidate: with no less a throughput, and no longer a TPOT. batch: it has at least as many requests on a DP rank. leaving: so many it
    has at least for each second of its step of decodes, less a part of one (`part`): as many leave a second as certainly keep the TTFT,
    or one more request would still keep it.
    """

    candidate: Candidate
    batch: float
    leaving: float
    part: float

    def closer(self) -> _Hope:
        """With the TPOT of the batch that it has at least, rounded down so that deployments have it in common, and the batch that follows
        from so long a step; itself where that is known already."""
        instance = self.candidate.decode.middle
        batch = float(math.floor(self.batch * 4) / 4 if self.batch < 16 else math.floor(self.batch))
        if batch <= 0:
            return self
        step = instance.decode_step(batch).value
        tpot = step / instance.options.tokens_a_step.value
        if tpot <= self.candidate.tpot.value:
            return self
        batch = max(self.batch, self.leaving * step - self.part)
        return dataclasses.replace(self, candidate=dataclasses.replace(self.candidate, tpot=Middle(tpot)), batch=batch)


def _may_be_shown(shown: _Shown, hope: _Hope) -> bool:
    """Whether a plan could show a deployment of such a hope, which is brought nearer for as long as it could."""
    for _ in range(_NEARER):
        if not shown.may_have(hope.candidate):
            return False
        before, hope = hope, hope.closer()
        if hope is before:
            return True
    return shown.may_have(hope.candidate)


def _hope(one: Busy) -> _Hope:
    """What a deployment can have once it is relieved.

    A step of decodes is at least as long as that of the least batch, which gives the most requests a second that can keep the TTFT. It is
    at most as long as that of the whole batch, which gives a rate that certainly keeps it; so many requests decode at once at least as
    that rate keeps in the decodes' steps.
    """
    late, pool = one.late, one.pool
    instance, left = late.decode.middle, late.prefill_count
    output, made = instance.workload.output.mean, instance.options.tokens_a_step.value
    most = late.throughput.value / output

    def rates(batch: float, bound: float) -> tuple[float, float]:
        """(a rate that keeps the bound beside decode steps of that batch, one that does not), close to each other."""
        first, low, high = first_beside(pool, left, late.decode, instance.decode_step(batch).value), 0.0, most
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            kept = first(middle) <= bound
            low, high = (middle, high) if kept else (low, middle)
        return low, high

    _, above = rates(_LEAST, one.bound * _SLACK)
    below, _ = rates(late.batch, one.bound / _SLACK)
    batch, part = _LEAST, 1 / _parts(late)
    leaving = below * max(output - 1, 1.0) / made / (instance.replicas * late.count) / _SLACK
    for size in (*instance.decode_curve.sizes, math.inf):
        step = instance.decode_step(batch).value
        least = max(_LEAST, leaving * step - part)
        if least < size:
            break
        batch = size
    best = dataclasses.replace(late, ttft=Middle(0.0), tpot=Middle(step / made), throughput=Middle(above * output))
    return _Hope(best, max(batch, least), leaving, part)


def _parts(late: Candidate) -> int:
    """Parts of a DP rank's batch that are told apart. With two kinds of hosts no other split of them makes up for a user who is rounded
    away: means are not whole users."""
    return users_told_apart(late.decode, late.count) if late.decode.cluster.prefill is None else _FINE


def _worked_out(one: Busy) -> Candidate | None:
    pool, left, instance, right = one.pool, one.late.prefill_count, one.late.decode, one.late.count
    users = _parts(one.late)

    def keeps(part: int, seconds: Callable[[float], float] | None = None) -> bool:
        return separated_middles(pool, left, instance, right, part / users, seconds)[0] <= one.bound

    most, curve = math.ceil(one.late.batch * users), lambda batch: instance.decode_curve(instance.rows(batch))
    # Where it is by the curve of a decode step's seconds, which is at hand; then by that curve where it is moved onto one priced step.
    # So few steps of other batches have to be priced.
    near = _last(0, most, lambda part: keeps(part, curve))
    if near:
        off = instance.middle.decode_step(near / users).value / curve(near / users)
        near = _around(near, most, lambda part: keeps(part, lambda batch: off * curve(batch)))
    change = _around(near, most, keeps)
    return quick_separated(pool, left, instance, right, change / users) if change else None


def _around(near: int, most: int, holds: Callable[[int], bool]) -> int:
    """The last number before `most`, from 0, which holds, that holds; looked for from `near` on, in steps that double."""
    low, high, far = max(near, 0), min(near + 1, most), 1
    while low and not holds(low):
        low, high, far = max(low - far, 0), low, 2 * far
    while high < most and holds(high):
        low, high, far = high, min(high + far, most), 2 * far
    return _last(low, high, holds)


def _last(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The last number from `low`, which holds, before `high`, which does not, that holds; by bisection."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
