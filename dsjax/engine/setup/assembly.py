"""Build a ``ModelStep`` from options and a model configuration, with all checks and without weights, for loading and dry runs."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dsjax.config import ModelConfig
from dsjax.config.weights import FP8_BLOCK, ROW_FORMATS, WEIGHT_FORMATS
from dsjax.engine.afd.options import afd_addresses, expert_spec
from dsjax.engine.device import expert_programs
from dsjax.engine.device.process import cache_folder
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.batch_invariance import check_batch_invariant
from dsjax.engine.setup.combinations import FAMILIES, check_against
from dsjax.engine.setup.expert_location import ExpertLocation
from dsjax.engine.setup.fitting import check_layout
from dsjax.errors import UserError
from dsjax.kernels.pallas import tpu_attention, tpu_products
from dsjax.kernels.pallas.shared_memory import Cores
from dsjax.kernels.table import Kernels, choose_kernels
from dsjax.model.expert_dispatch import EXPERTS, ExpertsApart
from dsjax.model.forms import form_of
from dsjax.model.fp8_product import WIDEN, ActivationScheme
from dsjax.model.micro_batches import TwoBatchOverlap
from dsjax.model.parameter_table import parameter_table
from dsjax.model.parameters import ParameterInfo, Weights
from dsjax.model.router import ExpertRouter
from dsjax.model.sparse import IndexScores
from dsjax.model.stage import Stage
from dsjax.model.step import ModelStep
from sharding import MeshError, MeshSpec, Rules, fp8
from sharding.balancing import rebalance
from sharding.dispatch import DispatchConfig, resolved_method
from sharding.layer_placement import LayerPlacements
from sharding.mesh import joined_neighbours
from sharding.placement import Placement

FIRST_WITH_FP8 = 8.9
"""Minimum CUDA compute capability with e4m3 tensor cores (Ada; CUDA programming guide)."""


def make_step(
    args: EngineArgs,
    config: ModelConfig,
    spec: MeshSpec,
    mesh: Mesh,
    *,
    bf16_experts: bool | None = None,
    mtp: bool = False,
    stage: Stage | None = None,
) -> ModelStep:
    """Build the step that ``args`` describe, for this model on this mesh.

    bf16_experts: ``Checkpoint.bf16_experts``; None: decide by the configuration. mtp: whether to include the MTP module and its cache
    layer. stage: pipeline stage to build, with its own ``spec`` and ``mesh``; None: the whole model.

    Raises:
        UserError, MeshError: options, model and mesh are incompatible, or the model does not support an option.
    """
    if jax.config.jax_enable_x64:
        raise UserError(
            "JAX_ENABLE_X64 is on, under which JAX counts in 64 bits; dsjax computes in float32 and less. Unset it, or call "
            'jax.config.update("jax_enable_x64", False)'
        )
    check_against(args, FAMILIES.get(config.model_type))
    if mtp and not config.num_nextn_predict_layers:
        raise UserError(
            "--speculative-config drafts with the model's MTP module, but this model has none (num_nextn_predict_layers is 0, "
            "or the checkpoint lacks its tensors); leave the option out"
        )
    config = _with_router(args, config)
    device = mesh.devices.flat[0]
    dtype = compute_dtype(args, config, device.platform)
    kv_dtype = cache_dtype(args, dtype)
    weights = weights_format(args, config, dtype, bf16_experts)
    scheme = activation_scheme(args, config, weights, device)
    prefill_form, decode_form = form_of(args.mla_prefill), form_of(args.mla_decode)
    indexer = config.attention.indexer
    indexed = indexer and indexer.head_dim, _has_power_scales(config), config.attention.index_format
    index_scores = IndexScores.parse(args.index_scores, *indexed)
    expert_side = expert_spec(args)
    expert_mesh = expert_side or spec
    check_layout(config, spec, args.num_redundant, weights, expert_side, args.moe_dense_tp_size)
    _check_scheme(args, config, scheme, spec, expert_mesh)
    _check_experts(args, config, weights)
    placement = expert_placement(config, expert_mesh, args.num_redundant, mtp=mtp)
    if args.init_expert_location is not None:
        placement = _placement_from_file(args, config, expert_mesh, placement)
    fusion = args.enable_shared_experts_fusion
    if stage is not None:
        placement = stage.placement(placement, config)
        config = stage.config(config)
        mtp = mtp and stage.is_last
        fusion = fusion and config.is_moe
    table = parameter_table(
        config,
        weights=weights,
        platform=device.platform,
        num_physical=placement.n_physical + fusion * spec.ep_size if config.is_moe else 0,
        shared_apart=not fusion,
        materialise=prefill_form.materialised or decode_form.materialised,
        derived_dtype=dtype,
        mtp=mtp,
        begins=stage is None or stage.is_first,
        ends=stage is None or stage.is_last,
    )
    step = ModelStep(
        config=config,
        table=table,
        spec=spec,
        mesh=mesh,
        rules=model_rules(args, config, spec),
        placement=placement,
        dispatch=_dispatch(args, config, mesh, placement),
        dtype=dtype,
        cache_dtype=kv_dtype,
        prefill_form=prefill_form,
        decode_form=decode_form,
        page_size=args.page_size_of(config),
        kernels=_kernels(args, config, spec, device, dtype, kv_dtype, weights, scheme),
        shared_experts_fusion=fusion,
        nearest_copies=args.ep_dispatch_algorithm == "static",
        scheme=scheme,
        index_scores=index_scores,
        overlap=_overlap(args),
        stage=stage,
        drafts=args.num_drafts,
    )
    _ = step.cache_groups  # raises if the MLA forms share no cache layout, or for an unsupported page size
    if expert_side is not None:
        infos = {path: info for path, info in table.infos.items() if EXPERTS in path}
        step = dataclasses.replace(step, table=table.without(infos), apart=experts_apart(args, infos))
    if args.batch_invariant:
        check_batch_invariant(step, device.platform)
    return step


def _with_router(args: EngineArgs, config: ModelConfig) -> ModelConfig:
    """Return the configuration with the `router` of the options, if there is one."""
    if args.router is None:
        return config
    if not issubclass(args.router, ExpertRouter):
        raise UserError(
            f"router is {args.router.__name__}; expected a class that inherits dsjax.model.router.ExpertRouter"
        )
    return dataclasses.replace(config, router=args.router)


def _has_power_scales(config: ModelConfig) -> bool:
    """Whether the checkpoint's scales are powers of two."""
    return config.quantization is not None and config.quantization.scale_fmt == "ue8m0"


