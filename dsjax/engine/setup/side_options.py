"""`SideOptions`, of prefill apart from decode: which options each side's engine gets, and whether they go together. No JAX."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from dsjax.engine.transfer.messages import TRANSFER_SECONDS
from dsjax.engine.transfer.transport import BACKENDS, FLAG, check_installed
from dsjax.errors import UserError
from dsjax.options import option

Args = TypeVar("Args")
"""`EngineArgs`, which are checked here where they are made, so that this module cannot name them."""

PREFILLS_OWN = ("max_num_seqs", "max_num_batched_tokens", "prefill_chunk", "cache_tokens", "redundant_experts")
"""Options of which the engine of `--prefill-mesh` may have other values: `--prefill-` before the option's own name."""
_DECODES_ALONE = {
    "host_cache_bytes": 0,
    "disk_cache": None,
    "disk_cache_bytes": 0,
    "page_source": None,
    "kv_events_config": None,
    "record_steps": None,
}
"""Options that a prefill engine does without, and their values there."""
_ONE_SIDE = {
    "prefill_mesh": None,
    "decode_mesh": None,
    **{f"prefill_{name}": None for name in PREFILLS_OWN},
}
"""Options of two sides, and their values in the options of one."""


@dataclass(frozen=True, kw_only=True)
class SideOptions:
    """Options of an engine that computes prompts on other devices than tokens, or hands pages to another engine or takes them from it."""

    prefill_mesh: str | None = option(
        None,
        "devices that compute prompts for those of --decode-mesh, which make the tokens; both in place of --mesh",
        of_host=True,
    )
    decode_mesh: str | None = option(None, "devices that make tokens; with --prefill-mesh", of_host=True)
    prefill_max_num_seqs: int | None = option(
        None,
        "most prompts under way on a DP rank of --prefill-mesh; default: as --max-num-seqs, or 256 over all ranks of that mesh, at least 8 "
        "on each",
        least=1,
        of_host=True,
    )
    prefill_max_num_batched_tokens: int | None = option(
        None,
        "most tokens of a DP rank of --prefill-mesh in one step; default: as --max-num-batched-tokens",
        least=1,
        of_host=True,
    )
    prefill_prefill_chunk: int | None = option(
        None,
        "most tokens of one prompt in one step of --prefill-mesh; default: as --prefill-chunk",
        least=1,
        of_host=True,
    )
    prefill_cache_tokens: int | None = option(
        None,
        "token slots of the cache of a DP rank of --prefill-mesh; default: as --cache-tokens",
        least=1,
        of_host=True,
    )
    prefill_redundant_experts: int | None = option(
        None,
        "physical experts beside the logical ones on --prefill-mesh; default: as --redundant-experts, or as --eplb-config says",
        least=0,
        of_host=True,
    )
    local_prefill_tokens: int = option(
        64, "a prompt of which the decode side lacks fewer tokens is computed there", least=1, of_host=True
    )
    transfer_timeout: int = option(
        TRANSFER_SECONDS,
        "seconds after which the decode side computes pages itself that it has asked for and hears nothing of, and the prefill side drops "
        "pages that nobody takes",
        least=1,
        of_host=True,
    )
    disaggregation_mode: str = option(
        "agg",
        "agg: prompts are computed here; decode: in other processes, whose addresses come with the requests; prefill: for other processes",
        choices=("agg", "prefill", "decode"),
        of_host=True,
    )
    disaggregation_transfer_backend: str = option(
        "jax",
        "what moves pages between processes: JAX's transfer server, or NVIDIA's NIXL (pip install 'dsjax[nixl]'); the same on both sides",
        choices=tuple(BACKENDS),
        of_host=True,
    )
    transfer_host: str | None = option(
        None,
        "address of this host at which the other side's engines reach it, and from which they pull pages; default: that of the group, or "
        "127.0.0.1",
        of_host=True,
    )

    @property
    def separated(self) -> bool:
        """Whether prompts are computed on other devices than tokens are made on."""
        return self.prefill_mesh is not None

    @property
    def is_side(self) -> bool:
        """Whether this engine is one side of two that hand pages over."""
        return self.disaggregation_mode != "agg"


def decode_args(args: Args) -> Args:
    """Give the options of the engine that makes tokens."""
    changed: dict[str, Any] = {"mesh": args.decode_mesh, "disaggregation_mode": "decode"}
    return replace(args, **changed, **_experts(args, args.decode_mesh, {}), **_ONE_SIDE)


def prefill_args(args: Args) -> Args:
    """Give the options of the engine that computes prompts, with sizes of its own where they are given."""
    changed = {"mesh": args.prefill_mesh, "disaggregation_mode": "prefill"} | _prefills_own(args)
    changed |= _experts(args, args.prefill_mesh, changed)
    return replace(args, **changed, **_DECODES_ALONE, **_ONE_SIDE)


