"""`Precision`: bytes per value of weights, cache and dispatch, and the device units that multiply them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dsjax.config import ModelConfig
from dsjax.fp4.formats import INT4, MXFP4, NVFP4, UNQUANTISED, PackedFormat
from dsjax.hardware import Hardware
from dsjax.model import cache_groups
from dsjax.model.cache_groups import CacheGroup
from dsjax.model.layer_costs import smallest_pages
from dsjax.plan.rules import refuse
from sharding import fp8

FP8_BLOCK = 1 + 4 / (128 * 128)
"""Bytes of an FP8 weight with its share of the block's float32 scale."""
BF16 = 2.0
FP8_CACHE = 656 / 576
"""Bytes per value of dsjax's FP8 cache at V3's widths: 512 e4m3 latents, their four float32 scales, 64 RoPE values in bf16, as in
FlashMLA. Other engines' FP8 caches count one byte per value with a single scale, as in vLLM and TensorRT-LLM."""


@dataclass(frozen=True)
class Precision:
    """Bytes per value of expert and dense-MLP weights, of the other linear weights, of the cache, and of dispatched rows.

    Embedding, head, router and norms are bf16; combine is bf16.
    """

    name: str
    expert: float
    linear: float
    cache: float = BF16
    wire: float = FP8_BLOCK
    mlp_bytes: float | None = None  # of dense-MLP and shared-expert weights; None: as the routed experts'
    packed: PackedFormat | None = None  # the format of expert weights of four bits
    widens_fp4: bool = False  # FP4 weights are multiplied in bf16, on any device

    @property
    def weights(self) -> str | None:
        """Name of these weights in a dry run; None if dry runs do not have them."""
        if self.widens_fp4 and self.packed is not None:
            return self.name
        return {FP8_BLOCK: "fp8", BF16: "bfloat16"}.get(self.linear) if self.expert == self.linear else None

    @property
    def mlp(self) -> float:
        """Bytes of a dense-MLP or shared-expert weight."""
        return self.expert if self.mlp_bytes is None else self.mlp_bytes

    def cache_groups(self, config: ModelConfig, layers: Iterable[int]) -> tuple[CacheGroup, ...]:
        """The cache groups of these layers, with the tokens of the smallest page.

        One byte a value is FP8 with one scale for all values.
        """
        dtypes = {FP8_CACHE: fp8.E4M3, 1.0: np.uint8, BF16: cache_groups.BF16, 4.0: np.float32}
        dtype, fp8_index = np.dtype(dtypes[self.cache]), self.cache < BF16
        return smallest_pages(config, layers, dtype, fp8_index=fp8_index)

    @property
    def blocks(self) -> dict[str, int | None]:
        """Block sizes that sharding must not split: of FP8 matrices, and of packed routed experts."""
        packed = None if self.packed is None else self.packed.block
        return {"block": 128 if self.linear == FP8_BLOCK else None, "expert_block": packed}

    @property
    def expert_bits(self) -> int:
        """Bits of the operands that a device multiplies by the experts' weights."""
        if self.expert < 1:
            return 16 if self.widens_fp4 else 4
        return 8 if self.expert < BF16 else 16

    def only_experts_packed(self) -> Precision:
        """Return dsjax's form of a four-bit precision (docs/fp4.md): only routed experts packed, widened to bf16, and dispatch in FP8."""
        if self.packed is None:
            return self
        return dataclasses.replace(self, wire=_WIRE_FP8, mlp_bytes=self.linear, widens_fp4=True)

    def check_units(self, chip: Hardware) -> None:
        """Check that a device can multiply by these weights.

        Raises:
            UserError: FP4 on a device that has no FP4 unit, or INT8 on one that has none as fast as its FP8 one.
        """
        refuse("units", o=self, chip=chip)


TABLED = {"nvfp4": (4, 0.5625), "fp8_block": (8, 1.0), "bfloat16": (16, BF16)}
"""Name of a weight format in operator tables → (bits of the unit that multiplies it, bytes per weight)."""


def tabled(itemsize: float) -> str:
    """Return the name in `TABLED` of weights of `itemsize` bytes."""
    return "nvfp4" if itemsize < 1 else "fp8_block" if itemsize < BF16 else "bfloat16"


def of_files(config: ModelConfig, chosen: Precision) -> Precision:
    """Return the precision of a model's checkpoint, which dsjax quantises or widens while loading. A checkpoint whose config does not name
    its four-bit format counts as the chosen precision."""
    if config.quantization is None:
        return PRECISIONS["bf16"]
    kept = config.quantization.weights
    return chosen if kept is None else PRECISIONS[kept].only_experts_packed()


def bytes_of(matrices: Sequence[tuple[int, int]], itemsize: float, packed: PackedFormat | None = None) -> int:
    """Return the bytes of matrices of these shapes at `itemsize` bytes per value, including the scales of partial blocks and of tensors.

    packed: their format, if a value takes less than a byte.
    """
    if itemsize == FP8_BLOCK:
        return sum(k * n + 4 * math.ceil(k / 128) * math.ceil(n / 128) for k, n in matrices)
    wholes = 4 * len(matrices) if itemsize < 1 and packed is not None and packed.has_global else 0
    return round(sum(k * n * itemsize for k, n in matrices)) + wholes


_WIRE_FP8 = 1 + 4 / 128


def _packed(form: PackedFormat, wire: float = _WIRE_FP8, cache: float = BF16) -> dict[str, Precision]:
    """Return both precisions of a packed format by name: linear weights in FP8, and in bf16. Dense MLPs are packed too, except in INT4."""
    rows = {form.name: FP8_BLOCK, form.name + UNQUANTISED: BF16}
    return {
        name: Precision(
            name, form.bytes_per_value, linear, cache, wire, mlp_bytes=linear if form.integers else None, packed=form
        )
        for name, linear in rows.items()
    }


PRECISIONS = {
    "fp8": Precision("fp8", FP8_BLOCK, FP8_BLOCK, wire=_WIRE_FP8),
    "bf16": Precision("bf16", BF16, BF16, wire=BF16),
    **_packed(NVFP4, wire=NVFP4.bytes_per_value, cache=1.0),
    **_packed(MXFP4, cache=1.0),
    **_packed(INT4),
    "int8": Precision("int8", FP8_BLOCK, FP8_BLOCK, wire=BF16),
}
"""`fp8`: DeepSeek's own checkpoint. `nvfp4`: experts and dense MLP in FP4, attention FP8, FP8 cache, FP4 dispatch; `nvfp4-bf16`: the same
with attention in bf16, as NVIDIA's DeepSeek-R1-0528-FP4. `mxfp4`, `mxfp4-bf16`: the same with MXFP4, dispatched in FP8; `int4`,
`int4-bf16`: INT4, as Kimi-K2.5's checkpoint. dsjax itself packs only routed experts (`Precision.only_experts_packed`). `int8`: block-wise
INT8 as meituan/DeepSeek-R1-Block-INT8, dispatched in bf16, at FP8's speed: both units are equally fast on Hopper, Ada and B200."""


def precision(name: str, cache: str = "auto") -> Precision:
    """Return one of `PRECISIONS`, with its default cache or one in `bf16` or `fp8`. Raises `UserError` for an unknown name of either."""
    refuse("precision", name=name, cache=cache, known=list(PRECISIONS))
    chosen = PRECISIONS[name]
    if cache == "auto":
        return chosen
    return dataclasses.replace(chosen, cache={"bf16": BF16, "fp8": 1.0}[cache])
