"""Choice of the next mesh when devices leave or join, and of the engine options that change with it. No device is touched."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from dsjax.config import ModelConfig
from dsjax.engine.afd.options import afd_addresses, expert_spec
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.expert_location import ExpertLocation
from dsjax.engine.setup.fitting import check_layout
from dsjax.errors import UserError
from dsjax.model.parameters import Weights
from dsjax.model.stage import stages_of
from sharding import MeshError, MeshSpec

_log = logging.getLogger(__name__)


class NoMeshError(UserError):
    """The remaining devices are too few for one DP rank."""


def redundant_experts(args: EngineArgs, config: ModelConfig, spec: MeshSpec) -> int:
    """Return the smallest number of redundant experts ≥ the requested one that divides evenly on this mesh, or on `--expert-mesh`."""
    if not config.n_routed_experts:
        return 0
    requested, expert_mesh_spec = args.num_redundant, expert_spec(args) or spec
    return requested + -(config.n_routed_experts + requested) % expert_mesh_spec.ep_size


def num_expert_devices(args: EngineArgs) -> int:
    """Return the number of this process's devices that have only routed experts."""
    experts = expert_spec(args)
    return 0 if experts is None or args.afd_role == "attention" else experts.num_devices


def with_expert_processes(args: EngineArgs, expert_mesh: str | None, afd_address: str | None) -> EngineArgs:
    """Return the options with other expert processes. None keeps that option. Raise `UserError` for an invalid combination."""
    if args.afd_role != "attention":
        raise UserError(
            f"afd_address is {afd_address}, and this engine has no experts in other processes (--afd-role attention); leave it out"
        )
    changed = dataclasses.replace(
        args, expert_mesh=expert_mesh or args.expert_mesh, afd_address=afd_address or args.afd_address
    )
    if set(afd_addresses(changed)) & set(afd_addresses(args)):
        raise UserError(
            f"--afd-address {changed.afd_address} names a process of {args.afd_address}, which the engine uses now; start the new expert "
            "processes beside these, at other addresses"
        )
    return changed


def with_expert_mesh(args: EngineArgs, expert_mesh: str) -> EngineArgs:
    """Return the options with the experts on other devices of this process. Raise `UserError` for an invalid combination."""
    if args.expert_mesh is None:
        raise UserError(
            f"expert_mesh is {expert_mesh}, and the experts of this engine are on the devices of its mesh; give mesh alone"
        )
    return dataclasses.replace(
        args, expert_mesh=expert_mesh, init_expert_location=_location(args, args.expert_mesh, expert_mesh)
    )


def check_mesh(
    args: EngineArgs,
    config: ModelConfig,
    weights: Weights,
    spec: MeshSpec,
    devices: Sequence[Any],
    several_processes: bool = False,
) -> None:
    """Raise `UserError` or `MeshError` for a mesh that a running engine cannot change to. several_processes: how it was started."""
    if spec.pp_size > 1:
        if several_processes:
            raise MeshError(
                f"mesh {spec} has stages, and an engine of several processes can change only to a mesh without stages; leave pp out, or "
                f"start the engine with --mesh {spec}"
            )
        stages_of(config, spec.pp_size, given=_partition(args, spec), mtp=args.speculation is not None)
    experts, reserved = expert_spec(args), num_expert_devices(args)
    if experts is not None and spec.ep_size != spec.stage_devices:
        raise MeshError(f"mesh {spec} has ep, and its devices have no routed experts (--expert-mesh); leave ep out")
    wanted, all_wanted = f"mesh {spec} wants", spec.num_devices + reserved
    if reserved:
        wanted = f"mesh {spec} and the experts' {args.expert_mesh} want"
    if all_wanted > len(devices):
        raise MeshError(
            f"{wanted} {all_wanted} devices, and this server has {len(devices)}; ask for a mesh of at most so many, or start the "
            "server with more"
        )
    _check_layout(args, config, weights, spec)


