"""Honest times: compiled and warm, waited for, repeated, and in a loop on the device where a call would cost more than the work."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsjax.bench.processes import Agree, alone

LEAST_SAMPLE = 0.02
"""Seconds that a sample lasts at least: a call of a compiled program costs 20 to 100 µs on the host, under 1 % of it."""
LEAST_SAMPLES = 3
LOOP_LENGTHS, LONGER = 5, 4
"""How many lengths of a loop are tried where it cannot be told from an empty one, each so many times the one before."""
DROWNED = "its loop took no longer than an empty one: something else keeps this machine busy; run it again when that has ended"
CALL_RESOLUTION = 1e-6
"""Seconds: the least that a call less an empty call is said to take."""
HOST_PAUSE = 2e-4
"""Seconds of the host's work before a short call, as between two steps, in which the device's threads fall asleep."""


@dataclass(frozen=True)
class Budget:
    """How long one row is sampled: seconds in all (warm-up and compilation apart), and at most so many samples."""

    seconds: float = 1.0
    samples: int = 15


class TimedCalls(NamedTuple):
    """Seconds of an empty call, of a call with as many applications as a step of the model has, and of one with many more."""

    empty: float
    short: float
    long: float


@dataclass
class PreparedCase:
    """Something compiled, with its inputs on the device, that can be timed again and again.

    in_device_loop: whether they are iterations of a loop in the compiled program, or calls from the host, which are timed whole.
    """

    run: Callable[[int], None]  # applies the module so many times, and waits
    in_call: int = 1  # applications in one step of the model, by which `Times.once` is told apart
    in_device_loop: bool = True
    few: int = 0
    many: int = 0
    samples: list[TimedCalls] = field(default_factory=list)
    empty: Callable[[int], None] | None = None
    """As many calls of a program that does nothing, where `run` is calls from the host and they are to be taken off."""
    state: Callable[[], Any] = lambda: None
    """What the loop carries, after the last call."""
    agree: Agree = alone
    """The agreement of the processes that apply it together: they must do so as often, and a sample is the slowest one's."""

    def warm_up(self, budget: Budget | None = None) -> None:
        """Run, and choose how many applications the two calls of a sample have.

        Where one application takes longer than the budget, it alone is a sample.
        """
        first = self._slowest(seconds_of(self.run, 1))
        if budget is not None and first > budget.seconds:
            self.few, self.many = 0, 1
            return
        each = self._slowest(seconds_of(self.run, 1))
        if each < LEAST_SAMPLE:
            each = self._slowest(seconds_of(self.run, 4)) / 4
        count = max(1, math.ceil(LEAST_SAMPLE / max(each, 1e-7)))
        # The short call: what one step of the model has, unless that alone takes long.
        self.few = max(1, min(self.in_call, count))
        self.many = self.few + count

    def sample(self) -> TimedCalls:
        """An empty call, a short one, a long one. Another before them is not timed: what ran before left its own in the caches."""
        self.run(self.few)
        empty = short = 0.0
        if self.in_device_loop and self.few:
            pause()
            empty = seconds_of(self.run, 0)
            pause()
            short = seconds_of(self.run, self.few)
        if self.empty is not None:
            empty = seconds_of(self.empty, self.many)
        own = [empty, short, seconds_of(self.run, self.many)]
        self.samples.append(max((TimedCalls(*one) for one in self.agree("sample", own)), key=lambda one: one.long))
        return self.samples[-1]

    def take(self, budget: Budget) -> Times | None:
        """Sample until the budget is spent, at least `LEAST_SAMPLES` times; where that is noise, again with a longer loop.

        None where the longest is noise, too (`DROWNED`): no figure is better than one that says nothing.
        """
        for _ in range(LOOP_LENGTHS):
            started = time.perf_counter()
            while len(self.samples) < budget.samples and (
                len(self.samples) < LEAST_SAMPLES or self._slowest(time.perf_counter() - started) < budget.seconds
            ):
                self.sample()
            times = self.times()
            if times.stand_out:
                return times
            self.samples.clear()
            self.many = self.few + LONGER * (self.many - self.few)
        return None

    def times(self) -> Times:
        """Times of the samples so far."""
        return Times(tuple(self.samples), self.few if self.in_device_loop else 0, self.many)

    def _slowest(self, seconds: float) -> float:
        return max(self.agree("seconds", seconds))


def seconds_of(run: Callable[[int], None], applications: int) -> float:
    """Run so many applications, and say how long they took."""
    started = time.perf_counter()
    run(applications)
    return time.perf_counter() - started


def pause() -> None:
    """Keep this thread busy for `HOST_PAUSE`."""
    until = time.perf_counter() + HOST_PAUSE
    while time.perf_counter() < until:
        pass


