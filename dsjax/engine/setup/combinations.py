"""Two tables: options that exclude each other, and options that require another one (docs/troubleshooting.md). No JAX."""

from collections.abc import Callable
from typing import Any, NamedTuple

from dsjax.config.deepseek_v4 import REFUSED
from dsjax.engine.text.prompt_encoder import ENCODERS
from dsjax.errors import UserError


class Choice(NamedTuple):
    """A choice among the engine options, such as an option or its value. made: whether `EngineArgs` make this choice."""

    text: str
    made: Callable[[Any], bool]

    def __str__(self) -> str:
        return self.text


class Exclusion(NamedTuple):
    """Two choices that exclude each other. advice: what to do; empty: leave one of them out."""

    one: Choice
    other: Choice
    reason: str
    advice: str = ""


class Need(NamedTuple):
    """A choice that has no effect without another one. advice: what to do; empty: give both, or leave it out."""

    one: Choice
    other: Choice
    advice: str = ""


def _given(name: str) -> Choice:
    """Return the choice of any value but the default for an option."""
    return Choice(f"--{name.replace('_', '-')}", lambda args: getattr(args, name) != getattr(type(args), name))


def _has_stages(args: Any) -> bool:
    from sharding.mesh import MeshSpec  # here, because it imports JAX

    meshes = (args.mesh, args.attention_mesh, args.prefill_mesh, args.decode_mesh)
    return any(MeshSpec.parse(mesh).pp_size > 1 for mesh in meshes if mesh is not None)


PREFILL_MESH, DECODE_MESH, MODE = _given("prefill_mesh"), _given("decode_mesh"), _given("disaggregation_mode")
PREFILL_SIDE = Choice("--disaggregation-mode prefill", lambda args: args.disaggregation_mode == "prefill")
ENCODER = Choice("--tokenizer-mode with an encoder", lambda args: args.tokenizer_mode in ENCODERS)
ATTENTION_MESH, EXPERT_MESH = _given("attention_mesh"), _given("expert_mesh")
AFD_ROLE, AFD_ADDRESS, AFD_RANK, AFD_STAGES = map(
    _given, ("afd_role", "afd_address", "afd_server_rank", "num_afd_stages")
)
EXPERTS_ALONE = Choice("--afd-role expert", lambda args: args.afd_role == "expert")
EXPERTS_HERE = Choice(
    "--expert-mesh without --afd-role attention",
    lambda args: args.expert_mesh is not None and args.afd_role != "attention",
)
STAGES = Choice("stages (--mesh pp=…)", _has_stages)
SEVERAL = Choice(
    "--num-processes and --coordinator-address",
    lambda args: args.coordinator_address is not None or (args.num_processes or 1) > 1,
)
MESH = Choice("--mesh", lambda args: args.mesh not in (type(args).mesh, args.attention_mesh))
NO_PREFIX_CACHING = Choice("--no-enable-prefix-caching", lambda args: not args.enable_prefix_caching)
NO_CACHE = Choice("the MLA form CD", lambda args: "CD" in (args.mla_prefill, args.mla_decode))
HOST_CACHE, DISK, DISK_BYTES = map(_given, ("host_cache_bytes", "disk_cache", "disk_cache_bytes"))
EVENTS = Choice("--kv-events-config", lambda args: args.kv_events is not None and args.kv_events.publishes)
RECORDING, PAGE_SOURCE = _given("record_steps"), _given("page_source")
ROUTER = Choice("router", lambda args: args.router is not None)
EPLB, EPLB_CONFIG = _given("enable_eplb"), _given("eplb_config")
BALANCED_STAGES = Choice("--enable-eplb with stages (--mesh pp=…)", lambda args: args.enable_eplb and _has_stages(args))
OWN_CLASS = Choice(
    "a class given as dispatch or MLA form",
    lambda args: any(isinstance(given, type) for given in (args.dispatch, args.mla_prefill, args.mla_decode)),
)
COMPILE_AHEAD = Choice("--compile-ahead", lambda args: args.compile_ahead not in (0, type(args).compile_ahead))
FAMILIES = {"deepseek_v4": Choice("a deepseek_v4 model", lambda args: False)}
"""Model families by `model_type`, which is known only once the model's configuration is read (`check_family`)."""
_OF_FAMILIES = {
    "mla_prefill": Choice(
        "--mla-prefill", lambda args: args.mla_prefill != (args.mla_decode if args.batch_invariant else "CC")
    ),
}
"""Options for which a family refuses only some values."""

_PARTS = "a page of the cache is in parts with stages, one at each stage, which are not handed over yet"
_ATTENTION = "prompts are computed on the attention side"
_PREFIX = "it has pages of the prefix cache, which the other option turns off"
_ELSEWHERE = "a recording would lack what pages from elsewhere held"
_KEEPS = "the decode side alone keeps pages and tells of them"
_BY_NAME = "give one of dsjax's by its name, or leave one of the two out"
_NAMES_ALL = "the meshes of the two sides name all devices"

