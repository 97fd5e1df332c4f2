"""``ExpertSide``: devices with routed experts and nothing else, and how the host takes a step's tokens to them and back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled
from jaxtyping import Array

from dsjax.engine.device.access import DevicePart
from dsjax.model.apart import (
    EXPERTS,
    LayerPass,
    Passing,
    Routed,
    StackExperts,
    described_like,
    sums_by_choice,
    wire_of,
)
from dsjax.model.parameters import ParameterInfo
from dsjax.model.step import ModelStep
from sharding import MeshError, MeshSpec, Rules
from sharding.arrays import put
from sharding.cut import Described, Run
from sharding.dispatch.between import Between, ExpertHalf, to_experts, to_tokens
from sharding.mesh import advice_on_emulation, device_order


def build_both(attention: MeshSpec, experts: MeshSpec) -> tuple[Mesh, Mesh]:
    """The meshes of the two sides: the first devices, and those behind them.

    Raises:
        MeshError: fewer devices exist than both sides want.
    """
    devices, first = sorted(jax.devices(), key=device_order), attention.num_devices
    wanted = first + experts.num_devices
    if len(devices) < wanted:
        platform = devices[0].platform
        advice = advice_on_emulation(wanted) if platform == "cpu" else "use smaller meshes"
        raise MeshError(
            f"--attention-mesh {attention} and --expert-mesh ep={experts.ep_size} want {wanted} devices, found {len(devices)} of "
            f"platform {platform!r}; {advice}"
        )
    return attention.arrange(devices[:first]), experts.arrange(devices[first:wanted])


def with_experts_apart(step: ModelStep, make: Callable[[Mapping[str, ParameterInfo]], Side]) -> ModelStep:
    """A step whose routed experts are where ``make`` says for their parameters, and everything else where it was."""
    infos = {path: info for path, info in step.table.infos.items() if EXPERTS in path}
    return replace(step, table=step.table.without(infos), apart=make(infos))


class Side(DevicePart):
    """Where the routed experts of a model's step are: its ``ExpertsApart``.

    They keep nothing from one call to the next but parameters. Between two calls others may be put in their place.

    Args:
        spec: ``ep=N``. infos: of the experts' parameters.

    Attributes:
        parts, padded: as of ``ExpertsApart``.
        waits: whether each program is waited for before the next starts: emulated devices that share a host's cores can deadlock in
            collectives of programs that are in flight together.
    """

    padded = True

    def __init__(self, spec: MeshSpec, infos: Mapping[str, ParameterInfo], *, waits: bool):
        self.spec, self.infos, self.waits, self.parts = spec, infos, waits, spec.ep_size
        self._bytes = sum(info.nbytes for info in infos.values())
        self._passes: dict[Hashable, CompiledPass] = {}
        self._lock = threading.Lock()

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        stack = next(iter(self.infos)).split(EXPERTS)[0]
        infos = [info for path, info in self.infos.items() if path.startswith(stack + EXPERTS)]
        return sum(info.nbytes // (info.shape[0] * info.shape[1]) for info in infos)

    @property
    def bytes_of_device(self) -> int:
        """Bytes of the parameters of one device, each of which has whole experts."""
        return self._bytes // self.spec.ep_size

    def way(self, through: LayerPass) -> Way:
        """How the rows of a pass get there and back, all that it needs compiled."""
        raise NotImplementedError

    def work(self, passes: Sequence[LayerPass], tree: Any) -> _Work:
        """What takes tokens through a stack of layers."""
        return _Work(self, tuple(passes), tree)

    def compiled(self, passes: Sequence[LayerPass], tree: Any, described: Sequence[Described]) -> CompiledPass:
        """The programs of a pass, which several steps can share."""
        shardings = tuple((one.shape, str(one.dtype), one.sharding) for one in described)
        key = tuple((one.stack, one.first, one.shape) for one in passes), tree, shardings
        with self._lock:
            if key not in self._passes:
                passing: Passing = jax.tree.unflatten(tree, described)
                everywhere = NamedSharding(passes[0].step.mesh, P())
                layers = [put(np.int32(layer), everywhere) for layer in range(passes[0].layers)]
                programs = [PassPrograms.of(self, one, passing, half) for half, one in enumerate(passes)]
                self._passes[key] = CompiledPass(programs, layers, self.waits)
            return self._passes[key]


class ExpertSide(Side):
    """Experts on devices of this process: on all of the expert devices, or on a run of them.

    Args:
        mesh: of the devices. first: the number of the first of them among all expert devices.

    Attributes:
        local: the mesh as numbers. infos: of the parameters on these devices. rules: where they are. params: these by path, assigned when
            they are loaded.
    """

    def __init__(self, spec: MeshSpec, mesh: Mesh, infos: Mapping[str, ParameterInfo], first: int = 0):
        super().__init__(spec, infos, waits=mesh.devices.flat[0].platform == "cpu")
        self.mesh, self.first, self.local = mesh, first, MeshSpec(dp_size=mesh.size)
        self.rules = Rules.for_mesh(self.local)
        self.infos = {path: _of_slots(info, self._share(info.shape[1])) for path, info in infos.items()}
        self.params: dict[str, Array] = {}

    def _share(self, of_all: int) -> int:
        return of_all // self.spec.ep_size * self.local.ep_size

    @property
    def slots(self) -> slice | None:
        """The physical experts of a layer that are here; None: all."""
        if self.local.ep_size == self.spec.ep_size:
            return None
        here = next(iter(self.infos.values())).shape[1]
        first = here // self.local.ep_size * self.first
        return slice(first, first + here)

    def described(self) -> dict[str, Described]:
        """Every parameter as a shape, its storage dtype and its sharding."""
        return {
            path: jax.ShapeDtypeStruct(
                info.shape, info.storage_dtype, sharding=self.rules.sharding(self.mesh, info.logical_axes, info.shape)
            )
            for path, info in self.infos.items()
        }

    def half(self, step: ModelStep) -> ExpertHalf:
        """The exchange's half on these devices."""
        per_device = step.placement.n_physical // self.spec.ep_size
        apart = sums_by_choice(step) and self.spec.ep_size > 1
        return ExpertHalf(self.local, self.mesh, self.first, per_device, wire_of(step), apart)

    def compile(self, step: ModelStep, stack: str, tokens: int, senders: int, cells: int) -> Compiled:
        """Compile ``(params, arrivals, layer) -> answers`` of a stack of layers.

        tokens: of a step. senders: arrays that arrive, each with ``cells`` rows for each device.
        """
        half, index = self.half(step), Described((), np.int32, sharding=NamedSharding(self.mesh, P()))
        experts = StackExperts(step, stack, half, self.rules, self.infos, tokens)
        arrivals = half.described_arrivals(senders, cells)
        return jax.jit(experts.compute).lower(self.described(), arrivals, index).compile()

    def way(self, through: LayerPass) -> WayToDevices:
        """How rows get to the devices."""
        everywhere = NamedSharding(self.mesh, P())
        layers = [put(np.int32(layer), everywhere) for layer in range(through.layers)]
        between, step = through.between(), through.step
        program = self.compile(step, through.stack, between.tokens, between.senders, between.capacity)
        return WayToDevices(self, between, self.half(step), program, layers)


