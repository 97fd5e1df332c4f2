"""`EngineFacts`: what a loaded engine is, for whoever shows it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from jaxtyping import Array

from dsjax.engine.contract.executor import ExecutorLimits
from dsjax.engine.device import cache as device_cache
from dsjax.engine.device.buckets import Buckets, Rectangle
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.assembly import dispatch_method
from dsjax.engine.setup.sizes import page_bytes
from dsjax.model.forms import Form
from dsjax.model.parameters import device_bytes
from dsjax.model.rows import GroupShape
from dsjax.model.step import ModelStep


@dataclass(frozen=True)
class PrefillSizes:
    """Sizes of the engine that computes prompts for another one beside it. Most fields are those of `EngineFacts`.

    max_model_len: tokens of a prompt, and one more, that it has room for; longer prompts are computed where they are decoded.
    """

    dp_ranks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk: int
    cache_tokens: int
    max_model_len: int

    @classmethod
    def of(cls, facts: EngineFacts) -> PrefillSizes:
        """Take the sizes from what was loaded for such an engine."""
        return cls(**{field.name: getattr(facts, field.name) for field in fields(cls)})


@dataclass(frozen=True)
class StageFacts:
    """What a stage of a model has. layers: its first and its last, of the whole model; bytes are of one of its devices."""

    layers: tuple[int, int]
    weight_bytes: int
    cache_bytes: int


@dataclass(frozen=True)
class EngineFacts:
    """What a loaded engine is, for the start-up screen, `/server_info` and whoever asks; bytes are of one device.

    Attributes:
        mesh: as the user wrote it, normalised. mesh_shape: sizes of the physical axes, in order.
        device_kind: what JAX calls a device, e.g. `cpu` or `NVIDIA H200`.
        dispatch: of the fullest launch of each kind, e.g. `{"prefill": "ragged", "decode": "padded"}`; `local` where one device holds all
            experts, `none` without experts. With `auto` a smaller launch may use another method (docs/dispatch.md).
        kernels: operation to implementation, e.g. `{"experts": "native"}` (`dsjax/kernels/table.py`); kernels_note: why none faster.
        activation_scheme: what `--activation-scheme` came to. weight_bytes: by component.
        cache_tokens, host_cache_tokens, disk_cache_tokens: token slots of the latent cache, of host memory and of the disk, all DP ranks
            together.
        max_model_len: longest prompt + output, by the model, `--max-model-len` and what the cache of a DP rank holds.
        max_num_seqs, max_num_batched_tokens, prefill_chunk: of a DP rank, see `EngineArgs`; the last at most what a step has room for.
        prefill_meshes, prefill_sizes: of the engine beside this one that computes its prompts; empty and None without it.
        page_bytes: of one page, all layers, on all the devices of a DP rank.
        expert_mesh: of the devices beside these that have the routed experts, e.g. `ep=24`. expert_weight_bytes: of one such device.
        speculation: with the fields of `--speculative-config`; None where nothing is drafted.
        stages: what each stage of `--mesh pp=…` has; `weight_bytes` and `cache_bytes` are then of the one with most weights.
    """

    model: str
    parameters: int
    mesh: str
    mesh_shape: dict[str, int]
    platform: str
    device_kind: str
    num_devices: int
    num_processes: int
    dp_ranks: int
    physical_experts_per_device: int
    dtype: str
    weights: str
    dispatch: dict[str, str]
    mla: dict[str, str]
    weight_bytes: dict[str, int]
    cache_bytes: int
    cache_tokens: int
    page_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk: int
    host_cache_tokens: int = 0
    disk_cache_tokens: int = 0
    page_bytes: int = 0
    speculation: dict[str, Any] | None = None
    kernels: dict[str, str] = field(default_factory=dict)
    kernels_note: str = ""
    prefill_meshes: list[str] = field(default_factory=list)
    prefill_sizes: PrefillSizes | None = None
    activation_scheme: str = "none"
    expert_mesh: str | None = None
    expert_weight_bytes: int = 0
    stages: list[StageFacts] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Give a JSON object with the same names."""
        return asdict(self)


def describe_engine(
    args: EngineArgs,
    step: ModelStep,
    limits: ExecutorLimits,
    buckets: Buckets,
    params: Mapping[str, Array],
    weights: str,
) -> EngineFacts:
    """Say what an engine is that was loaded with these options."""
    spec, config, device = step.spec, step.config, step.mesh.devices.flat[0]
    apart, infos = step.apart, dict(step.table.infos)
    if apart is not None:
        infos |= apart.infos
    cache_bytes = device_cache.bytes_per_page(step) * limits.pages_per_rank
    cache_bytes += device_cache.bytes_per_page(step, "window") * limits.windows_per_rank
    return EngineFacts(
        model=args.model,
        parameters=sum(info.count for info in infos.values()),
        mesh=str(spec),
        mesh_shape=dict(step.mesh.shape),
        platform=device.platform,
        device_kind=device.device_kind,
        num_devices=spec.num_devices,
        num_processes=len({device.process_index for device in step.mesh.devices.flat}),
        dp_ranks=spec.dp_size,
        physical_experts_per_device=step.placement.n_physical // step.expert_ranks if config.is_moe else 0,
        dtype=str(step.dtype),
        weights=weights,
        dispatch=_dispatch_methods(step, buckets),
        mla={"prefill": step.prefill_form.name, "decode": step.decode_form.name},
        weight_bytes=device_bytes(params),
        cache_bytes=cache_bytes,
        cache_tokens=(limits.pages_per_rank - 1) * limits.page_size * limits.num_ranks,
        page_size=limits.page_size,
        max_model_len=args.scheduler_config(limits).max_request_len,
        max_num_seqs=limits.max_rows_decode,
        max_num_batched_tokens=args.max_num_batched_tokens,
        prefill_chunk=limits.max_chunk,
        disk_cache_tokens=limits.disk_pages * limits.page_size,
        page_bytes=page_bytes(args, step),
        host_cache_tokens=limits.host_pages_per_rank * limits.page_size * limits.num_ranks,
        speculation=None if args.speculation is None else asdict(args.speculation),
        kernels=step.implementations,
        kernels_note=step.kernels.note,
        activation_scheme=str(step.scheme),
        expert_mesh=None if apart is None else f"ep={apart.spec.ep_size}",
        expert_weight_bytes=0 if apart is None else apart.bytes_of_device,
    )


def _dispatch_methods(step: ModelStep, buckets: Buckets) -> dict[str, str]:
    """Say how the fullest launch of each kind sends tokens to their experts: of one in two halves, how each half does."""

    def method(rectangles: Iterable[Rectangle], form: Form) -> str:
        rows, chunk = max(rectangles, key=lambda rectangle: rectangle.rows * rectangle.chunk)
        group = GroupShape(rows, chunk, 1, form)
        return dispatch_method(step, group.tokens, halved=step.in_halves([group]))

    decodes = (rectangle for rectangle, _, _ in buckets.shapes() if rectangle)
    return {"prefill": method(buckets.prefill, step.prefill_form), "decode": method(decodes, step.decode_form)}