def _check_scheme(
    args: EngineArgs, config: ModelConfig, scheme: ActivationScheme, spec: MeshSpec, expert_mesh: MeshSpec
) -> None:
    """Raise a `UserError` if a block of activations that has one scale would be split over devices."""
    if scheme.experts is not None and spec.expert_width_shards > 1:
        raise UserError(
            f"--activation-scheme {scheme} gives a row of an expert one scale over its width, and --mesh {args.mesh} splits it over "
            f"{spec.expert_width_shards} devices; let ep be a multiple of tp and leave etp out, or give --activation-scheme dynamic"
        )
    shards = expert_mesh.expert_width_shards
    width = config.moe_intermediate_size // shards
    if scheme.dynamic and config.is_moe and shards > 1 and width % FP8_BLOCK:
        raise UserError(
            f"--activation-scheme {scheme} gives {FP8_BLOCK} values of an expert's width one scale, and --mesh {args.mesh} leaves "
            f"{width} of {config.moe_intermediate_size} on a device; let ep be a multiple of tp, or give --activation-scheme none"
        )


def _check_experts(args: EngineArgs, config: ModelConfig, weights: Weights) -> None:
    """Raise a `UserError` for options on experts that the model or its weight format does not support."""
    if args.enable_eplb and not config.is_moe:
        raise UserError("--enable-eplb is given, but this model has no experts; leave it out")
    if not args.enable_shared_experts_fusion:
        return
    if WEIGHT_FORMATS[weights].packed is not None:
        raise UserError(
            f"--enable-shared-experts-fusion makes a layer's shared expert a routed one, and --weights {weights} packs those into four "
            "bits, which shared experts are not; leave one of the two out"
        )
    if not config.is_moe or config.n_shared_experts != 1:
        raise UserError(
            f"--enable-shared-experts-fusion makes a layer's one shared expert a routed one, but this model has "
            f"{config.n_shared_experts if config.is_moe else 'no experts'}; leave it out"
        )


