"""``Side``: the expert backend of a step under attention–FFN disaggregation, with the layer programs and the host loop that runs them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled, Lowered
from jaxtyping import Array

from dsjax.engine.device.compiler_options import step_options
from dsjax.model.apart import ExpertWork, LayerPass, PassInputs, Routed, constrain_like
from dsjax.model.step_description import StepDescription
from sharding import MeshSpec
from sharding.arrays import own_parts, put
from sharding.cut import Described, Run
from sharding.dispatch.between import Between


class OnHost:
    """An array's values on the host, copied once for several threads. For an array shared by processes: this process's parts.

    Two threads that read the values of a `jax.Array` at the same time may get a half-finished copy.
    """

    def __init__(self, array: Array):
        self._array, self._lock = array, threading.Lock()
        self._values: np.ndarray | None = None

    @property
    def values(self) -> np.ndarray:
        """Wait for the values and return them."""
        with self._lock:
            if self._values is None:
                shared = not getattr(self._array, "is_fully_addressable", True)
                parts = own_parts(self._array) if shared else [self._array]
                self._values = np.concatenate([np.asarray(part) for part in parts])
            return self._values


class Way(Protocol):
    """Transport of a pass's rows to the experts and back."""

    def call(self, rows: Sequence[Array], counts: OnHost, layer: int, r: int = 0) -> Any:
        """Start computing the rows of round ``r`` with a layer's experts. counts: from ``Between.pack``."""

    def returned(self, away: Any) -> tuple[list[Array], int]:
        """Return the answers to a call on the token devices, as ``Between.add`` takes them, and the number of rounds the layer needs."""


