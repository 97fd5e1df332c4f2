"""Time a compiled module: warm, synchronised and repeated, in a loop on the device where a call would cost more than the work."""

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

MIN_SAMPLE_SECONDS = 0.02
"""Minimum seconds of a sample. A call of a compiled program costs 20 to 100 µs on the host, under 1 % of it."""
MIN_SAMPLES = 3
MAX_LOOP_LENGTHS, LOOP_GROWTH = 5, 4
"""Number of loop lengths to try while a loop takes no longer than an empty one, and the factor between two lengths."""
TOO_NOISY = "its loop took no longer than an empty one: something else keeps this machine busy; run it again when that has ended"
CALL_RESOLUTION = 1e-6
"""Minimum seconds reported for a call minus an empty call."""
HOST_PAUSE = 2e-4
"""Seconds of host work before a short call, as between two steps. The device's threads fall asleep meanwhile."""


@dataclass(frozen=True)
class Budget:
    """Limits for sampling one row: seconds in all, without warm-up and compilation, and number of samples."""

    seconds: float = 1.0
    samples: int = 15


class TimedCalls(NamedTuple):
    """Seconds of an empty call, of a short call (as many applications as a model's step has), and of a long call (many more)."""

    empty: float
    short: float
    long: float


@dataclass
class PreparedCase:
    """A compiled module with its inputs on the device, ready to be timed repeatedly.

    in_device_loop: whether applications are iterations of a loop in the compiled program; else they are calls from the host.
    """

    run: Callable[[int], None]  # applies the module n times, and waits
    in_step: int = 1  # applications in one step of the model, from which `Times.setup` follows
    in_device_loop: bool = True
    few: int = 0
    many: int = 0
    samples: list[TimedCalls] = field(default_factory=list)
    empty: Callable[[int], None] | None = None
    """Calls an empty program n times, to subtract the cost of calls from the host; None: nothing to subtract."""
    state: Callable[[], Any] = lambda: None
    """Returns the loop's carry after the last call."""
    agree: Agree = alone
    """All-gather over the processes that run the module together. All must run it equally often; the slowest one's sample counts."""

    def warm_up(self, budget: Budget | None = None) -> None:
        """Run, and choose the numbers of applications of a sample's short and long call.

        If one application takes longer than the budget, a sample is that application alone.
        """
        first_seconds = self._slowest(seconds_of(self.run, 1))
        if budget is not None and first_seconds > budget.seconds:
            self.few, self.many = 0, 1
            return
        seconds_each = self._slowest(seconds_of(self.run, 1))
        if seconds_each < MIN_SAMPLE_SECONDS:
            seconds_each = self._slowest(seconds_of(self.run, 4)) / 4
        count = max(1, math.ceil(MIN_SAMPLE_SECONDS / max(seconds_each, 1e-7)))
        # The short call has one step's applications, unless they take long.
        self.few = max(1, min(self.in_step, count))
        self.many = self.few + count

    def sample(self) -> TimedCalls:
        """Time an empty, a short and a long call, after an untimed call that fills the caches."""
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
        of_processes = [TimedCalls(*sample) for sample in self.agree("sample", own)]
        self.samples.append(max(of_processes, key=lambda sample: sample.long))
        return self.samples[-1]

    def take(self, budget: Budget) -> Times | None:
        """Sample until the budget is spent, at least `MIN_SAMPLES` times; repeat with a longer loop while the samples are noise.

        None if the longest loop is noise too (`TOO_NOISY`).
        """
        for _ in range(MAX_LOOP_LENGTHS):
            started = time.perf_counter()
            while len(self.samples) < budget.samples and (
                len(self.samples) < MIN_SAMPLES or self._slowest(time.perf_counter() - started) < budget.seconds
            ):
                self.sample()
            times = self.times()
            if times.is_above_noise:
                return times
            self.samples.clear()
            self.many = self.few + LOOP_GROWTH * (self.many - self.few)
        return None

    def times(self) -> Times:
        """Times of the samples so far."""
        return Times(tuple(self.samples), self.few if self.in_device_loop else 0, self.many)

    def _slowest(self, seconds: float) -> float:
        return max(self.agree("seconds", seconds))


def seconds_of(run: Callable[[int], None], applications: int) -> float:
    """Run applications and return their seconds."""
    started = time.perf_counter()
    run(applications)
    return time.perf_counter() - started


def pause() -> None:
    """Keep this thread busy for `HOST_PAUSE`."""
    until = time.perf_counter() + HOST_PAUSE
    while time.perf_counter() < until:
        pass


