"""The programs of a layer whose experts are elsewhere, and how the host takes tokens through them: attention, away, back, added."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled, Lowered
from jaxtyping import Array

from dsjax.model.apart import LayerPass, Passing, Routed, described_like
from sharding.arrays import own_parts, put
from sharding.cut import Described
from sharding.dispatch.between import Between


class OnHost:
    """An array's values on the host, once, for several threads: two that ask a `jax.Array` for them at once may get a copy half made.

    Where other processes share the array, only the parts on this process's devices are copied.
    """

    def __init__(self, array: Array):
        self._array, self._lock = array, threading.Lock()
        self._values: np.ndarray | None = None

    @property
    def values(self) -> np.ndarray:
        """Wait for the array, and give its values."""
        with self._lock:
            if self._values is None:
                array = self._array
                shared = not getattr(array, "is_fully_addressable", True)
                self._values = (
                    np.concatenate([np.asarray(part) for part in own_parts(array)]) if shared else np.array(array)
                )
            return self._values


class Way(Protocol):
    """How a layer's rows get to the experts, and what these give back: for so many tokens."""

    def call(self, rows: Sequence[Array], counts: OnHost, layer: int, r: int = 0) -> Any:
        """Begin to have the rows of round ``r`` computed by the experts of a layer of the stack. counts: as ``Between.pack`` gives them."""

    def returned(self, away: Any) -> tuple[list[Array], int]:
        """The answers to a call, on the tokens' devices, as ``Between.add`` takes them; and how many rounds the layer needs in all."""


class ProgramMaker:
    """Makes programs of a layer, and what they take. A dry run has its own, for devices that are not there."""

    def build(self, lowered: Lowered) -> Compiled:
        """Compile a program of either side."""
        return lowered.compile()

    def numbers(self, mesh: Mesh, count: int) -> list[Array]:
        """The first numbers from 0 on, each on all devices of a mesh: what programs of a layer or a round take."""
        return [put(np.int32(number), NamedSharding(mesh, P())) for number in range(count)]

    def ready(self, program: Compiled) -> Array:
        """What a program without arguments gives, once it is there."""
        return jax.block_until_ready(program())

    def give_up(self) -> None:
        """Take notice that a step has failed between two layers: nobody is to wait for this process there."""