class Side:
    """Computes the routed experts of a step with disaggregated experts: the ``sharding.cut.Worker`` of its ``ExpertWork``.

    Between two calls it keeps only parameters, which may be replaced at that point.

    Args:
        spec: ``ep=N``.
        waits: whether to wait for each program before starting the next: on emulated devices, concurrent collectives can deadlock.
    """

    def __init__(self, spec: MeshSpec, *, waits: bool):
        self.spec, self.waits = spec, waits
        self._passes: dict[Hashable, CompiledPass] = {}
        self._lock = threading.Lock()

    def way(self, through: LayerPass) -> Way:
        """Compile the programs that take the rows of a pass to the experts and back."""
        raise NotImplementedError

    def build(self, lowered: Lowered, step: StepDescription) -> Compiled:
        """Compile a program of the attention or the expert side, with the options of the step's other programs.

        A dry run overrides this to keep the program.
        """
        return lowered.compile(compiler_options=step_options(step))

    def numbers(self, mesh: Mesh, count: int) -> list[Array]:
        """Return the int32 layer or round numbers 0, 1, …, each replicated on all devices of a mesh."""
        return [put(np.int32(number), NamedSharding(mesh, P())) for number in range(count)]

    def ready(self, program: Compiled) -> Array:
        """Run a program without arguments, wait for it and return its result."""
        return jax.block_until_ready(program())

    def give_up(self) -> None:
        """Release other processes that wait for this one at a layer, after a step failed between two layers."""

    def compile_work(self, work: ExpertWork, described: Sequence[Described]) -> tuple[Run, Sequence[Sharding]]:
        """Compile the programs of a pass, or reuse the programs of an equal pass."""
        compiled = self.compiled(work, described)
        passing: PassInputs = jax.tree.unflatten(work.tree, described)

        def run(leaves: list[Array]) -> list[Array]:
            passing = jax.tree.unflatten(work.tree, leaves)
            leaves.clear()
            return jax.tree.leaves(compiled.run(passing))

        return run, [leaf.sharding for leaf in jax.tree.leaves((passing.x, passing.cache, passing.report))]

    def compiled(self, work: ExpertWork, described: Sequence[Described]) -> CompiledPass:
        """Return the programs of a pass; several steps can share them."""
        passes, tree = work.passes, work.tree
        shardings = tuple((one.shape, str(one.dtype), one.sharding) for one in described)
        key = tuple((one.stack, one.first_layer, one.shape, one.kind) for one in passes), tree, shardings
        with self._lock:
            if key not in self._passes:
                passing: PassInputs = jax.tree.unflatten(tree, described)
                kinds = passes[0].num_kinds
                layers = self.numbers(passes[0].step.mesh, passes[0].num_layers * kinds)
                programs = [
                    PassPrograms.of(self, self.way(one), one, passing, place // kinds)
                    for place, one in enumerate(passes)
                ]
                self._passes[key] = CompiledPass(programs, layers, self.waits, kinds, self.give_up)
            return self._passes[key]


class FurtherRounds(NamedTuple):
    """Programs of the rounds after the first."""

    pack: Callable
    keep: Callable
    receive: Callable
    nothing: Array  # zeros, the initial value of the answers that ``keep`` collects
    numbers: Sequence[Array]

    @classmethod
    def of(
        cls, side: Side, through: LayerPass, params: Any, x: Any, shared: Any, routed: Routed, pinned: Callable
    ) -> FurtherRounds | None:
        """Compile the programs; None if one round is always enough. pinned: wraps a function so that its result is laid out like ``x``."""
        between, step = through.between(), through.step
        most = -(-between.rows // between.capacity)
        if most == 1:
            return None
        number, kept = Described((), np.int32, sharding=NamedSharding(step.mesh, P())), between.described_terms
        returned = between.described_returns
        keep = lambda *taken: constrain_like(through.collect_round(*taken), kept)  # noqa: E731
        receive_all = pinned(through.receive, collected=True)
        zeros = jax.jit(lambda: jnp.zeros(kept.shape, kept.dtype), out_shardings=kept.sharding)
        return cls(
            side.build(jax.jit(through.pack_round).lower(routed, number), step),
            side.build(jax.jit(keep).lower(kept, routed.slots, returned, number), step),
            side.build(jax.jit(receive_all).lower(params, x, shared, routed, kept, number), step),
            side.ready(side.build(zeros.lower(), step)),
            side.numbers(step.mesh, most),
        )


class Away(NamedTuple):
    """A layer's tokens while the experts compute their rows."""

    programs: PassPrograms
    x: Array
    shared: Array | None
    routed: Routed
    counts: OnHost
    called: Any
    layer: int


class PassPrograms(NamedTuple):
    """Programs of a layer, which take its number as an argument, and the transport to the experts."""

    attend: Callable
    share: Callable
    receive: Callable
    way: Way
    further: FurtherRounds | None = None

    @classmethod
    def of(cls, side: Side, way: Way, through: LayerPass, passing: PassInputs, half: int) -> PassPrograms:
        """Trace and compile the programs. passing: abstract values; half: index of the micro-batch among its tokens."""
        step, x = through.step, passing.x[half]
        here = Described((), np.int32, sharding=NamedSharding(step.mesh, P()))

        def attend(params, cache, report, x, tokens, copies, index):
            cache, report, *others = through.attend(params, cache, report, x, tokens, copies, index)
            return *constrain_like((cache, report), (passing.cache, passing.report)), *others

        own = passing.params, passing.cache, passing.report, x, passing.tokens[half], passing.copies
        attended = side.build(jax.jit(attend, donate_argnums=(1, 2)).lower(*own, here), step)
        _, _, after, routed, _ = _results(attended)
        shared = side.build(jax.jit(through.share).lower(passing.params, routed.normed, here), step)
        returned = through.between().described_returns

        def pinned(receive: Callable, **options: bool) -> Callable:
            return lambda *taken: constrain_like(receive(*taken, **options), x)

        params, own = passing.params, _results(shared)
        received = side.build(jax.jit(pinned(through.receive)).lower(params, after, own, routed, returned, here), step)
        further = FurtherRounds.of(side, through, params, after, own, routed, pinned)
        return cls(attended, shared, received, way, further)


@dataclass(frozen=True, eq=False)
class CompiledPass:
    """A pass through a run of layers."""

    programs: Sequence[PassPrograms]  # for each micro-batch of the step, one entry per kind of layer
    layers: Sequence[Array]  # layer numbers on the token devices
    waits: bool
    kinds: int = 1  # number of kinds of layers
    give_up: Callable[[], None] = lambda: None

    def run(self, passing: PassInputs) -> tuple[list[Array], dict[str, Array], dict[str, Array]]:
        """Run tokens through the layers; return them, the cache and the report (both donated).

        With two micro-batches, the experts of one start before the sums of the other are added, so both sides compute at the same time.
        """
        try:
            return self._run(passing)
        except BaseException:
            self.give_up()
            raise

    def _run(self, passing: PassInputs) -> tuple[list[Array], dict[str, Array], dict[str, Array]]:
        params, cache, tokens, copies = passing.params, passing.cache, passing.tokens, passing.copies
        xs, report = passing.x, passing.report
        away: list[Away | None] = [None] * len(xs)
        for number, here in enumerate(self.layers):
            for half, programs in enumerate(self.programs[number % self.kinds :: self.kinds]):
                if away[half] is not None:
                    xs[half] = self._received(params, away[half])
                cache, report, x, routed, rows = self._done(
                    programs.attend(params, cache, report, xs[half], tokens[half], copies, here)
                )
                counts = OnHost(routed.counts)
                called = programs.way.call(rows, counts, number // self.kinds)
                shared = self._done(programs.share(params, routed.normed, here))
                away[half] = Away(programs, x, shared, routed, counts, called, number)
        xs = [self._received(params, one) for one in away]
        return xs, cache, report

    def _received(self, params: dict[str, Array], away: Away) -> Array:
        """Return the tokens with their experts' output added. Runs the remaining rounds, if any."""
        programs, here = away.programs, self.layers[away.layer]
        returned, rounds = programs.way.returned(away.called)
        if rounds == 1:
            return self._done(programs.receive(params, away.x, away.shared, away.routed, returned, here))
        further, slots = programs.further, away.routed.slots
        kept = self._done(further.keep(further.nothing, slots, returned, further.numbers[0]))
        for r in range(1, rounds):
            rows = self._done(further.pack(away.routed, further.numbers[r]))
            returned, _ = programs.way.returned(programs.way.call(rows, away.counts, away.layer // self.kinds, r))
            kept = self._done(further.keep(kept, slots, returned, further.numbers[r]))
        return self._done(further.receive(params, away.x, away.shared, away.routed, kept, here))

    def _done(self, results: Any) -> Any:
        return jax.block_until_ready(results) if self.waits else results


def rounds_of(between: Between, counts: OnHost) -> int:
    """Return the number of rounds that these counts need. Waits for the counts only if one round may not be enough."""
    return 1 if between.capacity >= between.rows else between.rounds(counts.values)


def _results(program: Compiled) -> Any:
    """Return abstract values of a program's results."""
    return jax.tree.map(
        lambda info, sharding: Described(info.shape, info.dtype, sharding=sharding),
        program.out_info,
        program.output_shardings,
    )
