"""Two tables: options that exclude each other, and options that require another one (docs/troubleshooting.md). No JAX."""

from collections.abc import Callable
from typing import Any, NamedTuple

from dsjax.config import families
from dsjax.engine.text.prompt_encoder import ENCODERS
from dsjax.errors import UserError


class Choice(NamedTuple):
    """An option, or a value of an option."""

    text: str
    is_made: Callable[[Any], bool]  # whether `EngineArgs` have it

    def __str__(self) -> str:
        return self.text


class Exclusion(NamedTuple):
    """Two choices that exclude each other."""

    one: Choice
    other: Choice
    reason: str
    advice: str = ""  # what to do; empty: leave one of them out


class Need(NamedTuple):
    """A choice that has no effect without another one."""

    one: Choice
    other: Choice
    advice: str = ""  # what to do; empty: give both, or leave it out


def _is_set(name: str) -> Choice:
    """Return the choice of any value of an option but its default."""
    return Choice(f"--{name.replace('_', '-')}", lambda args: getattr(args, name) != getattr(type(args), name))


def _has_stages(args: Any) -> bool:
    from sharding.mesh import MeshSpec  # here, because it imports JAX

    meshes = (args.mesh, args.attention_mesh, args.prefill_mesh, args.decode_mesh)
    return any(MeshSpec.parse(mesh).pp_size > 1 for mesh in meshes if mesh is not None)


PREFILL_MESH, DECODE_MESH, MODE = _is_set("prefill_mesh"), _is_set("decode_mesh"), _is_set("disaggregation_mode")
PREFILL_SIDE = Choice("--disaggregation-mode prefill", lambda args: args.disaggregation_mode == "prefill")
ENCODER = Choice("--tokenizer-mode with an encoder", lambda args: args.tokenizer_mode in ENCODERS)
ATTENTION_MESH, EXPERT_MESH = _is_set("attention_mesh"), _is_set("expert_mesh")
AFD_ROLE, AFD_ADDRESS, AFD_RANK, AFD_STAGES = map(
    _is_set, ("afd_role", "afd_address", "afd_server_rank", "num_afd_stages")
)
EXPERT_ROLE = Choice("--afd-role expert", lambda args: args.afd_role == "expert")
LOCAL_EXPERTS = Choice(
    "--expert-mesh without --afd-role attention",
    lambda args: args.expert_mesh is not None and args.afd_role != "attention",
)
STAGES = Choice("stages (--mesh pp=…)", _has_stages)
SEVERAL_PROCESSES = Choice(
    "--num-processes and --coordinator-address",
    lambda args: args.coordinator_address is not None or (args.num_processes or 1) > 1,
)
MESH = Choice("--mesh", lambda args: args.mesh not in (type(args).mesh, args.attention_mesh))
NO_PREFIX_CACHING = Choice("--no-enable-prefix-caching", lambda args: not args.enable_prefix_caching)
UNCACHED_FORM = Choice("the MLA form CD", lambda args: "CD" in (args.mla_prefill, args.mla_decode))
HOST_CACHE, DISK, DISK_BYTES = map(_is_set, ("host_cache_bytes", "disk_cache", "disk_cache_bytes"))
EVENTS = Choice("--kv-events-config", lambda args: args.kv_events is not None and args.kv_events.publishes)
RECORDING, PAGE_SOURCE = _is_set("record_steps"), _is_set("page_source")
ROUTER = Choice("router", lambda args: args.router is not None)
EPLB, EPLB_CONFIG = _is_set("enable_eplb"), _is_set("eplb_config")
BALANCED_STAGES = Choice("--enable-eplb with stages (--mesh pp=…)", lambda args: args.enable_eplb and _has_stages(args))
CUSTOM_CLASS = Choice(
    "a class given as dispatch or MLA form",
    lambda args: any(isinstance(value, type) for value in (args.dispatch, args.mla_prefill, args.mla_decode)),
)
COMPILE_AHEAD = Choice("--compile-ahead", lambda args: args.compile_ahead not in (0, type(args).compile_ahead))
FAMILIES = {
    name: Choice(f"a {name} model", lambda args: False)
    for name, family in families.FAMILIES.items()
    if not family.has_forms
}
"""Model families without MLA by `model_type`, which is known only once the model's configuration is read (`check_against`)."""
MLA_FORMS = (
    Choice("--mla-prefill", lambda args: args.mla_prefill != (args.mla_decode if args.batch_invariant else "CC")),
    _is_set("mla_decode"),
)

_STAGE_PAGES = "with pipeline stages, each stage has a part of every KV page, and parts cannot be transferred"
_ATTENTION_ONLY = "prompts are computed on --attention-mesh"
_PREFIX_PAGES = "it works on pages of the prefix cache, which the other option disables"
_UNRECORDED = "a recording does not contain KV pages from another engine or the disk"
_DECODE_SIDE = "only the decode side keeps pages and publishes events"
_BY_NAME = "use a built-in one by its name, or leave one of the two out"
_ALL_DEVICES = "the meshes of the two sides already name all devices"