def _experts(args: Args, mesh: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Give the options by which the experts of a side have copies and move.

    A side on which each device has all experts has nothing to move. It may stand beside a side that does move experts.
    """
    from sharding.mesh import MeshSpec  # brings JAX in, which importing this module must not

    if args.eplb is None:
        return {}
    redundant = sizes.get("redundant_experts", args.num_redundant)
    has_all = {one: MeshSpec.parse(one).ep_size == 1 for one in (args.prefill_mesh, args.decode_mesh)}
    if has_all[mesh] and not all(has_all.values()):
        return {"enable_eplb": False, "eplb_config": None, "redundant_experts": redundant}
    config = dataclasses.asdict(args.eplb) | {"num_redundant_experts": redundant}
    return {"eplb_config": config, "redundant_experts": redundant}


def check_sizes(args: Args, of_prefill: frozenset[str] = frozenset()) -> None:
    """Check that the sizes of an engine go together. of_prefill: of `PREFILLS_OWN`, those of which the prefill engine has other values.

    Raises:
        UserError: they do not.
    """
    sizes = dict.fromkeys(PREFILLS_OWN, "") | dict.fromkeys(of_prefill, "prefill_")
    values = {name: getattr(args, before + name) for name, before in sizes.items()}
    flags = {name: _flag(before + name) for name, before in sizes.items()}
    seqs, tokens, kept = (values[name] for name in ("max_num_seqs", "max_num_batched_tokens", "cache_tokens"))
    if seqs is not None and tokens < seqs:
        other = "" if not of_prefill or "max_num_seqs" in of_prefill else ", or give --prefill-max-num-seqs"
        raise UserError(
            f"{flags['max_num_batched_tokens']} is {tokens}, less than {flags['max_num_seqs']} {seqs}, so running requests would "
            f"stall each other; raise the first or lower the second{other}"
        )
    if kept is not None and kept % args.page_size:
        raise UserError(
            f"{flags['cache_tokens']} is {kept}, which is no whole number of pages of {args.page_size} tokens (--page-size); "
            f"give {-(-kept // args.page_size) * args.page_size}"
        )


def check_sides(args: Args) -> None:
    """Check that the options of prefill apart from decode go together, and with all others.

    Raises:
        UserError: they do not. MeshError: a mesh cannot be.
    """
    if args.is_side:
        if args.separated:
            raise UserError(
                f"--disaggregation-mode {args.disaggregation_mode} is one side of two, and --prefill-mesh has both; leave one out"
            )
        _check_transfers(args, f"--disaggregation-mode {args.disaggregation_mode}")
        if args.disaggregation_mode == "prefill":
            _check_prefills_alone(args)
        check_installed(args.disaggregation_transfer_backend)
    elif args.disaggregation_transfer_backend != type(args).disaggregation_transfer_backend:
        raise UserError(
            f"{FLAG} {args.disaggregation_transfer_backend} moves pages between processes, and no others are told of here; leave it out, "
            "or give --disaggregation-mode too (dsjax dynamo)"
        )
    if args.prefill_mesh is None and args.decode_mesh is None:
        _check_no_sides(args)
        return
    for given, other in (("prefill", "decode"), ("decode", "prefill")):
        if getattr(args, f"{other}_mesh") is None:
            raise UserError(f"--{given}-mesh is given without --{other}-mesh; give both, or --mesh alone")
    from sharding.mesh import MeshSpec  # brings JAX in, which importing this module must not

    for mesh in (args.prefill_mesh, args.decode_mesh):
        MeshSpec.parse(mesh)
    if args.mesh != type(args).mesh:
        raise UserError(
            f"--mesh {args.mesh} is given with --prefill-mesh and --decode-mesh, which name all devices; leave one out"
        )
    check_sizes(args, frozenset(_prefills_own(args)))
    _check_transfers(args, "--prefill-mesh")
    if args.coordinator_address is not None or (args.num_processes or 1) > 1:
        raise UserError(
            "--prefill-mesh and --decode-mesh are meshes of one process; leave --num-processes out, or give each side processes of its "
            "own (dsjax dynamo --disaggregation-mode)"
        )


def _check_no_sides(args: Args) -> None:
    """Refuse what only sides have, where an engine has no two sides."""
    for name in _prefills_own(args):
        raise UserError(
            f"{_flag(f'prefill_{name}')} is given without --prefill-mesh and --decode-mesh; give them too, or {_flag(name)} alone"
        )


def _check_transfers(args: Args, flag: str) -> None:
    """Check that this engine's pages can go to others, or theirs come here."""
    if "CD" in (args.mla_prefill, args.mla_decode):
        raise UserError(
            f"{flag} moves pages of the latent cache, and the MLA form CD keeps none; use another --mla-prefill and --mla-decode"
        )
    if not args.enable_prefix_caching:
        raise UserError(f"{flag} hands pages over through the prefix cache, which --no-enable-prefix-caching turns off")
    if args.record_steps is not None:
        raise UserError(
            f"--record-steps does not go with {flag}: a recording would lack what pages from elsewhere held; leave one of them out"
        )


def _check_prefills_alone(args: Args) -> None:
    """Refuse what only a decode side has, where an engine computes prompts for other processes."""
    for name in ("host_cache_bytes", "disk_cache", "kv_events_config"):
        if getattr(args, name) != _DECODES_ALONE[name]:
            raise UserError(
                f"{_flag(name)} is not for --disaggregation-mode prefill, only for decode; leave it out there"
            )


def _prefills_own(args: Args) -> dict[str, Any]:
    """Give those of `PREFILLS_OWN` of which the prefill engine has values of its own, by the options' own names."""
    values = {name: getattr(args, f"prefill_{name}") for name in PREFILLS_OWN}
    return {name: value for name, value in values.items() if value is not None}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
