"""``ApartOptions``: the options of attention–FFN disaggregation (``--attention-mesh``, ``--expert-mesh``, …) and their checks. No JAX."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from dsjax.addresses import split_address
from dsjax.errors import UserError
from dsjax.options import Group, advanced, option

if TYPE_CHECKING:
    from sharding.mesh import MeshSpec

Args = TypeVar("Args")
"""`EngineArgs`. Its constructor calls the checks of this module, which therefore cannot import it."""


@dataclass(frozen=True, kw_only=True)
class ApartOptions:
    """Options of an engine with routed experts on separate devices."""

    attention_mesh: str | None = option(None, "Mesh for everything but routed experts, such as dp=4,tp=2.", Group.SIDES)
    expert_mesh: str | None = option(
        None, "Mesh for routed experts, such as ep=24; needs --attention-mesh.", Group.SIDES
    )
    afd_role: str = advanced(
        "both",
        "Role of this process with --expert-mesh. attention: call the experts at --afd-address; expert: compute the experts and "
        "listen there; both: do both in one process.",
        Group.SIDES,
        choices=("both", "attention", "expert"),
        host_only=True,
    )
    afd_address: str | None = advanced(
        None,
        "HOST:PORT of each process with --afd-role expert, separated by commas. They share the expert devices equally, in this order.",
        Group.SIDES,
        host_only=True,
    )
    num_afd_stages: int = advanced(
        2,
        "Number of microbatches per step with --enable-dbo and --expert-mesh. Use three or more if transfers take longer than the "
        "attention of half a batch.",
        Group.SIDES,
        least=2,
    )
    afd_server_rank: int | None = advanced(
        None, "Index of this expert process in --afd-address, from 0.", Group.SIDES, least=0, host_only=True
    )


def check_apart(args: Args) -> None:
    """Check the two meshes and the expert processes. Raise `UserError` or `MeshError` for an invalid combination."""
    if args.expert_mesh is None:
        return
    _check_processes(args)
    from sharding.mesh import MeshSpec  # imports JAX, so not at module level

    attention = MeshSpec.parse(args.attention_mesh)
    if attention.ep_size != attention.stage_devices:
        raise UserError(
            f"--attention-mesh {args.attention_mesh} has ep, and its devices have no routed experts; leave ep out, and say how many "
            "devices have experts with --expert-mesh"
        )


def _check_processes(args: Any) -> None:
    """Check the addresses of the expert processes and this process's rank among them."""
    addresses, devices = afd_addresses(args), expert_spec(args).num_devices
    for address in addresses:
        try:
            split_address(address)
        except UserError:
            raise UserError(
                f"--afd-address has {address!r}, expected HOST:PORT, such as 10.0.0.2:7000, or several, separated by commas"
            ) from None
    if addresses and devices % len(addresses):
        raise UserError(
            f"--expert-mesh {args.expert_mesh} has {devices} devices, which {len(addresses)} processes (--afd-address) cannot share "
            "equally; give a number of devices that the number of addresses divides"
        )
    if len(set(addresses)) < len(addresses):
        raise UserError(f"--afd-address is {args.afd_address}, which names a process twice; give each its own")
    rank = args.afd_server_rank
    if args.afd_role == "expert" and rank is None and len(addresses) > 1:
        raise UserError(
            f"--afd-address names {len(addresses)} processes of experts; say which of them this one is with --afd-server-rank, from 0 to "
            f"{len(addresses) - 1}"
        )
    if rank is not None and rank >= len(addresses):
        raise UserError(f"--afd-server-rank is {rank}, and --afd-address names {len(addresses)} processes, from 0 on")


def afd_addresses(args: Any) -> list[str]:
    """Return the addresses of the expert processes in device order; empty if both sides are in this process."""
    return [] if args.afd_address is None else [address.strip() for address in args.afd_address.split(",")]


class ExpertShare(NamedTuple):
    """One expert process: its address, the global index of its first expert device, and its number of devices."""

    address: str
    first: int
    devices: int


def expert_share(args: Any) -> ExpertShare:
    """Return this process's share of the expert devices (``--afd-role expert``)."""
    addresses, rank = afd_addresses(args), args.afd_server_rank or 0
    devices = expert_spec(args).num_devices // len(addresses)
    return ExpertShare(addresses[rank], rank * devices, devices)


def expert_spec(args: Any) -> MeshSpec | None:
    """Return the mesh of the expert devices, None if experts are on ``--mesh``. Raise `UserError` unless it has the form ``ep=24``."""
    if args.expert_mesh is None:
        return None
    from sharding.mesh import MeshSpec  # imports JAX, so not at module level

    match = re.fullmatch(r"ep=([1-9]\d*)", args.expert_mesh.replace(" ", ""))
    if match is None:
        raise UserError(f"--expert-mesh is {args.expert_mesh!r}, expected ep= and the number of devices, such as ep=24")
    return MeshSpec(dp_size=int(match.group(1)))