def experts_apart(args: EngineArgs, infos: Mapping[str, ParameterInfo]) -> ExpertsApart:
    """Return the description of the experts on `--expert-mesh`. infos: their parameters."""
    spec = expert_spec(args)
    is_remote = args.afd_role == "attention"
    parts = len(afd_addresses(args)) if is_remote else spec.ep_size
    return ExpertsApart(spec, parts, padded=not is_remote, infos=infos)


def _dispatch(args: EngineArgs, config: ModelConfig, mesh: Mesh, placement: LayerPlacements) -> DispatchConfig:
    """Return the dispatch configuration."""
    # Redundant or moved experts may be on another host than their group.
    in_groups = config.is_moe and placement.n_physical == config.n_routed_experts
    in_groups &= not args.enable_eplb and args.init_expert_location is None
    return DispatchConfig(
        method=args.dispatch,
        wire=args.dispatch_wire,
        chunk_tokens=args.moe_chunk_tokens,
        devices_per_host=args.devices_per_host or joined_neighbours(mesh),
        routed_groups=config.routed_groups if in_groups else None,
    )


def _overlap(args: EngineArgs) -> TwoBatchOverlap | None:
    if not args.enable_dbo:
        return None
    thresholds = args.dbo_decode_token_threshold, args.dbo_prefill_token_threshold
    return TwoBatchOverlap(*thresholds, decode_chunk=1 + args.num_drafts, stages=args.num_afd_stages)


def _kernels(
    args: EngineArgs,
    config: ModelConfig,
    spec: MeshSpec,
    device: jax.Device,
    dtype: np.dtype,
    cache_dtype: np.dtype,
    weights: Weights,
    scheme: ActivationScheme,
) -> Kernels:
    folder = cache_folder()
    kernels = choose_kernels(
        args.kernels,
        device.platform,
        dtype,
        devices=min(spec.num_devices, jax.local_device_count()),
        cache=None if folder is None else folder / "native",
        prebuilt=None if args.kernel_cache is None else Path(args.kernel_cache),
        tiles=None if args.kernel_config is None else Path(args.kernel_config),
        cores=Cores.of(device),
    )
    if kernels.pallas is None or kernels.pallas.platform != "tpu":
        return kernels
    refused = {
        ("decode attention", "prefill attention"): tpu_attention.refuses(args.page_size_of(config), cache_dtype),
        ("experts",): _refuses_experts(config, spec, weights, scheme) if config.is_moe else "",
    }
    plain_operations = tuple(name for names, reason in refused.items() if reason for name in names)
    if not WEIGHT_FORMATS[weights].keeps_fp8 or scheme.dynamic:
        plain_operations += ("other products",)  # with other weights XLA's products are as good: no note
    return dataclasses.replace(
        kernels, left_plain=plain_operations, note="; ".join(filter(None, (kernels.note, *refused.values())))
    )


def _refuses_experts(config: ModelConfig, spec: MeshSpec, weights: Weights, scheme: ActivationScheme) -> str:
    """Return why the TPU kernels do not support a device's experts; empty if they do."""
    if weights not in ("bf16", "mixed", "fp8"):
        return (
            f"the experts' kernels for TPUs take bfloat16 and FP8 weights, and these are {weights}: experts are plain"
        )
    if scheme.dynamic:
        return "the experts' kernels for TPUs quantise no activations: experts are plain"
    depth = config.hidden_size
    width = config.moe_intermediate_size // spec.expert_width_shards
    if not tpu_products.takes(depth, width):
        return f"the experts' kernels for TPUs take widths that 128 divides, and a device's are {depth} × {width}: experts are plain"
    return ""