class FurtherRounds(NamedTuple):
    """The programs of rounds beyond the first, where there can be any. nothing: what is kept before the first one comes back."""

    pack: Callable
    keep: Callable
    receive: Callable
    nothing: Array
    numbers: Sequence[Array]

    @classmethod
    def of(
        cls, maker: ProgramMaker, through: LayerPass, x: Any, shared: Any, routed: Routed, receive: Callable
    ) -> FurtherRounds | None:
        """Compile the programs; None where one round is always enough. receive: makes a function's result as ``x`` is."""
        between = through.between()
        most = -(-between.rows // between.capacity)
        if most == 1:
            return None
        number, kept = Described((), np.int32, sharding=NamedSharding(through.step.mesh, P())), between.described_kept
        returned = between.described_returns
        keep = lambda *taken: described_like(through.keep(*taken), kept)  # noqa: E731
        zeros = maker.build(jax.jit(lambda: jnp.zeros(kept.shape, kept.dtype), out_shardings=kept.sharding).lower())
        return cls(
            maker.build(jax.jit(through.further).lower(routed, number)),
            maker.build(jax.jit(keep).lower(kept, routed.slots, returned, number)),
            maker.build(jax.jit(receive(through.receive_kept)).lower(x, shared, routed.slots, kept)),
            maker.ready(zeros),
            maker.numbers(through.step.mesh, most),
        )


class Away(NamedTuple):
    """A layer's tokens while their rows are away."""

    x: Array
    shared: Array | None
    routed: Routed
    counts: OnHost
    called: Any
    layer: int


class PassPrograms(NamedTuple):
    """The programs of a layer for so many tokens, which take its number; and how the tokens travel between them."""

    attend: Callable
    share: Callable
    receive: Callable
    way: Way
    further: FurtherRounds | None = None

    @classmethod
    def of(cls, maker: ProgramMaker, way: Way, through: LayerPass, passing: Passing, half: int) -> PassPrograms:
        """Trace and compile the programs. passing: descriptions; half: which of its tokens are meant."""
        step, x = through.step, passing.x[half]
        here = Described((), np.int32, sharding=NamedSharding(step.mesh, P()))

        def attend(params, cache, report, x, tokens, copies, index):
            cache, report, *others = through.attend(params, cache, report, x, tokens, copies, index)
            return *described_like((cache, report), (passing.cache, passing.report)), *others

        own = passing.params, passing.cache, passing.report, x, passing.tokens[half], passing.copies
        attended = maker.build(jax.jit(attend, donate_argnums=(1, 2)).lower(*own, here))
        _, _, after, routed, _ = _results(attended)
        shared = maker.build(jax.jit(through.share).lower(passing.params, routed.normed, here))
        returned = through.between().described_returns

        def pinned(receive: Callable) -> Callable:
            return lambda *taken: described_like(receive(*taken), x)

        received = maker.build(jax.jit(pinned(through.receive)).lower(after, _results(shared), routed.slots, returned))
        further = FurtherRounds.of(maker, through, after, _results(shared), routed, pinned)
        return cls(attended, shared, received, way, further)


@dataclass(frozen=True, eq=False)
class CompiledPass:
    """A pass through a stack of layers: of each half, or of the whole step, four programs a layer, and two moves.

    layers: the numbers of the layers on the tokens' devices. waits: whether each program is waited for before the next starts.
    give_up: as of ``ProgramMaker``.
    """

    programs: Sequence[PassPrograms]
    layers: Sequence[Array]
    waits: bool
    give_up: Callable[[], None] = lambda: None

    def run(self, passing: Passing) -> tuple[list[Array], dict[str, Array], dict[str, Array]]:
        """Take tokens through the layers: give them, the cache, and the report; the latter two were given away.

        With two halves the one's experts are started before the other's sums are added and its next layer begins: each side then
        computes while the other does, and waits for it only where it is the faster one.
        """
        try:
            return self._run(passing)
        except BaseException:
            self.give_up()
            raise

    def _run(self, passing: Passing) -> tuple[list[Array], dict[str, Array], dict[str, Array]]:
        params, cache, tokens, copies = passing.params, passing.cache, passing.tokens, passing.copies
        xs, report = passing.x, passing.report
        away: list[Away | None] = [None] * len(xs)
        for number, here in enumerate(self.layers):
            for half, programs in enumerate(self.programs):
                if away[half] is not None:
                    xs[half] = self._received(programs, away[half])
                cache, report, x, routed, rows = self._done(
                    programs.attend(params, cache, report, xs[half], tokens[half], copies, here)
                )
                counts = OnHost(routed.counts)
                called = programs.way.call(rows, counts, number)
                shared = self._done(programs.share(params, routed.normed, here))
                away[half] = Away(x, shared, routed, counts, called, number)
        xs = [self._received(programs, one) for programs, one in zip(self.programs, away, strict=True)]
        return xs, cache, report

    def _received(self, programs: PassPrograms, away: Away) -> Array:
        """The tokens with what their experts gave; further rounds come and go here."""
        returned, rounds = programs.way.returned(away.called)
        if rounds == 1:
            return self._done(programs.receive(away.x, away.shared, away.routed.slots, returned))
        further, slots = programs.further, away.routed.slots
        kept = self._done(further.keep(further.nothing, slots, returned, further.numbers[0]))
        for r in range(1, rounds):
            rows = self._done(further.pack(away.routed, further.numbers[r]))
            returned, _ = programs.way.returned(programs.way.call(rows, away.counts, away.layer, r))
            kept = self._done(further.keep(kept, slots, returned, further.numbers[r]))
        return self._done(further.receive(away.x, away.shared, slots, kept))

    def _done(self, results: Any) -> Any:
        return jax.block_until_ready(results) if self.waits else results


def rounds_of(between: Between, counts: OnHost) -> int:
    """How many rounds rows of such numbers need. Where one is always enough, nothing is waited for."""
    return 1 if between.capacity >= between.rows else between.rounds(counts.values)


def _results(program: Compiled) -> Any:
    """Descriptions of what a program gives."""
    return jax.tree.map(
        lambda info, sharding: Described(info.shape, info.dtype, sharding=sharding),
        program.out_info,
        program.output_shardings,
    )