def device_loop(
    apply: Callable[[Any, jax.Array, Any], Any], inputs: Any, carry: Any, *, depth: int = 1, in_step: int = 1
) -> PreparedCase:
    """`carry = apply(inputs, layer, carry)` in a loop of the compiled program, cycling over layers 0 to `depth` − 1.

    Inputs are arguments, so that XLA folds no constants. The carry is donated and kept from call to call, so that the loop updates
    it in place, as a step does its cache.
    """

    def program(rounds, first, inputs, carry):
        with jax.default_matmul_precision("highest"):
            return jax.lax.fori_loop(0, rounds, lambda i, carry: apply(inputs, (first + i) % depth, carry), carry)

    number = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = jax.jit(program, donate_argnums=3).lower(number, number, inputs, carry).compile()
    is_local = all(array.is_fully_addressable for array in jax.tree.leaves(carry))
    next_layer = 0

    def run(applications: int) -> None:
        nonlocal carry, next_layer
        bounds = (np.int32(applications), np.int32(next_layer))
        if is_local:  # else JAX transfers them, also to other processes' devices
            bounds = jax.device_put(bounds)
        next_layer = (next_layer + applications) % depth
        carry = jax.block_until_ready(compiled(*bounds, inputs, carry))

    return PreparedCase(run, in_step, state=lambda: carry)


def host_loop(call: Callable[[], Any]) -> PreparedCase:
    """Calls of `call` from the host, each followed by a wait."""

    def run(applications: int) -> None:
        for _ in range(applications):
            jax.block_until_ready(call())

    return PreparedCase(run, in_device_loop=False)


def call_loop(apply: Callable[[Any, Any], Any], inputs: Sequence[Any], carry: Any) -> PreparedCase:
    """Calls of `carry = apply(inputs, carry)` from the host, cycling through the inputs, minus the cost of an empty call.

    For modules that a step runs once: in a loop on the device, the threads of matrix products would still be awake.
    """

    def program(inputs, carry):
        with jax.default_matmul_precision("highest"):
            return apply(inputs, carry)

    compiled = jax.jit(program, donate_argnums=1).lower(inputs[0], carry).compile()
    no_op = jax.jit(lambda inputs, carry: carry, donate_argnums=1, keep_unused=True)
    empty = no_op.lower(inputs[0], carry).compile()
    number = 0

    def run(calls: int, program=compiled) -> None:
        nonlocal carry, number
        for _ in range(calls):
            pause()
            number += 1
            carry = jax.block_until_ready(program(inputs[number % len(inputs)], carry))

    return PreparedCase(run, in_device_loop=False, empty=lambda calls: run(calls, empty), state=lambda: carry)


def spread(ordered: Sequence[float]) -> tuple[float, float]:
    """Return the 10th and 90th percentile of ascending values; the extremes if there are fewer than ten."""
    tenth = len(ordered) // 10
    return ordered[tenth], ordered[-1 - tenth]


@dataclass(frozen=True)
class Times:
    """Samples of one row, with the numbers of applications in short (few) and long (many) calls; few 0: long calls only.

    The figures mean nothing unless the samples `is_above_noise`.
    """

    samples: tuple[TimedCalls, ...]
    few: int
    many: int

    @property
    def is_above_noise(self) -> bool:
        """Whether the samples are more than noise: every long call of a loop took longer than every empty one.

        A call from the host may take as long as an empty call, but not `CALL_RESOLUTION` less.
        """
        if self.few:
            return min(sample.long for sample in self.samples) > max(sample.empty for sample in self.samples)
        return statistics.median(sample.long - sample.empty for sample in self.samples) >= -self._resolution

    @property
    def _resolution(self) -> float:
        """Minimum seconds reported for a long call minus an empty one."""
        called_from_host = not self.few and any(sample.empty for sample in self.samples)
        return CALL_RESOLUTION * self.many if called_from_host else 0.0

    @property
    def seconds_each(self) -> list[float]:
        """Seconds of one application in each sample, minus the median empty call, ascending."""
        empty = statistics.median(sample.empty for sample in self.samples)
        return sorted(max(sample.long - empty, self._resolution) / self.many for sample in self.samples)

    @property
    def median(self) -> float:
        """Median seconds of one application."""
        return statistics.median(self.seconds_each)

    @property
    def setup(self) -> float:
        """Seconds of a call beyond an empty call and its applications, for operations with a setup."""
        if not self.few:
            return 0.0
        extra = statistics.median(sample.short - sample.empty for sample in self.samples) - self.few * self.median
        return max(0.0, extra)

    def to_json(self) -> dict[str, Any]:
        """Stable fields, seconds."""
        low, high = spread(self.seconds_each)
        return {
            "median_s": self.median,
            "min_s": self.seconds_each[0],
            "low_s": low,
            "high_s": high,
            "once_s": self.setup,
            "applications": {"short": self.few, "long": self.many},
            "samples_s": [list(sample) for sample in self.samples],
        }