def device_loop(
    apply: Callable[[Any, jax.Array, Any], Any], inputs: Any, carry: Any, *, depth: int = 1, in_call: int = 1
) -> PreparedCase:
    """`carry = apply(inputs, layer, carry)` in a loop of the compiled program, over layers 0 to `depth` − 1 and round again.

    Inputs are arguments, so that nothing is folded into the program; the carry is donated and kept from call to call, so that
    the loop updates it in place, as a step does its cache. Products are as exact as a step's.
    """

    def program(rounds, first, inputs, carry):
        with jax.default_matmul_precision("highest"):
            return jax.lax.fori_loop(0, rounds, lambda i, carry: apply(inputs, (first + i) % depth, carry), carry)

    number = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = jax.jit(program, donate_argnums=3).lower(number, number, inputs, carry).compile()
    held, first = [carry], [0]
    here = all(array.is_fully_addressable for array in jax.tree.leaves(carry))

    def run(applications: int) -> None:
        start = (np.int32(applications), np.int32(first[0] % depth))
        if here:  # else devices of other processes want them too, and JAX sends them
            start = jax.device_put(start)
        first[0] += applications
        held[0] = jax.block_until_ready(compiled(*start, inputs, held[0]))

    return PreparedCase(run, in_call, state=lambda: held[0])


def host_loop(call: Callable[[], Any]) -> PreparedCase:
    """`call` from the host, each waited for."""

    def run(applications: int) -> None:
        for _ in range(applications):
            jax.block_until_ready(call())

    return PreparedCase(run, in_device_loop=False)


def call_in_turn(apply: Callable[[Any, Any], Any], inputs: Sequence[Any], carry: Any) -> PreparedCase:
    """`carry = apply(inputs, carry)` as one call from the host each time, inputs in turn; the cost of an empty call is taken off.

    For what a step has once: in a loop of nothing else it would find the threads of its products awake.
    """

    def program(inputs, carry):
        with jax.default_matmul_precision("highest"):
            return apply(inputs, carry)

    compiled = jax.jit(program, donate_argnums=1).lower(inputs[0], carry).compile()
    nothing = jax.jit(lambda inputs, carry: carry, donate_argnums=1, keep_unused=True)
    nothing = nothing.lower(inputs[0], carry).compile()
    held, turn = [carry], [0]

    def run(calls: int, program=compiled) -> None:
        for _ in range(calls):
            pause()
            turn[0] += 1
            held[0] = jax.block_until_ready(program(inputs[turn[0] % len(inputs)], held[0]))

    return PreparedCase(run, in_device_loop=False, empty=lambda calls: run(calls, nothing), state=lambda: held[0])


def spread(ordered: Sequence[float]) -> tuple[float, float]:
    """The 10th and the 90th percentile of ascending values; of fewer than ten the extremes."""
    left_out = len(ordered) // 10
    return ordered[left_out], ordered[-1 - left_out]


@dataclass(frozen=True)
class Times:
    """Samples of one row, and how many applications their calls had (few 0: only long calls were made).

    Where they do not `stand_out`, none of the figures says anything.
    """

    samples: tuple[TimedCalls, ...]
    few: int
    many: int

    @property
    def stand_out(self) -> bool:
        """Whether the samples are more than noise: every long call of a loop took longer than every empty one.

        What is called one by one may take no longer than an empty call, but not less by more than `CALL_RESOLUTION`.
        """
        if self.few:
            return min(sample.long for sample in self.samples) > max(sample.empty for sample in self.samples)
        return statistics.median(sample.long - sample.empty for sample in self.samples) >= -self._resolution

    @property
    def _resolution(self) -> float:
        """Seconds that a long call less an empty one is said to take at least."""
        one_by_one = not self.few and any(sample.empty for sample in self.samples)
        return CALL_RESOLUTION * self.many if one_by_one else 0.0

    @property
    def each(self) -> list[float]:
        """Seconds of one application, a value a sample, ascending; the median empty call taken off."""
        empty = statistics.median(sample.empty for sample in self.samples)
        return sorted(max(sample.long - empty, self._resolution) / self.many for sample in self.samples)

    @property
    def median(self) -> float:
        """Seconds of one application."""
        return statistics.median(self.each)

    @property
    def once(self) -> float:
        """Seconds that a call costs once, beside an empty call and its applications: operations that set themselves up."""
        if not self.few:
            return 0.0
        extra = statistics.median(sample.short - sample.empty for sample in self.samples) - self.few * self.median
        return max(0.0, extra)

    def to_json(self) -> dict[str, Any]:
        """Stable fields, seconds."""
        low, high = spread(self.each)
        return {
            "median_s": self.median,
            "min_s": self.each[0],
            "low_s": low,
            "high_s": high,
            "once_s": self.once,
            "applications": {"short": self.few, "long": self.many},
            "samples_s": [list(sample) for sample in self.samples],
        }
