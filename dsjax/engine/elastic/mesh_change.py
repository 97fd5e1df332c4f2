"""Which mesh a model can go on with when devices go or come, and which of the engine's options that changes. No device is touched."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from dsjax.config import ModelConfig
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.assembly import check_layout
from dsjax.engine.setup.expert_location import ExpertLocation
from dsjax.errors import UserError
from dsjax.model.parameters import Weights
from sharding import MeshError, MeshSpec

_log = logging.getLogger(__name__)


class NoMeshError(UserError):
    """Not even one DP rank is left."""


def redundant_experts(args: EngineArgs, config: ModelConfig, spec: MeshSpec) -> int:
    """Copies of experts on this mesh: the least number, from what was asked for at the start on, with which experts divide evenly."""
    if not config.n_routed_experts:
        return 0
    asked = args.num_redundant
    return asked + -(config.n_routed_experts + asked) % spec.ep_size


def check_mesh(args: EngineArgs, config: ModelConfig, weights: Weights, spec: MeshSpec, devices: Sequence[Any]) -> None:
    """Refuse a mesh that a running engine cannot change to.

    devices: that there are.

    Raises:
        UserError, MeshError: saying what was found, and what would do.
    """
    if spec.pp_size > 1:
        raise MeshError(
            f"mesh {spec} has stages, and a running engine changes to a mesh without them alone; leave pp out, or start the engine with "
            f"--mesh {spec}"
        )
    if spec.num_devices > len(devices):
        raise MeshError(
            f"mesh {spec} wants {spec.num_devices} devices, and this server has {len(devices)}; ask for at most that, or start it "
            "with more"
        )
    check_layout(config, spec, redundant_experts(args, config, spec), weights, dense_tp=args.moe_dense_tp_size)


def largest_mesh(
    args: EngineArgs, config: ModelConfig, weights: Weights, wanted: MeshSpec, devices: Sequence[Any]
) -> MeshSpec:
    """Find the wanted mesh, or with fewer DP ranks what these devices have room for: `tp` stays, `ep` where it divides.

    Raises:
        NoMeshError: the devices are too few for one DP rank.
    """
    for spec in _smaller(wanted, len(devices) // wanted.tp_size):
        try:
            check_layout(config, spec, redundant_experts(args, config, spec), weights, dense_tp=args.moe_dense_tp_size)
        except MeshError:
            continue
        return spec
    raise NoMeshError(
        f"{len(devices)} devices are left, too few for one DP rank of tp={wanted.tp_size} that this model fits"
    )


def changed_options(args: EngineArgs, config: ModelConfig, spec: MeshSpec) -> dict[str, Any]:
    """List the engine's options that another mesh changes, `mesh` among them; plain values."""
    options: dict[str, Any] = {"mesh": str(spec)}
    redundant = redundant_experts(args, config, spec)
    if args.eplb is None:
        options["redundant_experts"] = redundant
    elif spec.ep_size == 1:
        _log.warning("Experts are not balanced on %s: every device holds all of them.", spec)
        options |= {"enable_eplb": False, "eplb_config": None, "redundant_experts": 0}
    else:
        given = dataclasses.asdict(args.eplb) | {"num_redundant_experts": redundant}
        options |= {"eplb_config": given, "redundant_experts": 0}
    location = args.init_expert_location
    if location is not None and str(spec) != args.mesh and ExpertLocation.read(location).logical_load is None:
        _log.warning("--init-expert-location has places for %s alone; on %s experts are in order.", args.mesh, spec)
        options["init_expert_location"] = None
    return options


def _smaller(wanted: MeshSpec, most: int) -> Iterator[MeshSpec]:
    """Meshes with `wanted`'s `tp`, largest first; of each size with its `ep` and `etp`, then its `etp`, then one EP group of all."""
    for dp in range(min(wanted.dp_size, most), 0, -1):
        if wanted.ep_size != wanted.num_devices:
            with contextlib.suppress(MeshError):
                yield MeshSpec(dp, wanted.tp_size, wanted.ep_size, wanted.etp_size)
        if "etp" in wanted.axes:
            with contextlib.suppress(MeshError):
                yield MeshSpec(dp, wanted.tp_size, etp_size=wanted.etp_size)
        yield MeshSpec(dp, wanted.tp_size)