def _of_slots(info: ParameterInfo, slots: int) -> ParameterInfo:
    """A parameter of experts, of so many physical ones."""
    return replace(info, shape=(info.shape[0], slots, *info.shape[2:]))


@dataclass(frozen=True)
class _Work:
    """``sharding.cut.Work`` of one pass."""

    side: Side
    passes: tuple[LayerPass, ...]
    tree: Any

    def compile(self, described: Sequence[Described]) -> tuple[Run, Sequence[Sharding]]:
        """Compile the programs of the pass, or take those of an equal one."""
        compiled = self.side.compiled(self.passes, self.tree, described)
        passing: Passing = jax.tree.unflatten(self.tree, described)

        def run(leaves: list[Array]) -> list[Array]:
            passing = jax.tree.unflatten(self.tree, leaves)
            leaves.clear()
            return jax.tree.leaves(compiled.run(passing))

        return run, [leaf.sharding for leaf in jax.tree.leaves((passing.x, passing.cache, passing.report))]


class Way(Protocol):
    """How a layer's rows get to the experts, and what these give back: for so many tokens."""

    def call(self, rows: Sequence[Array], counts: Array, layer: int, r: int = 0) -> Any:
        """Begin to have the rows of round ``r`` computed by the experts of a layer of the stack. counts: as ``Between.pack`` gives them."""

    def returned(self, away: Any) -> list[Array]:
        """The answers to a call, on the tokens' devices, as ``Between.add`` takes them."""


@dataclass(frozen=True, eq=False)
class WayToDevices:
    """``Way`` to devices of this process. layers: their numbers on these devices."""

    side: ExpertSide
    between: Between
    half: ExpertHalf
    program: Compiled
    layers: Sequence[Array]

    def call(self, rows: Sequence[Array], counts: Array, layer: int, r: int = 0) -> list[Array]:
        """Copy the rows to the experts' devices, and start their program."""
        arrivals = to_experts(self.between, self.half, rows)
        answers = self.program(self.side.params, arrivals, self.layers[layer])
        return jax.block_until_ready(answers) if self.side.waits else answers

    def returned(self, away: list[Array]) -> list[Array]:
        """Copy the answers back."""
        return to_tokens(self.between, self.half, away)


