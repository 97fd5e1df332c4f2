"""``ExpertSide``: devices with routed experts and nothing else, and how the host takes a step's tokens to them and back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled
from jaxtyping import Array

from dsjax.model.apart import EXPERTS, LayerPass, Passing, described_like
from dsjax.model.parameters import ParameterInfo, device_bytes
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


def with_experts_apart(step: ModelStep, spec: MeshSpec, mesh: Mesh) -> ModelStep:
    """A step whose routed experts are on the devices of ``mesh``, and everything else where it was."""
    infos = {path: info for path, info in step.table.infos.items() if EXPERTS in path}
    return replace(step, table=step.table.without(infos), apart=ExpertSide(spec, mesh, infos))


class ExpertSide:
    """The devices that have the routed experts: ``ExpertsApart`` of a model's step.

    They keep nothing from one call to the next but parameters. Between two steps others may be put in their place.

    Args:
        spec, mesh: ``ep=N`` and its devices. infos: of the experts' parameters.

    Attributes:
        params: the parameters by path, assigned when they are loaded.
        waits: whether each program is waited for before the next starts: emulated devices that share a host's cores can deadlock in
            collectives of programs that are in flight together.
    """

    def __init__(self, spec: MeshSpec, mesh: Mesh, infos: Mapping[str, ParameterInfo]):
        self.spec, self.mesh, self.infos = spec, mesh, infos
        self.rules = Rules.for_mesh(spec)
        self.params: dict[str, Array] = {}
        self.waits = mesh.devices.flat[0].platform == "cpu"
        self._passes: dict[Hashable, CompiledPass] = {}
        self._lock = threading.Lock()

    def described(self) -> dict[str, Described]:
        """Every parameter as a shape, its storage dtype and its sharding."""
        return {
            path: jax.ShapeDtypeStruct(
                info.shape, info.storage_dtype, sharding=self.rules.sharding(self.mesh, info.logical_axes, info.shape)
            )
            for path, info in self.infos.items()
        }

    @property
    def bytes_of_device(self) -> int:
        """Bytes of the parameters of one device."""
        return sum(device_bytes(self.described()).values())

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
                everywhere = NamedSharding(passes[0].step.mesh, P()), NamedSharding(self.mesh, P())
                layers = [
                    tuple(put(np.int32(layer), sharding) for sharding in everywhere)
                    for layer in range(passes[0].layers)
                ]
                programs = [PassPrograms.of(self, one, passing, half) for half, one in enumerate(passes)]
                self._passes[key] = CompiledPass(self, programs, layers)
            return self._passes[key]


@dataclass(frozen=True)
class _Work:
    """``sharding.cut.Work`` of one pass."""

    side: ExpertSide
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


class PassPrograms(NamedTuple):
    """The programs of a layer for so many tokens, which take its number; and how the tokens travel between them."""

    attend: Callable
    share: Callable
    compute: Callable
    receive: Callable
    between: Between

    @classmethod
    def of(cls, side: ExpertSide, through: LayerPass, passing: Passing, half: int) -> PassPrograms:
        """Trace and compile the programs. passing: descriptions; half: which of its tokens are meant."""
        step, between, x = through.step, through.between, passing.x[half]
        here, there = (Described((), np.int32, sharding=NamedSharding(mesh, P())) for mesh in (step.mesh, side.mesh))

        def attend(params, cache, x, tokens, copies, index):
            cache, *others = through.attend(params, cache, x, tokens, copies, index)
            return described_like(cache, passing.cache), *others

        own = passing.params, passing.cache, x, passing.tokens[half], passing.copies
        attended = jax.jit(attend, donate_argnums=1).lower(*own, here).compile()
        _, after, normed, slots, rows = _results(attended)
        shared = jax.jit(through.share).lower(passing.params, normed, here).compile()
        arrivals = [_in_place_of(rows, one) for one in between.described_arrivals]
        computed = jax.jit(through.compute).lower(side.described(), arrivals, there).compile()
        answers = _results(computed)
        returned = [_in_place_of(answers[0], one) for one in between.described_returns]

        def receive(x, shared, slots, returned):
            return described_like(through.receive(x, shared, slots, returned), passing.x[half])

        received = jax.jit(receive).lower(after, _results(shared), slots, returned).compile()
        return cls(attended, shared, computed, received, between)


@dataclass(frozen=True, eq=False)
class CompiledPass:
    """A pass through a stack of layers: of each half, or of the whole step, four programs a layer, and two moves.

    layers: the numbers of the layers on the tokens' devices and on the experts'.
    """

    side: ExpertSide
    programs: Sequence[PassPrograms]
    layers: Sequence[tuple[Array, Array]]

    def run(self, passing: Passing) -> tuple[list[Array], dict[str, Array]]:
        """Take tokens through the layers: give them, and the cache, which was given away.

        With two halves the one's experts are started before the other's sums are added and its next layer begins: each side then
        computes while the other does, and waits for it only where it is the faster one.
        """
        experts, params, cache, tokens, copies = (
            self.side.params,
            passing.params,
            passing.cache,
            passing.tokens,
            passing.copies,
        )
        xs = passing.x
        away: list[tuple] = [()] * len(xs)
        for here, there in self.layers:
            for half, programs in enumerate(self.programs):
                if away[half]:
                    xs[half] = self._done(programs.receive(*away[half]))
                cache, x, normed, slots, rows = self._done(
                    programs.attend(params, cache, xs[half], tokens[half], copies, here)
                )
                answers = self._done(programs.compute(experts, programs.between.to_experts(rows), there))
                returned = programs.between.to_tokens(answers)
                away[half] = x, self._done(programs.share(params, normed, here)), slots, returned
        xs = [self._done(programs.receive(*one)) for programs, one in zip(self.programs, away, strict=True)]
        return xs, cache

    def _done(self, results: Any) -> Any:
        return jax.block_until_ready(results) if self.side.waits else results


def _results(program: Compiled) -> Any:
    """Descriptions of what a program gives."""
    return jax.tree.map(
        lambda info, sharding: Described(info.shape, info.dtype, sharding=sharding),
        program.out_info,
        program.output_shardings,
    )


def _in_place_of(made: Described, wanted: Described) -> Described:
    """What is to be moved, as where it goes to: the dtype is that of what was made.

    Raises:
        ValueError: another dtype than was described.
    """
    if made.dtype != wanted.dtype:
        raise ValueError(f"rows of {made.dtype} travel, expected {wanted.dtype}")
    return wanted
