"""`SideOptions`: options of disaggregated prefill, the options of each side's engine, and their checks. No JAX at import."""

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from dsjax.config import ModelConfig
from dsjax.engine.contract.json_option import JsonOption
from dsjax.engine.transfer.messages import TRANSFER_SECONDS
from dsjax.engine.transfer.transport import BACKENDS, check_installed
from dsjax.errors import UserError
from dsjax.options import Group, advanced, option

Args = TypeVar("Args")
"""`EngineArgs`. Its module imports this one to check the options, so this one cannot import it."""

DEFAULT_PAGE = 16
"""Tokens per page, unless the model needs more."""


def default_page(config: ModelConfig) -> int:
    """Return the default of `--page-size`: the smallest multiple of 16 that holds whole windows of the model."""
    return math.lcm(DEFAULT_PAGE, config.page_tokens)


_DECODE_ONLY = {
    "host_cache_bytes": 0,
    "disk_cache": None,
    "disk_cache_bytes": 0,
    "page_source": None,
    "kv_events_config": None,
    "record_steps": None,
}
"""Options that only the decode engine uses, with their values for the prefill engine."""
_BOTH_SIDES = dict.fromkeys(("prefill_mesh", "decode_mesh", "prefill_config"))
"""Options that describe both sides, all None in the options of one side's engine."""


@dataclass(frozen=True)
class PrefillConfig(JsonOption):
    """Sizes of the engine on `--prefill-mesh`. Each overrides the option of the same name; None keeps that option."""

    flag: ClassVar[str] = "--prefill-config"
    example: ClassVar[str] = '\'{"max_num_seqs": 16, "max_num_batched_tokens": 16384, "prefill_chunk": 16384}\''

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    prefill_chunk: int | None = None
    cache_tokens: int | None = None
    redundant_experts: int | None = None

    def __post_init__(self):
        for name in self.given:
            self.check_integers(name, least=0 if name == "redundant_experts" else 1)

    @property
    def given(self) -> dict[str, int]:
        """The sizes that are not None, by option name."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class SideOptions:
    """Options of an engine that prefills and decodes on different devices, or sends KV pages to another engine or receives them."""

    prefill_mesh: str | None = option(
        None, "Mesh for prefills, with --decode-mesh and without --mesh.", Group.SIDES, host_only=True
    )
    decode_mesh: str | None = option(None, "Mesh for decodes, with --prefill-mesh.", Group.SIDES, host_only=True)
    prefill_config: str | dict[str, Any] | None = advanced(
        None,
        """Values for --prefill-mesh that override the options of the same names. JSON: '{"max_num_seqs": 16, "max_num_batched_tokens": """
        """16384, "prefill_chunk": 16384, "cache_tokens": 65536, "redundant_experts": 0}'.""",
        Group.SIDES,
        host_only=True,
    )
    local_prefill_tokens: int = advanced(
        64,
        "Prompts with fewer uncached tokens than this are prefilled on the decode mesh.",
        Group.SIDES,
        least=1,
        host_only=True,
    )
    transfer_timeout: int = advanced(
        TRANSFER_SECONDS,
        "Timeout of a KV transfer, in seconds. After it the decode side computes the missing pages, and the prefill side releases "
        "pages that were not fetched.",
        Group.SIDES,
        least=1,
        host_only=True,
    )
    disaggregation_mode: str = option(
        "agg",
        "Role of this engine. agg: prefill and decode; others need dsjax dynamo.",
        Group.SIDES,
        choices=("agg", "prefill", "decode"),
        host_only=True,
    )
    disaggregation_transfer_backend: str = advanced(
        "jax",
        "How KV cache pages move between processes; must be the same on both sides. jax: JAX's transfer server; nixl: NIXL (pip "
        "install 'dsjax[nixl]').",
        Group.SIDES,
        choices=tuple(BACKENDS),
        host_only=True,
    )
    transfer_host: str | None = advanced(
        None, "Address for the other side. Default: --host-address, or 127.0.0.1.", Group.SIDES, host_only=True
    )

    @property
    def separated(self) -> bool:
        """Whether this engine prefills and decodes on different devices."""
        return self.prefill_mesh is not None

    @property
    def prefill(self) -> PrefillConfig:
        """The parsed `prefill_config`. Raises the errors of `JsonOption.parse`."""
        return PrefillConfig() if self.prefill_config is None else PrefillConfig.parse(self.prefill_config)

    @property
    def is_side(self) -> bool:
        """Whether this engine is only the prefill or only the decode side."""
        return self.disaggregation_mode != "agg"


