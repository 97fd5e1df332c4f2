"""`EngineFacts`: description of a loaded engine, for display."""

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
    """Sizes of the prefill engine beside a decode engine. Fields as in `EngineFacts`, except:

    max_model_len: maximum prompt tokens, plus one; the decode engine computes longer prompts itself.
    """

    dp_ranks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk: int
    cache_tokens: int
    max_model_len: int

    @classmethod
    def of(cls, facts: EngineFacts) -> PrefillSizes:
        """Return the sizes of a loaded prefill engine."""
        return cls(**{field.name: getattr(facts, field.name) for field in fields(cls)})


@dataclass(frozen=True)
class StageFacts:
    """One pipeline stage. layers: first and last, counted in the whole model. Bytes are per device of the stage."""

    layers: tuple[int, int]
    weight_bytes: int
    cache_bytes: int


@dataclass(frozen=True)
class EngineFacts:
    """Description of a loaded engine, for the start-up screen and `/server_info`. Bytes are per device unless stated otherwise.

    Attributes:
        mesh: the user's mesh option, normalised. mesh_shape: sizes of the physical axes, in order.
        device_kind: JAX's name of a device, e.g. `cpu` or `NVIDIA H200`.
        dispatch: method of the largest batch of each kind, e.g. `{"prefill": "ragged", "decode": "padded"}`; `local` if one device has all
            experts, `none` without experts. With `auto`, smaller batches may use another method (docs/dispatch.md).
        kernels: operation to implementation, e.g. `{"experts": "native"}` (`dsjax/kernels/table.py`); kernels_note: why no faster one.
        activation_scheme: `--activation-scheme` as resolved. weight_bytes: by component.
        cache_tokens, host_cache_tokens, disk_cache_tokens: token slots of KV cache, host memory and disk, summed over all DP
            ranks.
        max_model_len: maximum prompt + output, limited by the model, `--max-model-len` and the cache of a DP rank.
        max_num_seqs, max_num_batched_tokens, prefill_chunk: per DP rank, see `EngineArgs`; a step's size caps the last.
        prefill_meshes, prefill_sizes: of the prefill engine beside this one; empty and None without it.
        page_bytes: of one page, all layers, on all devices of a DP rank.
        expert_mesh: mesh of the disaggregated routed experts, e.g. `ep=24`. expert_weight_bytes: per device of that mesh.
        speculation: fields of `--speculative-config`; None without speculative decoding.
        stages: the stages of `--mesh pp=…`; `weight_bytes` and `cache_bytes` are then of the stage with the most weights.
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
        """Return a JSON object with the same names."""
        return asdict(self)


def describe_engine(
    args: EngineArgs,
    step: ModelStep,
    limits: ExecutorLimits,
    buckets: Buckets,
    params: Mapping[str, Array],
    weights: str,
) -> EngineFacts:
    """Return the facts of an engine loaded with these options."""
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
    """Return the dispatch method of the largest batch of each kind; with two-batch overlap, the method of each half."""

    def method(rectangles: Iterable[Rectangle], form: Form) -> str:
        rows, chunk = max(rectangles, key=lambda rectangle: rectangle.rows * rectangle.chunk)
        group = GroupShape(rows, chunk, 1, form)
        return dispatch_method(step, group.tokens, halved=step.in_halves([group]))

    decodes = (rectangle for rectangle, _, _ in buckets.shapes() if rectangle)
    return {"prefill": method(buckets.prefill, step.prefill_form), "decode": method(decodes, step.decode_form)}