class FurtherRounds(NamedTuple):
    """The programs of rounds beyond the first, where there can be any. nothing: what is kept before the first one comes back."""

    pack: Callable
    keep: Callable
    receive: Callable
    nothing: Array
    numbers: Sequence[Array]

    @classmethod
    def of(cls, through: LayerPass, x: Any, shared: Any, routed: Routed, receive: Callable) -> FurtherRounds | None:
        """Compile the programs; None where one round is always enough. receive: makes a function's result as ``x`` is."""
        between = through.between()
        most = -(-between.rows // between.capacity)
        if most == 1:
            return None
        everywhere = NamedSharding(through.step.mesh, P())
        number, kept = Described((), np.int32, sharding=everywhere), between.described_kept
        returned = between.described_returns
        keep = lambda *taken: described_like(through.keep(*taken), kept)  # noqa: E731
        zeros = jax.jit(lambda: jnp.zeros(kept.shape, kept.dtype), out_shardings=kept.sharding)
        return cls(
            jax.jit(through.further).lower(routed, number).compile(),
            jax.jit(keep).lower(kept, routed.slots, returned, number).compile(),
            jax.jit(receive(through.receive_kept)).lower(x, shared, routed.slots, kept).compile(),
            jax.block_until_ready(zeros()),
            [put(np.int32(r), everywhere) for r in range(most)],
        )


class Away(NamedTuple):
    """A layer's tokens while their rows are away."""

    x: Array
    shared: Array | None
    routed: Routed
    called: Any
    layer: int


class PassPrograms(NamedTuple):
    """The programs of a layer for so many tokens, which take its number; and how the tokens travel between them."""

    attend: Callable
    share: Callable
    receive: Callable
    way: Way
    further: FurtherRounds | None = None
    rounds: Callable[[Array], int] = lambda counts: 1

    @classmethod
    def of(cls, side: Side, through: LayerPass, passing: Passing, half: int) -> PassPrograms:
        """Trace and compile the programs. passing: descriptions; half: which of its tokens are meant."""
        step, x = through.step, passing.x[half]
        here = Described((), np.int32, sharding=NamedSharding(step.mesh, P()))

        def attend(params, cache, report, x, tokens, copies, index):
            cache, report, *others = through.attend(params, cache, report, x, tokens, copies, index)
            return *described_like((cache, report), (passing.cache, passing.report)), *others

        own = passing.params, passing.cache, passing.report, x, passing.tokens[half], passing.copies
        attended = jax.jit(attend, donate_argnums=(1, 2)).lower(*own, here).compile()
        _, _, after, routed, _ = _results(attended)
        shared = jax.jit(through.share).lower(passing.params, routed.normed, here).compile()
        returned = through.between().described_returns

        def pinned(receive: Callable) -> Callable:
            return lambda *taken: described_like(receive(*taken), x)

        received = jax.jit(pinned(through.receive)).lower(after, _results(shared), routed.slots, returned).compile()
        further = FurtherRounds.of(through, after, _results(shared), routed, pinned)
        return cls(attended, shared, received, side.way(through), further, through.between().rounds)


@dataclass(frozen=True, eq=False)
class CompiledPass:
    """A pass through a stack of layers: of each half, or of the whole step, four programs a layer, and two moves.

    layers: the numbers of the layers on the tokens' devices. waits: as of ``Side``.
    """

    programs: Sequence[PassPrograms]
    layers: Sequence[Array]
    waits: bool

    def run(self, passing: Passing) -> tuple[list[Array], dict[str, Array], dict[str, Array]]:
        """Take tokens through the layers: give them, the cache, and the report; the latter two were given away.

        With two halves the one's experts are started before the other's sums are added and its next layer begins: each side then
        computes while the other does, and waits for it only where it is the faster one.
        """
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
                called = programs.way.call(rows, routed.counts, number)
                shared = self._done(programs.share(params, routed.normed, here))
                away[half] = Away(x, shared, routed, called, number)
        xs = [self._received(programs, one) for programs, one in zip(self.programs, away, strict=True)]
        return xs, cache, report

    def _received(self, programs: PassPrograms, away: Away) -> Array:
        """The tokens with what their experts gave; further rounds come and go here."""
        returned, rounds = programs.way.returned(away.called), programs.rounds(away.routed.counts)
        if rounds == 1:
            return self._done(programs.receive(away.x, away.shared, away.routed.slots, returned))
        further, slots = programs.further, away.routed.slots
        kept = self._done(further.keep(further.nothing, slots, returned, further.numbers[0]))
        for r in range(1, rounds):
            rows = self._done(further.pack(away.routed, further.numbers[r]))
            returned = programs.way.returned(programs.way.call(rows, away.routed.counts, away.layer, r))
            kept = self._done(further.keep(kept, slots, returned, further.numbers[r]))
        return self._done(further.receive(away.x, away.shared, slots, kept))

    def _done(self, results: Any) -> Any:
        return jax.block_until_ready(results) if self.waits else results


def _results(program: Compiled) -> Any:
    """Descriptions of what a program gives."""
    return jax.tree.map(
        lambda info, sharding: Described(info.shape, info.dtype, sharding=sharding),
        program.out_info,
        program.output_shardings,
    )