def decode_args(args: Args) -> Args:
    """Return the options of the decode engine."""
    changed: dict[str, Any] = {"mesh": args.decode_mesh, "disaggregation_mode": "decode"}
    return replace(args, **changed, **_eplb_options(args, args.decode_mesh, {}), **_BOTH_SIDES)


def prefill_args(args: Args) -> Args:
    """Return the options of the prefill engine. Sizes in `prefill_config` override the shared ones."""
    changed = {"mesh": args.prefill_mesh, "disaggregation_mode": "prefill"} | args.prefill.given
    with naming_prefill(args):
        changed |= _eplb_options(args, args.prefill_mesh, changed)
        return replace(args, **changed, **_DECODE_ONLY, **_BOTH_SIDES)


@contextmanager
def naming_prefill(args: Args) -> Iterator[None]:
    """Raise a `UserError` or `MeshError` again as a `UserError` that names `--prefill-mesh`."""
    from sharding.errors import MeshError

    try:
        yield
    except (UserError, MeshError) as error:
        raise UserError(
            f"of --prefill-mesh {args.prefill_mesh}, whose own sizes --prefill-config has: {error}"
        ) from error


def _eplb_options(args: Args, mesh: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return a side's EPLB options. EPLB is off on a side whose devices each hold all experts, unless this is so on both sides."""
    from sharding.mesh import MeshSpec  # here, because it imports JAX

    if args.eplb is None:
        return {}
    redundant = sizes.get("redundant_experts", args.num_redundant)
    sides = args.prefill_mesh, args.decode_mesh
    all_local = {side: MeshSpec.parse(side).ep_size == 1 for side in sides}
    if all_local[mesh] and not all(all_local.values()):
        return {"enable_eplb": False, "eplb_config": None, "redundant_experts": redundant}
    config = dataclasses.asdict(args.eplb) | {"num_redundant_experts": redundant}
    return {"eplb_config": config, "redundant_experts": redundant}


def check_sizes(args: Args) -> None:
    """Raise a `UserError` if the sizes of an engine contradict each other."""
    seqs, tokens = args.max_num_seqs, args.max_num_batched_tokens
    if seqs is not None and tokens < seqs:
        raise UserError(
            f"--max-num-batched-tokens is {tokens}, less than --max-num-seqs {seqs}, so running requests would stall each other; raise "
            "the first or lower the second"
        )
    if args.chunk_tokens > tokens:
        raise UserError(
            f"--prefill-chunk is {args.prefill_chunk}, more than --max-num-batched-tokens {tokens}, which a step has room for; lower the "
            "first or raise the second"
        )
    check_cache_tokens(args.cache_tokens, args.page_size or DEFAULT_PAGE)


def check_cache_tokens(tokens: int | None, page: int) -> None:
    """Raise a `UserError` if `--cache-tokens` is not a multiple of the page size."""
    if tokens is not None and tokens % page:
        raise UserError(
            f"--cache-tokens is {tokens}, which is no whole number of pages of {page} tokens (--page-size); "
            f"give {-(-tokens // page) * page}"
        )


def check_sides(args: Args) -> None:
    """Check the meshes, the prefill side's options, and that the KV transfer backend is installed."""
    from sharding.mesh import MeshSpec  # here, because it imports JAX

    MeshSpec.parse(args.mesh)
    if args.is_side:
        check_installed(args.disaggregation_transfer_backend)
    if args.separated:
        MeshSpec.parse(args.decode_mesh)
        prefill_args(args)
