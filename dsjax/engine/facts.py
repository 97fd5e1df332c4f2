"""`EngineFacts`: what a loaded engine is, for the start-up screen, `/v1/models` and whoever asks."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class EngineFacts:
    """Known once the model is loaded; bytes are of one device.

    Attributes:
        mesh: as the user wrote it, normalised: `dp=4,tp=8`.
        mesh_shape: sizes of the physical axes, in order.
        device_kind: what JAX calls a device, e.g. `cpu` or `NVIDIA H200`.
        dispatch: e.g. `{"prefill": "ragged", "decode": "padded"}`.
        mla: e.g. `{"prefill": "CC", "decode": "A_CC_ME"}`.
        kernels: operation to implementation, e.g. `{"experts": "native"}` (`dsjax/kernels/table.py`); kernels_note: why none faster.
        weight_bytes: by component.
        cache_tokens: token slots of the latent cache, all DP ranks together.
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
    kernels: dict[str, str] = field(default_factory=dict)
    kernels_note: str = ""

    def to_json(self) -> dict[str, Any]:
        """As a JSON object with the same names."""
        return asdict(self)
