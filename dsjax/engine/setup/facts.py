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
from dsjax.engine.setup.sizes import EngineLayout
from dsjax.model.forms import Form
from dsjax.model.parameters import device_bytes
from dsjax.model.rows import GroupShape
from dsjax.model.step import ModelStep


@dataclass(frozen=True)
class PrefillSizes:
    """Sizes of the prefill engine beside a decode engine, named as in `EngineFacts`."""

    dp_ranks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk: int
    cache_tokens: int
    max_model_len: int  # maximum prompt tokens, plus one; the decode engine computes longer prompts itself

    @classmethod
    def of(cls, facts: EngineFacts) -> PrefillSizes:
        """Return the sizes of a loaded prefill engine."""
        return cls(**{field.name: getattr(facts, field.name) for field in fields(cls)})


@dataclass(frozen=True)
class StageFacts:
    """One pipeline stage. Bytes are per device of the stage."""

    layers: tuple[int, int]  # first and last, counted in the whole model
    weight_bytes: int
    cache_bytes: int


@dataclass(frozen=True)
class EngineFacts:
    """Description of a loaded engine, for the start-up screen and `/server_info`. Bytes are per device unless stated otherwise."""

    model: str
    parameters: int
    mesh: str  # the user's mesh option, normalised
    mesh_shape: dict[str, int]  # sizes of the physical axes, in order
    platform: str
    device_kind: str  # JAX's name of a device, e.g. `cpu` or `NVIDIA H200`
    num_devices: int
    num_processes: int
    dp_ranks: int
    physical_experts_per_device: int
    dtype: str
    weights: str
    # Method of the largest batch of each kind, e.g. `{"prefill": "ragged", "decode": "padded"}`; `local` if one device has all experts,
    # `none` without experts. With `auto`, smaller batches may use another method (docs/dispatch.md).
    dispatch: dict[str, str]
    mla: dict[str, str]  # `prefill` and `decode` to the form of attention
    weight_bytes: dict[str, int]  # by component; with stages, of the stage with the most weights
    cache_bytes: int  # likewise
    cache_tokens: int  # token slots of KV cache on all DP ranks
    page_size: int
    max_model_len: int  # maximum prompt + output, limited by the model, `--max-model-len` and the cache of a DP rank
    max_num_seqs: int  # per DP rank
    max_num_batched_tokens: int  # per DP rank
    prefill_chunk: int  # per DP rank; at most `max_num_batched_tokens`
    host_cache_tokens: int = 0  # token slots in host memory for all DP ranks
    disk_cache_tokens: int = 0  # token slots on the disk, which all DP ranks share
    page_bytes: int = 0  # of one page, all layers, on all devices of a DP rank
    speculation: dict[str, Any] | None = None  # fields of `--speculative-config`; None without speculative decoding
    kernels: dict[str, str] = field(default_factory=dict)  # operation to implementation (`dsjax/kernels/table.py`)
    kernels_note: str = ""  # why no faster implementation is used
    prefill_meshes: list[str] = field(default_factory=list)  # of the prefill engine beside this one
    prefill_sizes: PrefillSizes | None = None  # of the prefill engine beside this one
    activation_scheme: str = "none"  # `--activation-scheme` as resolved
    expert_mesh: str | None = None  # mesh of the disaggregated routed experts, e.g. `ep=24`
    expert_weight_bytes: int = 0  # per device of `expert_mesh`
    stages: list[StageFacts] = field(default_factory=list)  # of `--mesh pp=…`

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with the same names."""
        return asdict(self)


def describe_engine(
    args: EngineArgs, layout: EngineLayout, limits: ExecutorLimits, params: Mapping[str, Array], weights: str
) -> EngineFacts:
    """Return the facts of an engine loaded with these options."""
    step = layout.step
    buckets = layout.buckets
    spec = step.spec
    config = step.config
    device = step.mesh.devices.flat[0]
    apart = step.apart
    infos = dict(step.table.infos)
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
        # Page 0 of each rank is the null page.
        cache_tokens=(limits.pages_per_rank - 1) * limits.page_size * limits.num_ranks,
        page_size=limits.page_size,
        max_model_len=args.scheduler_config(limits).max_request_len,
        max_num_seqs=limits.max_rows_decode,
        max_num_batched_tokens=args.max_num_batched_tokens,
        prefill_chunk=limits.max_chunk,
        disk_cache_tokens=limits.disk_pages * limits.page_size,
        page_bytes=layout.page_bytes(),
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
        return dispatch_method(step, group.tokens, halved=step.runs_in_halves([group]))

    decodes = (decode for decode, _, _ in buckets.shapes() if decode)
    return {"prefill": method(buckets.prefill, step.prefill_form), "decode": method(decodes, step.decode_form)}