def largest_mesh(
    args: EngineArgs, config: ModelConfig, weights: Weights, wanted: MeshSpec, devices: Sequence[Any]
) -> MeshSpec:
    """Return the wanted mesh, or the largest with fewer DP ranks: same `tp` and stages, same `ep` if it divides. Raise `NoMeshError`."""
    if wanted.pp_size > 1:
        if len(devices) < wanted.num_devices:
            raise NoMeshError(f"{len(devices)} devices are left, too few for mesh {wanted}")
        return wanted
    max_devices = len(devices) - num_expert_devices(args)
    for spec in _smaller(wanted, max_devices // wanted.tp_size):
        try:
            _check_layout(args, config, weights, spec)
        except MeshError:
            continue
        return spec
    raise NoMeshError(
        f"{len(devices)} devices are left, too few for one DP rank of tp={wanted.tp_size} that this model fits"
    )


def changed_options(args: EngineArgs, config: ModelConfig, spec: MeshSpec) -> dict[str, Any]:
    """Return the engine options that change with the mesh, including `mesh`, as plain values."""
    options: dict[str, Any] = {"mesh": str(spec)}
    experts, redundant = expert_spec(args), redundant_experts(args, config, spec)
    if experts is not None:
        options |= {"attention_mesh": str(spec), "expert_mesh": args.expert_mesh, "afd_address": args.afd_address}
    if args.pp_layer_partition is not None and _partition(args, spec) is None:
        _log.warning("--pp-layer-partition is of another number of stages; on %s layers are divided evenly.", spec)
        options["pp_layer_partition"] = None
    if args.eplb is None:
        options["redundant_experts"] = redundant
    elif (experts or spec).ep_size == 1:
        _log.warning("Experts are not balanced on %s: every device holds all of them.", spec)
        options |= {"enable_eplb": False, "eplb_config": None, "redundant_experts": 0}
    else:
        given = dataclasses.asdict(args.eplb) | {"num_redundant_experts": redundant}
        options |= {"eplb_config": given, "redundant_experts": 0}
    if args.init_expert_location is not None and experts is None:
        options["init_expert_location"] = _location(args, args.mesh, str(spec))
    return options


def _location(args: EngineArgs, before: str, after: str) -> str | None:
    """Return `--init-expert-location`; None if it only has a placement for another mesh and no loads to compute a new one."""
    location = args.init_expert_location
    if location is not None and before != after and ExpertLocation.read(location).logical_load is None:
        _log.warning("--init-expert-location has places for %s alone; on %s experts are in order.", before, after)
        return None
    return location


def _partition(args: EngineArgs, spec: MeshSpec) -> str | None:
    """Return `--pp-layer-partition` if its number of stages matches this mesh; else None."""
    given = args.pp_layer_partition
    return given if given is not None and len(given.split(",")) == spec.pp_size > 1 else None


def _check_layout(args: EngineArgs, config: ModelConfig, weights: Weights, spec: MeshSpec) -> None:
    """Check that the model divides evenly on this mesh, and the experts on their devices."""
    redundant = redundant_experts(args, config, spec)
    check_layout(config, spec.stage, redundant, weights, expert_spec(args), args.moe_dense_tp_size)


def _smaller(wanted: MeshSpec, max_devices: int) -> Iterator[MeshSpec]:
    """Yield meshes with `wanted`'s `tp`, largest first; for each size with its `ep` and `etp`, then its `etp`, then one EP group of all."""
    for dp in range(min(wanted.dp_size, max_devices), 0, -1):
        if wanted.ep_size != wanted.num_devices:
            with contextlib.suppress(MeshError):
                yield MeshSpec(dp, wanted.tp_size, wanted.ep_size, wanted.etp_size)
        if "etp" in wanted.axes:
            with contextlib.suppress(MeshError):
                yield MeshSpec(dp, wanted.tp_size, etp_size=wanted.etp_size)
        yield MeshSpec(dp, wanted.tp_size)