EXCLUSIONS = (
    Exclusion(_is_set("chat_template"), ENCODER, "the encoder writes prompts without a template"),
    Exclusion(EXPERT_MESH, STAGES, "each stage has its own routed experts"),
    Exclusion(PREFILL_MESH, STAGES, _STAGE_PAGES),
    Exclusion(MODE, STAGES, _STAGE_PAGES),
    Exclusion(PAGE_SOURCE, STAGES, _STAGE_PAGES),
    Exclusion(MESH, EXPERT_MESH, _ALL_DEVICES),
    Exclusion(PREFILL_MESH, EXPERT_MESH, _ATTENTION_ONLY),
    Exclusion(MODE, EXPERT_MESH, _ATTENTION_ONLY),
    Exclusion(_is_set("ep_dispatch_algorithm"), EXPERT_MESH, "all copies of an expert are equally far from a token"),
    Exclusion(_is_set("enable_shared_experts_fusion"), EXPERT_MESH, "shared experts are on --attention-mesh"),
    Exclusion(_is_set("dispatch"), EXPERT_MESH, "the host sends tokens between the two meshes, without a collective"),
    Exclusion(_is_set("devices_per_host"), EXPERT_MESH, "each device sends tokens to every device of --expert-mesh"),
    Exclusion(
        _is_set("moe_chunk_tokens"),
        EXPERT_MESH,
        "all tokens of a step are sent together",
        "use a smaller --max-num-batched-tokens",
    ),
    Exclusion(COMPILE_AHEAD, EXPERT_MESH, "a step then consists of many programs, which are not compiled ahead"),
    Exclusion(
        LOCAL_EXPERTS,
        SEVERAL_PROCESSES,
        "with several processes, the experts need processes of their own (--afd-address, --afd-server-rank)",
        "start processes with --afd-role expert, or use one process (--num-processes 1 --process-id 0)",
    ),
    Exclusion(
        PREFILL_MESH,
        SEVERAL_PROCESSES,
        "both meshes must belong to one process",
        "use one process (--num-processes 1 --process-id 0), or start each side on its own (dsjax dynamo --disaggregation-mode)",
    ),
    Exclusion(PREFILL_MESH, MODE, "the first starts both sides, the second only one"),
    Exclusion(MESH, PREFILL_MESH, _ALL_DEVICES),
    *(Exclusion(side, UNCACHED_FORM, "this form has no KV pages to transfer") for side in (PREFILL_MESH, MODE)),
    *(Exclusion(option, NO_PREFIX_CACHING, _PREFIX_PAGES) for option in (PREFILL_MESH, MODE, HOST_CACHE, DISK, EVENTS)),
    *(Exclusion(RECORDING, option, _UNRECORDED) for option in (PREFILL_MESH, MODE, DISK)),
    *(Exclusion(option, PREFILL_SIDE, _DECODE_SIDE) for option in (HOST_CACHE, DISK, EVENTS)),
    Exclusion(CUSTOM_CLASS, SEVERAL_PROCESSES, "processes exchange their options as text", _BY_NAME),
    Exclusion(CUSTOM_CLASS, RECORDING, "a recording stores options as text", _BY_NAME),
    *(
        Exclusion(ROUTER, option, "results of another process may come from another router")
        for option in (RECORDING, DISK, SEVERAL_PROCESSES, MODE, PAGE_SOURCE)
    ),
    Exclusion(
        DISK,
        SEVERAL_PROCESSES,
        "only one process can use the folder",
        "use --host-cache-bytes, or leave one of the two out",
    ),
    Exclusion(
        BALANCED_STAGES,
        SEVERAL_PROCESSES,
        "the balancer sees only the loads of its own process's stages",
        "place experts at the start (--redundant-experts, --init-expert-location), or put all stages in one process",
    ),
    *(Exclusion(form, family, "it has no MLA", "leave it out") for family in FAMILIES.values() for form in MLA_FORMS),
)
"""Pairs of choices that exclude each other."""

NEEDS = (
    Need(_is_set("pp_layer_partition"), STAGES, "add pp to --mesh, or leave it out"),
    Need(ATTENTION_MESH, EXPERT_MESH, "give both, or --mesh alone"),
    Need(EXPERT_MESH, ATTENTION_MESH, "give both, or --mesh alone"),
    *(Need(option, EXPERT_MESH) for option in (AFD_ROLE, AFD_ADDRESS, AFD_RANK, AFD_STAGES)),
    Need(AFD_STAGES, _is_set("enable_dbo")),
    Need(AFD_ROLE, AFD_ADDRESS),
    Need(AFD_ADDRESS, AFD_ROLE),
    Need(AFD_RANK, EXPERT_ROLE),
    Need(PREFILL_MESH, DECODE_MESH, "give both, or --mesh alone"),
    Need(DECODE_MESH, PREFILL_MESH, "give both, or --mesh alone"),
    Need(
        _is_set("prefill_config"), PREFILL_MESH, "add --prefill-mesh, or use the options with the names of its fields"
    ),
    Need(_is_set("disaggregation_transfer_backend"), MODE, "leave it out, or start both sides with dsjax dynamo"),
    Need(DISK, DISK_BYTES, "add the maximum size of the cache in bytes"),
    Need(DISK_BYTES, DISK),
    Need(EPLB_CONFIG, EPLB, "add it, or use --redundant-experts for a fixed placement"),
)
"""Choices that require another one."""


def check_combinations(args: Any) -> None:
    """Raise a `UserError` if options of `EngineArgs` exclude each other or lack an option that they require."""
    for need in NEEDS:
        if need.one.is_made(args) and not need.other.is_made(args):
            advice = need.advice or "give both, or leave it out"
            raise UserError(f"{need.one} is given without {need.other}; {advice}")
    for pair in EXCLUSIONS:
        if pair.one.is_made(args) and pair.other.is_made(args):
            raise _refusal(pair)


def check_against(args: Any, other: Choice | None) -> None:
    """Raise a `UserError` for options that exclude `other`, which is not an option: a value of `FAMILIES`, or `SEVERAL_PROCESSES`."""
    for pair in EXCLUSIONS:
        if pair.other is other and pair.one.is_made(args):
            raise _refusal(pair)


def _refusal(pair: Exclusion) -> UserError:
    return UserError(
        f"{pair.one} does not go with {pair.other}: {pair.reason}; {pair.advice or 'leave one of the two out'}"
    )