def compute_dtype(args: EngineArgs, config: ModelConfig, platform: str) -> np.dtype:
    """Return the dtype of activations. ``auto``: the checkpoint's dtype; on CPU float32, because XLA converts bf16 to float32 and back
    around each operation there, which is slower and less exact.
    """
    if args.dtype != "auto":
        return jnp.dtype(args.dtype)
    return jnp.dtype("float32" if platform == "cpu" or config.torch_dtype == "float32" else "bfloat16")


def cache_dtype(args: EngineArgs, dtype: np.dtype) -> np.dtype:
    """Return the dtype of the KV cache (MLA latents). ``auto``: the compute dtype."""
    return {"auto": dtype, "fp8": fp8.E4M3}.get(args.kv_cache_dtype) or jnp.dtype(args.kv_cache_dtype)


def weights_format(args: EngineArgs, config: ModelConfig, dtype: np.dtype, bf16_experts: bool | None = None) -> Weights:
    """Return the weight format: as requested, else the compute dtype, except that routed experts stored in bf16 stay in bf16.

    Products of FP8 values and their scales do not fit bf16, so with float32 they become float32.
    """
    if args.weights != "auto":
        return args.weights
    if dtype != jnp.float32:
        return "bf16"
    if bf16_experts is None:
        bf16_experts = config.is_moe and config.torch_dtype == "bfloat16" and config.quantization is None
    return "mixed" if bf16_experts else "f32"


def activation_scheme(args: EngineArgs, config: ModelConfig, weights: Weights, device: jax.Device) -> ActivationScheme:
    """Return whether activations are quantised for FP8 weights. ``auto``: yes on FP8 tensor cores, as in vLLM and SGLang.

    Raises:
        UserError: ``dynamic`` without FP8 weights, or a format of the experts' rows that differs from the format of their weights.
    """
    scheme = args.activation_scheme
    row = WEIGHT_FORMATS[weights]
    powers = _has_power_scales(config)
    if scheme in ROW_FORMATS:
        if scheme not in row.row_formats:
            raise UserError(
                f"--activation-scheme {scheme} multiplies rows with experts of the same format, and --weights is {args.weights}; add "
                f"--weights {scheme} or {scheme}-bf16, or leave it out"
            )
        return ActivationScheme(dynamic=True, powers=powers, experts=scheme)
    if row.experts != "fp8" and not (row.quantises_rows and scheme == "dynamic"):
        if scheme == "dynamic":
            raise UserError(
                "--activation-scheme dynamic quantises activations for products with quantised weights, and --weights is "
                f"{args.weights}; add --weights fp8, or leave it out"
            )
        return WIDEN
    multiplies = device.platform == "gpu" and float(getattr(device, "compute_capability", 0)) >= FIRST_WITH_FP8
    dynamic = multiplies if scheme == "auto" else scheme == "dynamic"
    return ActivationScheme(dynamic, powers) if dynamic else WIDEN


def model_rules(args: EngineArgs, config: ModelConfig, spec: MeshSpec) -> Rules:
    """Return the sharding rules for the options. The vocabulary is not sharded if ``tp`` does not divide it."""
    rules = Rules.for_mesh(spec)
    if config.vocab_size % spec.tp_size:
        rules = rules.replace(vocab=(), embedded_vocab=())
    if args.embedding_location == "host":
        if config.tie_word_embeddings:
            raise UserError(
                "--embedding-location host keeps the embedding off the devices, but this model's head, which every step multiplies by, "
                "is its embedding (tie_word_embeddings); leave the option out"
            )
        rules = rules.replace(embedded_vocab=()).in_host_memory("embedded_vocab")
    if args.moe_dense_tp_size == 1:
        rules = rules.replace(mlp_width=())
    if args.enable_dp_lm_head:
        rules = rules.replace(vocab=(), head_tokens=spec.head_axes)
        if config.tie_word_embeddings:  # the head is the embedding
            rules = rules.replace(embedded_vocab=())
    return rules


