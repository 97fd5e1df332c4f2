"""``ExpertSide``: devices with routed experts and nothing else, and how the host takes a step's tokens to them and back."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
        self._passes: dict[Hashable, _CompiledPass] = {}
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

    def work(self, through: LayerPass) -> _Work:
        """What takes tokens through a stack of layers."""
        return _Work(self, through)

    def compiled(self, through: LayerPass, described: Sequence[Described]) -> _CompiledPass:
        """The programs of a pass, which several steps can share."""
        shardings = tuple((one.shape, str(one.dtype), one.sharding) for one in described)
        key = through.stack, through.first, through.tree, through.shape, shardings
        with self._lock:
            if key not in self._passes:
                self._passes[key] = _CompiledPass.of(self, through, described)
            return self._passes[key]


@dataclass(frozen=True)
class _Work:
    """``sharding.cut.Work`` of one pass."""

    side: ExpertSide
    through: LayerPass

    def compile(self, described: Sequence[Described]) -> tuple[Run, Sequence[Sharding]]:
        """Compile the programs of the pass, or take those of an equal one."""
        compiled = self.side.compiled(self.through, described)
        passing: Passing = jax.tree.unflatten(self.through.tree, described)
        return compiled.run, [leaf.sharding for leaf in jax.tree.leaves((passing.x, passing.cache))]


@dataclass(frozen=True, eq=False)
class _CompiledPass:
    """A pass through a stack of layers: four programs a layer, and two moves.

    layers: the numbers of the layers on the tokens' devices and on the experts'.
    """

    side: ExpertSide
    through: LayerPass
    attend: Compiled
    share: Compiled
    compute: Compiled
    receive: Compiled
    layers: Sequence[tuple[Array, Array]]

    @classmethod
    def of(cls, side: ExpertSide, through: LayerPass, described: Sequence[Described]) -> _CompiledPass:
        """Trace and compile the programs. described: the leaves of a ``Passing``."""
        passing: Passing = jax.tree.unflatten(through.tree, described)
        step, between = through.step, through.between
        everywhere = NamedSharding(step.mesh, P()), NamedSharding(side.mesh, P())
        numbers = [tuple(put(np.int32(layer), sharding) for sharding in everywhere) for layer in range(through.layers)]
        here, there = (Described((), np.int32, sharding=sharding) for sharding in everywhere)

        def attend(params, cache, x, tokens, copies, index):
            cache, *others = through.attend(params, cache, x, tokens, copies, index)
            return described_like(cache, passing.cache), *others

        own = passing.params, passing.cache, passing.x, passing.tokens, passing.copies
        attended = jax.jit(attend, donate_argnums=1).lower(*own, here).compile()
        _, x, normed, slots, rows = _results(attended)
        shared = jax.jit(through.share).lower(passing.params, normed, here).compile()
        arrivals = [_in_place_of(rows, one) for one in between.described_arrivals]
        computed = jax.jit(through.compute).lower(side.described(), arrivals, there).compile()
        answers = _results(computed)
        returned = [_in_place_of(answers[0], one) for one in between.described_returns]

        def receive(x, shared, slots, returned):
            return described_like(through.receive(x, shared, slots, returned), passing.x)

        received = jax.jit(receive).lower(x, _results(shared), slots, returned).compile()
        return cls(side, through, attended, shared, computed, received, numbers)

    def run(self, leaves: list[Array]) -> list[Array]:
        """Take tokens through the layers. leaves: of a ``Passing``; the list is emptied, and the cache given away."""
        passing: Passing = jax.tree.unflatten(self.through.tree, leaves)
        leaves.clear()
        between, experts = self.through.between, self.side.params
        params, tokens, copies, x, cache = passing.params, passing.tokens, passing.copies, passing.x, passing.cache
        del passing
        for here, there in self.layers:
            cache, x, normed, slots, rows = self._done(self.attend(params, cache, x, tokens, copies, here))
            answers = self.compute(experts, between.to_experts(rows), there)
            if self.side.waits:
                jax.block_until_ready(answers)
            shared = self._done(self.share(params, normed, here))
            x = self._done(self.receive(x, shared, slots, between.to_tokens(answers)))
        return jax.tree.leaves((x, cache))

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
