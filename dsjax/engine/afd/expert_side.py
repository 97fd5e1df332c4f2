"""``ExpertSide``: devices with routed experts and nothing else, and how the host takes a step's tokens to them and back."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled
from jaxtyping import Array

from dsjax.engine.device.access import DevicePart
from dsjax.model.apart import EXPERTS, LayerPass, Passing, described_like
from dsjax.model.parameters import ParameterInfo
from dsjax.model.step import ModelStep
from sharding import MeshError, MeshSpec, Rules
from sharding.arrays import put
from sharding.cut import Described, Run
from sharding.dispatch.between import Between
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
        waits: whether each program is waited for before the next starts: emulated devices that share a host's cores can deadlock in
            collectives of programs that are in flight together.
    """

    def __init__(self, spec: MeshSpec, infos: Mapping[str, ParameterInfo], *, waits: bool):
        self.spec, self.infos, self.waits = spec, infos, waits
        self._passes: dict[Hashable, CompiledPass] = {}
        self._lock = threading.Lock()

    @property
    def bytes_of_device(self) -> int:
        """Bytes of the parameters of one device, each of which has whole experts."""
        return sum(info.nbytes for info in self.infos.values()) // self.spec.ep_size

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
    """Experts on devices of this process.

    Args:
        mesh: of the devices.

    Attributes:
        rules: where their parameters are. params: these by path, assigned when they are loaded.
    """

    def __init__(self, spec: MeshSpec, mesh: Mesh, infos: Mapping[str, ParameterInfo]):
        super().__init__(spec, infos, waits=mesh.devices.flat[0].platform == "cpu")
        self.mesh, self.rules = mesh, Rules.for_mesh(spec)
        self.params: dict[str, Array] = {}

    def described(self) -> dict[str, Described]:
        """Every parameter as a shape, its storage dtype and its sharding."""
        return {
            path: jax.ShapeDtypeStruct(
                info.shape, info.storage_dtype, sharding=self.rules.sharding(self.mesh, info.logical_axes, info.shape)
            )
            for path, info in self.infos.items()
        }

    def compile(self, through: LayerPass) -> Compiled:
        """Compile ``(params, arrivals, layer) -> answers`` for the rows of a pass."""
        index = Described((), np.int32, sharding=NamedSharding(self.mesh, P()))
        compute = functools.partial(through.compute, self.mesh, self.rules)
        return jax.jit(compute).lower(self.described(), through.between(self.mesh).described_arrivals, index).compile()

    def way(self, through: LayerPass) -> WayToDevices:
        """How rows get to the devices."""
        everywhere = NamedSharding(self.mesh, P())
        layers = [put(np.int32(layer), everywhere) for layer in range(through.layers)]
        return WayToDevices(self, through.between(self.mesh), self.compile(through), layers)


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

        return run, [leaf.sharding for leaf in jax.tree.leaves((passing.x, passing.cache))]


class Way(Protocol):
    """How a layer's rows get to the experts, and what these give back: for so many tokens."""

    def call(self, rows: Array, layer: int) -> Any:
        """Begin to have the rows computed by the experts of a layer of the stack."""

    def returned(self, away: Any) -> list[Array]:
        """The answers to a call, on the tokens' devices, as ``Between.add`` takes them."""


@dataclass(frozen=True, eq=False)
class WayToDevices:
    """``Way`` to devices of this process. layers: their numbers on these devices."""

    side: ExpertSide
    between: Between
    program: Compiled
    layers: Sequence[Array]

    def call(self, rows: Array, layer: int) -> list[Array]:
        """Copy the rows to the experts' devices, and start their program."""
        answers = self.program(self.side.params, self.between.to_experts(rows), self.layers[layer])
        return jax.block_until_ready(answers) if self.side.waits else answers

    def returned(self, away: list[Array]) -> list[Array]:
        """Copy the answers back."""
        return self.between.to_tokens(away)


class PassPrograms(NamedTuple):
    """The programs of a layer for so many tokens, which take its number; and how the tokens travel between them."""

    attend: Callable
    share: Callable
    receive: Callable
    way: Way

    @classmethod
    def of(cls, side: Side, through: LayerPass, passing: Passing, half: int) -> PassPrograms:
        """Trace and compile the programs. passing: descriptions; half: which of its tokens are meant."""
        step, x = through.step, passing.x[half]
        here = Described((), np.int32, sharding=NamedSharding(step.mesh, P()))

        def attend(params, cache, x, tokens, copies, index):
            cache, *others = through.attend(params, cache, x, tokens, copies, index)
            return described_like(cache, passing.cache), *others

        own = passing.params, passing.cache, x, passing.tokens[half], passing.copies
        attended = jax.jit(attend, donate_argnums=1).lower(*own, here).compile()
        _, after, normed, slots, _ = _results(attended)
        shared = jax.jit(through.share).lower(passing.params, normed, here).compile()
        returned = through.between().described_returns

        def receive(x, shared, slots, returned):
            return described_like(through.receive(x, shared, slots, returned), passing.x[half])

        received = jax.jit(receive).lower(after, _results(shared), slots, returned).compile()
        return cls(attended, shared, received, side.way(through))


@dataclass(frozen=True, eq=False)
class CompiledPass:
    """A pass through a stack of layers: of each half, or of the whole step, four programs a layer, and two moves.

    layers: the numbers of the layers on the tokens' devices. waits: as of ``Side``.
    """

    programs: Sequence[PassPrograms]
    layers: Sequence[Array]
    waits: bool

    def run(self, passing: Passing) -> tuple[list[Array], dict[str, Array]]:
        """Take tokens through the layers: give them, and the cache, which was given away.

        With two halves the one's experts are started before the other's sums are added and its next layer begins: each side then
        computes while the other does, and waits for it only where it is the faster one.
        """
        params, cache, tokens, copies = passing.params, passing.cache, passing.tokens, passing.copies
        xs = passing.x
        away: list[tuple] = [()] * len(xs)
        for number, here in enumerate(self.layers):
            for half, programs in enumerate(self.programs):
                if away[half]:
                    xs[half] = self._received(programs, away[half])
                cache, x, normed, slots, rows = self._done(
                    programs.attend(params, cache, xs[half], tokens[half], copies, here)
                )
                called = programs.way.call(rows, number)
                away[half] = x, self._done(programs.share(params, normed, here)), slots, called
        xs = [self._received(programs, one) for programs, one in zip(self.programs, away, strict=True)]
        return xs, cache

    def _received(self, programs: PassPrograms, away: tuple) -> Array:
        x, shared, slots, called = away
        return self._done(programs.receive(x, shared, slots, programs.way.returned(called)))

    def _done(self, results: Any) -> Any:
        return jax.block_until_ready(results) if self.waits else results


def _results(program: Compiled) -> Any:
    """Descriptions of what a program gives."""
    return jax.tree.map(
        lambda info, sharding: Described(info.shape, info.dtype, sharding=sharding),
        program.out_info,
        program.output_shardings,
    )
