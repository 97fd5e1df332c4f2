"""``--attention-mesh`` and ``--expert-mesh``: what they may be, and what does not go with them. No JAX."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any, TypeVar

from dsjax.errors import UserError
from dsjax.hosts.wire import split_address

if TYPE_CHECKING:
    from sharding.mesh import MeshSpec

Args = TypeVar("Args")
"""`EngineArgs`, which are checked here where they are made, so that this module cannot name them."""

_REFUSED = {
    "prefill_mesh": "prompts are computed on the attention side",
    "disaggregation_mode": "prompts are computed on the attention side",
    "coordinator_address": "each side is one process (--afd-role)",
    "enable_eplb": "experts stay where they are; --redundant-experts and --init-expert-location place them",
    "ep_dispatch_algorithm": "no device of an expert is nearer than another",
    "enable_shared_experts_fusion": "shared experts are on the attention side",
    "dispatch": "rows go to all of the experts' devices",
    "moe_chunk_tokens": "a step's tokens travel at once; give a smaller --max-num-batched-tokens",
}
"""Options that do not go with experts apart, and why."""


def check_apart(args: Args) -> None:
    """Check the two meshes, and that the other options go with them.

    Raises:
        UserError: they do not. MeshError: a mesh cannot be.
    """
    if args.attention_mesh is None and args.expert_mesh is None:
        if args.afd_role != "both" or args.afd_address is not None:
            raise UserError("--afd-role and --afd-address go with --attention-mesh and --expert-mesh; give these too")
        return
    if (args.afd_role == "both") != (args.afd_address is None):
        raise UserError(
            f"--afd-role is {args.afd_role} and --afd-address {args.afd_address}; an address is for two processes, --afd-role attention "
            "and --afd-role expert, and both need it"
        )
    for given, other in (("attention", "expert"), ("expert", "attention")):
        if getattr(args, f"{other}_mesh") is None:
            raise UserError(f"--{given}-mesh is given without --{other}-mesh; give both, or --mesh alone")
    if args.afd_address is not None:
        try:
            split_address(args.afd_address)
        except UserError:
            raise UserError(
                f"--afd-address is {args.afd_address!r}, expected HOST:PORT, such as 10.0.0.2:7000"
            ) from None
    if args.mesh not in (type(args).mesh, args.attention_mesh):
        raise UserError(
            f"--mesh {args.mesh} is given with --attention-mesh and --expert-mesh, which name all devices; leave one out"
        )
    expert_spec(args)
    from sharding.mesh import MeshSpec  # brings JAX in, which importing this module must not

    attention = MeshSpec.parse(args.attention_mesh)
    if attention.ep_size != attention.stage_devices:
        raise UserError(
            f"--attention-mesh {args.attention_mesh} has ep, and its devices have no routed experts; leave ep out, and say how many "
            "devices have experts with --expert-mesh"
        )
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    for name, reason in _REFUSED.items():
        if getattr(args, name) != defaults[name]:
            raise UserError(
                f"--{name.replace('_', '-')} does not go with --expert-mesh: {reason}; leave one of the two out"
            )
    if (args.num_processes or 1) > 1:
        raise UserError(
            f"--num-processes does not go with --expert-mesh: {_REFUSED['coordinator_address']}; leave it out"
        )


def expert_spec(args: Any) -> MeshSpec | None:
    """The mesh of the experts' devices; None where experts are on those of ``--mesh``.

    Raises:
        UserError: it is not of the form ``ep=24``.
    """
    if args.expert_mesh is None:
        return None
    from sharding.mesh import MeshSpec  # brings JAX in, which importing this module must not

    match = re.fullmatch(r"ep=([1-9]\d*)", args.expert_mesh.replace(" ", ""))
    if match is None:
        raise UserError(f"--expert-mesh is {args.expert_mesh!r}, expected ep= and the number of devices, such as ep=24")
    return MeshSpec(dp_size=int(match.group(1)))