EXCLUSIONS = (
    Exclusion(_given("chat_template"), ENCODER, "the encoder writes the prompts, and no template does"),
    Exclusion(EXPERT_MESH, STAGES, "a stage has its own routed experts"),
    Exclusion(PREFILL_MESH, STAGES, _PARTS),
    Exclusion(MODE, STAGES, _PARTS),
    Exclusion(PAGE_SOURCE, STAGES, _PARTS),
    Exclusion(MESH, EXPERT_MESH, _NAMES_ALL),
    Exclusion(PREFILL_MESH, EXPERT_MESH, _ATTENTION),
    Exclusion(MODE, EXPERT_MESH, _ATTENTION),
    Exclusion(_given("ep_dispatch_algorithm"), EXPERT_MESH, "no device of an expert is nearer than another"),
    Exclusion(_given("enable_shared_experts_fusion"), EXPERT_MESH, "shared experts are on the attention side"),
    Exclusion(
        _given("dispatch"), EXPERT_MESH, "the host takes rows from one side to the other, and no collective does"
    ),
    Exclusion(_given("devices_per_host"), EXPERT_MESH, "rows go from each device to each device with experts"),
    Exclusion(
        _given("moe_chunk_tokens"),
        EXPERT_MESH,
        "a step's tokens travel at once",
        "give a smaller --max-num-batched-tokens",
    ),
    Exclusion(COMPILE_AHEAD, EXPERT_MESH, "a step is many programs there, and none is compiled ahead"),
    Exclusion(
        EXPERTS_HERE,
        SEVERAL,
        "an attention side alone is a group of processes; each process with experts is known by --afd-address and --afd-server-rank",
        "start processes with experts (--afd-role expert), or leave the group out (--num-processes 1 --process-id 0)",
    ),
    Exclusion(
        PREFILL_MESH,
        SEVERAL,
        "both meshes are of one process",
        "leave the group out (--num-processes 1 --process-id 0), or give each side processes of its own (dsjax dynamo "
        "--disaggregation-mode)",
    ),
    Exclusion(PREFILL_MESH, MODE, "the first has both sides, and the second is one of two"),
    Exclusion(MESH, PREFILL_MESH, _NAMES_ALL),
    *(Exclusion(side, NO_CACHE, "the form keeps no pages that could be handed over") for side in (PREFILL_MESH, MODE)),
    *(Exclusion(side, NO_PREFIX_CACHING, _PREFIX) for side in (PREFILL_MESH, MODE, HOST_CACHE, DISK, EVENTS)),
    *(Exclusion(RECORDING, side, _ELSEWHERE) for side in (PREFILL_MESH, MODE, DISK)),
    *(Exclusion(kept, PREFILL_SIDE, _KEEPS) for kept in (HOST_CACHE, DISK, EVENTS)),
    Exclusion(OWN_CLASS, SEVERAL, "processes tell each other their options as text", _BY_NAME),
    Exclusion(OWN_CLASS, RECORDING, "a recording names what it is replayed with", _BY_NAME),
    *(
        Exclusion(ROUTER, other, "what another process has computed may come from another router")
        for other in (RECORDING, DISK, SEVERAL, MODE, PAGE_SOURCE)
    ),
    Exclusion(DISK, SEVERAL, "a folder is one process's", "use --host-cache-bytes, or leave one of the two out"),
    Exclusion(
        BALANCED_STAGES,
        SEVERAL,
        "the balancer sees the loads of its own process's stages alone",
        "place experts at the start (--redundant-experts, --init-expert-location), or have all stages in one process",
    ),
    *(
        Exclusion(_OF_FAMILIES.get(name, _given(name)), FAMILIES["deepseek_v4"], reason, "leave it out")
        for name, reason in REFUSED.items()
    ),
)
"""Pairs of choices that exclude each other."""

NEEDS = (
    Need(_given("pp_layer_partition"), STAGES, "add pp to --mesh, or leave it out"),
    Need(ATTENTION_MESH, EXPERT_MESH, "give both, or --mesh alone"),
    Need(EXPERT_MESH, ATTENTION_MESH, "give both, or --mesh alone"),
    *(Need(option, EXPERT_MESH) for option in (AFD_ROLE, AFD_ADDRESS, AFD_RANK, AFD_STAGES)),
    Need(AFD_STAGES, _given("enable_dbo")),
    Need(AFD_ROLE, AFD_ADDRESS),
    Need(AFD_ADDRESS, AFD_ROLE),
    Need(AFD_RANK, EXPERTS_ALONE),
    Need(PREFILL_MESH, DECODE_MESH, "give both, or --mesh alone"),
    Need(DECODE_MESH, PREFILL_MESH, "give both, or --mesh alone"),
    Need(_given("prefill_config"), PREFILL_MESH, "give the mesh too, or the options of its fields' names"),
    Need(_given("disaggregation_transfer_backend"), MODE, "leave it out, or start both sides with dsjax dynamo"),
    Need(DISK, DISK_BYTES, "say how many bytes the pages in it may take"),
    Need(DISK_BYTES, DISK),
    Need(EPLB_CONFIG, EPLB, "add it, or for experts that stay where they are use --redundant-experts"),
)
"""Choices that require another one."""


def check_combinations(args: Any) -> None:
    """Raise a `UserError` if options of `EngineArgs` exclude each other or lack an option that they require."""
    for need in NEEDS:
        if need.one.made(args) and not need.other.made(args):
            advice = need.advice or "give both, or leave it out"
            raise UserError(f"{need.one} is given without {need.other}; {advice}")
    for pair in EXCLUSIONS:
        if pair.one.made(args) and pair.other.made(args):
            raise _refusal(pair)


def check_family(args: Any, model_type: str) -> None:
    """Raise a `UserError` for options that the family of a `model_type` does not support."""
    for pair in EXCLUSIONS:
        if pair.other is FAMILIES.get(model_type) and pair.one.made(args):
            raise _refusal(pair)


def check_group(args: Any) -> None:
    """Raise a `UserError` for options that exclude several processes. Call it if the launcher of this process has started several."""
    for pair in EXCLUSIONS:
        if pair.other is SEVERAL and pair.one.made(args):
            raise _refusal(pair)


def _refusal(pair: Exclusion) -> UserError:
    return UserError(
        f"{pair.one} does not go with {pair.other}: {pair.reason}; {pair.advice or 'leave one of the two out'}"
    )
