"""Layouts of an instance: every mesh with the redundant experts that make it fit, checked by `MeshSpec`."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from dsjax.config import ModelConfig
from sharding.errors import MeshError
from sharding.mesh import MeshSpec


@dataclass(frozen=True)
class InstanceLayout:
    """One instance of the engine: a mesh and its redundant experts."""

    mesh: MeshSpec
    redundant: int = 0
    fused: bool = False  # the shared expert is a routed one with a copy on each device
    experts: int = 0  # additional devices that hold only the routed experts (AFD); 0: the mesh's devices hold them

    @cached_property
    def devices(self) -> int:
        """Devices of the instance."""
        return self.mesh.num_devices + self.experts

    @property
    def expert_mesh(self) -> MeshSpec:
        """The mesh that holds the routed experts."""
        return MeshSpec(dp_size=self.experts) if self.experts else self.mesh

    @property
    def kind(self) -> str:
        """Dynamo's name: TP, TEP or DEP with its width, or a combination."""
        mesh = self.mesh
        if self.experts:
            return f"attention on {mesh.num_devices}, experts on {self.experts}"
        if mesh.pp_size > 1:
            return f"PP{mesh.pp_size}×{InstanceLayout(mesh.stage).kind}"
        experts = "TP" if mesh.splits_expert_width else "TEP"
        if mesh.num_devices == 1:
            return "one device"
        if mesh.dp_size == 1:
            return f"{experts}{mesh.tp_size}"
        is_split = "etp" in mesh.axes
        wide = f"×{'TP' if is_split else experts}{mesh.tp_size}" if mesh.tp_size > 1 else ""
        name = f"DP{mesh.dp_size}{wide}" if wide or is_split else f"DEP{mesh.dp_size}"
        name += f", ETP{mesh.etp_size}" if is_split else ""
        return name if mesh.ep_size == mesh.num_devices else f"{name}, EP{mesh.ep_size}"

    @cached_property
    def unit(self) -> InstanceLayout:
        """One copy of the experts, on one stage's devices. A stage has `expert_copies` of them, which do not communicate."""
        mesh = self.mesh
        one = MeshSpec(mesh.dp_size // mesh.expert_copies, mesh.tp_size, mesh.ep_size, mesh.etp_size)
        return self if self.experts else InstanceLayout(one, self.redundant, self.fused)

    def __str__(self) -> str:
        experts = f", experts ep={self.experts}" if self.experts else ""
        return f"{self.mesh}{experts}" + (f" +{self.redundant}" if self.redundant else "")


def fits(
    config: ModelConfig, layout: InstanceLayout, block: int | None, expert_block: int | None = None
) -> MeshError | None:
    """Return the error of `MeshSpec.check_fits` for the model, or None. block, expert_block: as in `Precision.blocks`."""
    if layout.mesh.pp_size > config.num_hidden_layers:
        return MeshError(f"mesh {layout.mesh} has more stages than the model has layers, {config.num_hidden_layers}")
    about = {"experts": config.n_routed_experts, "redundant": layout.redundant}
    routed = {**about, "expert_width": config.moe_intermediate_size, "expert_block": expert_block, "block": block}
    dense = {"heads": config.head_groups, "dense_widths": config.widths_over_tp(block is not None), "block": block}
    try:
        if layout.experts:
            layout.expert_mesh.check_fits(heads=layout.experts, **routed)
        layout.mesh.check_fits(**(dense if layout.experts else routed | dense))
    except MeshError as error:
        return error
    return None


def instance_sizes(devices: int, per_host: int) -> list[int]:
    """Return the possible sizes of an instance: divisors of a host, and whole hosts."""
    parts = [n for n in range(1, min(per_host, devices) + 1) if per_host % n == 0]
    return parts + list(range(2 * per_host, devices + 1, per_host))


def layouts(
    config: ModelConfig,
    devices: int,
    per_host: int,
    *,
    redundant: int | None,
    copies: bool,
    stages: Collection[int] = (1,),
    **blocks: int | None,
) -> Iterator[InstanceLayout]:
    """Yield every layout of an instance of at most `devices` devices that fits the model.

    copies: also try several copies of the experts (`dp=32,ep=8`), which act as smaller instances behind one front end. stages: numbers of
    pipeline stages to try; a stage and the whole instance are each a divisor of a host or whole hosts. redundant, blocks: as in
    `with_redundancy`."""
    sizes = instance_sizes(devices, per_host)
    of_stages = ((pp, size) for pp in stages for size in instance_sizes(devices // pp, per_host) if pp * size in sizes)
    most = 2 * max(config.n_routed_experts, 1)
    meshes = (
        _mesh(size // tp, tp, ep, pp)
        for pp, size in of_stages
        for tp in _divisors(size)
        if config.head_groups % tp == 0 and tp <= 2 * per_host
        for ep in _divisors(size)
        if ep <= most
    )
    usable = ((mesh, 0) for mesh in meshes if mesh is not None and (copies or mesh.expert_copies == 1))
    return with_redundancy(config, usable, redundant, **blocks)


def with_redundancy(
    config: ModelConfig,
    meshes: Iterable[tuple[MeshSpec, int]],
    redundant: int | None,
    block: int | None,
    expert_block: int | None = None,
) -> Iterator[InstanceLayout]:
    """Yield the layouts that fit the model. meshes: (mesh, additional devices that hold the experts, or 0).

    redundant: physical minus logical experts; None: try the fewest that divide over the EP group, and the fewest of at least 32 that do.
    """
    for mesh, experts in meshes:
        for extra in _redundancies(config.n_routed_experts, experts or mesh.ep_size, redundant):
            layout = InstanceLayout(mesh, extra, experts=experts)
            if fits(config, layout, block, expert_block) is None:
                yield layout


def _mesh(dp: int, tp: int, ep: int, pp: int) -> MeshSpec | None:
    try:
        return MeshSpec(dp_size=dp, tp_size=tp, ep_size=ep, pp_size=pp)
    except MeshError:
        return None


def _redundancies(logical: int, ep: int, wanted: int | None) -> list[int]:
    if wanted is not None or not logical:
        return [wanted or 0]
    least = -logical % ep
    return sorted({least, least + max(0, -(-(32 - least) // ep)) * ep}) if ep > 1 else [0]


@functools.cache
def _divisors(number: int) -> tuple[int, ...]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return (*small, *(number // d for d in reversed(small) if d * d != number))


def parse_layout(mesh: str, redundant: int | None, config: ModelConfig) -> InstanceLayout:
    """Parse a user's mesh. redundant: redundant experts; None: the fewest that fit.

    Raises:
        MeshError: the mesh does not parse, or does not fit the model.
    """
    spec = MeshSpec.parse(mesh)
    layout = InstanceLayout(spec, -config.n_routed_experts % spec.ep_size if redundant is None else redundant)
    problem = fits(config, layout, None)
    if problem:
        raise problem
    return layout