def expert_placement(config: ModelConfig, spec: MeshSpec, redundant: int, *, mtp: bool = False) -> LayerPlacements:
    """Return the expert of each slot of each MoE layer (MTP module last): in order, or with redundant copies spread evenly."""
    experts = config.n_routed_experts
    placement = Placement.identity(experts)
    if redundant:
        placement = Placement.with_redundancy(experts, experts + redundant, ranks=spec.ep_size)
    return LayerPlacements.alike(placement, (config.num_moe_layers + mtp) if config.is_moe else 0)


def _placement_from_file(
    args: EngineArgs, config: ModelConfig, spec: MeshSpec, default: LayerPlacements
) -> LayerPlacements:
    """Return the placement from ``--init-expert-location``: its placement table if that fits, else a placement balanced for its loads.

    If the file has no row for the MTP module, that layer stays as in ``default``. Without the module, its row is ignored.
    """
    if not config.is_moe:
        raise UserError("--init-expert-location is given, but this model has no experts; leave it out")
    location = ExpertLocation.read(args.init_expert_location)
    layers, slots, experts = config.num_moe_layers, default.n_physical, default.n_logical
    rows = default.physical_to_logical.copy()
    if location.physical_to_logical is not None and _fits(location.physical_to_logical, layers, slots):
        placed = location.physical_to_logical[: len(rows)]
    elif location.logical_load is not None and _fits(location.logical_load, layers, experts):
        load = location.logical_load[: len(rows)]
        policy = args.eplb.policy if args.eplb else "auto"
        placed = rebalance(load, n_physical=slots, ranks=spec.ep_size, groups=config.n_group, policy=policy)
    else:
        tables = {name: getattr(location, name) for name in ("physical_to_logical", "logical_load")}
        shapes = {name: None if table is None else list(table.shape) for name, table in tables.items()}
        raise UserError(
            f"--init-expert-location: {args.init_expert_location} has tables of shapes {shapes}; expected physical_to_logical "
            f"[{layers}, {slots}] or logical_load [{layers}, {experts}] for this model on this mesh, or one more row for an MTP module"
        )
    rows[: len(placed)] = placed
    try:
        return LayerPlacements(rows, experts)
    except MeshError as error:
        raise UserError(f"--init-expert-location: {args.init_expert_location}: {error}") from error


def _fits(table: np.ndarray, layers: int, width: int) -> bool:
    return table.shape[1] == width and table.shape[0] in (layers, layers + 1)


def experts_per_exchange(args: EngineArgs, step: ModelStep) -> int:
    """Return the maximum number of experts that a rank sends and receives between two steps; 0 without EPLB or without experts.

    Raises:
        UserError: EPLB is enabled but each device has all experts, or ``max_bytes_per_step`` is less than the bytes of one expert.
    """
    if args.eplb is None or not step.config.is_moe:
        return 0
    if step.apart is None and step.spec.ep_size == 1:
        raise UserError(
            f"--enable-eplb is given, but with --mesh {step.spec} every device holds all experts; leave it out, or use a mesh "
            "with a larger ep"
        )
    least = expert_programs.received_bytes(step)
    most = args.eplb.max_bytes_per_step
    if most < least:
        raise UserError(
            f"--eplb-config has max_bytes_per_step {most:,}, but to move one expert a device receives {least:,} bytes; give that or more"
        )
    return max(1, min(most // max(least, 1), step.placement.n_physical // step.expert_ranks))


def dispatch_method(step: ModelStep, tokens: int, *, halved: bool = False) -> str:
    """Return the dispatch method of a batch with ``tokens`` tokens per DP rank, or with ``halved`` of each of its two halves (DBO).

    ``local``: one device has all experts; ``memory``: emulated devices read tokens in place; ``apart``: experts are on other devices.
    """
    if not step.config.is_moe:
        return "none"
    if step.apart is not None:
        return "apart"
    if halved:
        step = dataclasses.replace(step, dispatch=dataclasses.replace(step.dispatch, overlapped=True))
    return resolved_method(
        step.spec,
        step.experts.config,
        tokens=-(-tokens // 2) if halved else tokens,
        top_k=step.config.num_experts_per_tok,
        experts=step.placement.n_physical,
        platform=step.mesh.devices.flat[0].platform,
    )
