"""`Precision`: bytes per value of weights, cache and dispatch, and the device units that multiply them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dsjax.config import ModelConfig
from dsjax.fp4.formats import INT4, MXFP4, NVFP4, UNQUANTISED, PackedFormat
from dsjax.model import cache_groups
from dsjax.model.cache_groups import CacheGroup
from dsjax.model.layer_costs import smallest_pages
from dsjax.plan.rules import refuse
from sharding import fp8

FP8_BLOCK = 1 + 4 / (128 * 128)
"""Bytes of an FP8 weight with its share of the block's float32 scale."""
FP8_ROW = 1 + 4 / 128
"""Bytes of a dispatched FP8 value with its share of the row's float32 scales."""
BF16 = 2.0
FP8_CACHE = 656 / 576
"""Bytes per value of dsjax's FP8 cache at V3's widths: 512 e4m3 latents, their four float32 scales, 64 RoPE values in bf16, as in
FlashMLA. Other engines' FP8 caches count one byte per value with a single scale, as in vLLM and TensorRT-LLM."""


@dataclass(frozen=True)
class Precision:
    """Bytes per value of weights, cache and dispatched rows. Embedding, head, router and norms are bf16; combine is bf16."""

    name: str
    expert: float  # weights of routed experts
    linear: float  # the other linear weights
    cache: float = BF16
    wire: float = BF16  # dispatched rows
    packed: PackedFormat | None = None  # the format of expert weights of four bits
    packs_mlp: bool = True  # dense MLPs and shared experts are stored like routed experts; else like `linear`
    widens_fp4: bool = False  # FP4 weights are multiplied in bf16, on any device

    @property
    def weights(self) -> str | None:
        """Name of these weights in a dry run; None if dry runs do not have them."""
        if self.widens_fp4:
            return self.name
        if self.expert != self.linear:
            return None
        return {FP8_BLOCK: "fp8", BF16: "bfloat16"}.get(self.linear)

    @property
    def mlp(self) -> float:
        """Bytes of a dense-MLP or shared-expert weight."""
        return self.expert if self.packs_mlp else self.linear

    def cache_groups(self, config: ModelConfig, layers: Iterable[int]) -> tuple[CacheGroup, ...]:
        """Return the cache groups of `layers`, with pages of as few tokens as the model allows."""
        one_byte = np.uint8  # FP8 with one scale for all values
        dtypes = {FP8_CACHE: fp8.E4M3, 1.0: one_byte, BF16: cache_groups.BF16, 4.0: np.float32}
        return smallest_pages(config, layers, np.dtype(dtypes[self.cache]), fp8_index=self.cache < BF16)

    @property
    def blocks(self) -> dict[str, int | None]:
        """Block sizes that sharding must not split, of FP8 matrices and of packed routed experts: arguments of `layouts`."""
        return {
            "block": 128 if self.linear == FP8_BLOCK else None,
            "expert_block": None if self.packed is None else self.packed.block,
        }

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
        return dataclasses.replace(self, wire=FP8_ROW, packs_mlp=False, widens_fp4=True)


TABLE_FORMATS = {"nvfp4": (4, 0.5625), "fp8_block": (8, 1.0), "bfloat16": (16, BF16)}
"""Name of a weight format in operator tables → (bits of the unit that multiplies it, bytes per weight)."""


def table_format(itemsize: float) -> str:
    """Return the name in `TABLE_FORMATS` of weights of `itemsize` bytes."""
    if itemsize < 1:
        return "nvfp4"
    return "fp8_block" if itemsize < BF16 else "bfloat16"


def operand_bytes(itemsize: float) -> float:
    """Return the bytes of an activation that is multiplied by weights of `itemsize` bytes in their own format."""
    return TABLE_FORMATS[table_format(itemsize)][1]


def checkpoint_precision(config: ModelConfig, chosen: Precision) -> Precision:
    """Return the precision of a model's checkpoint, which dsjax quantises or widens while loading. A checkpoint whose config does not name
    its four-bit format counts as the chosen precision."""
    if config.quantization is None:
        return PRECISIONS["bf16"]
    stored_weights = config.quantization.weights
    return chosen if stored_weights is None else PRECISIONS[stored_weights].only_experts_packed()


def matrix_bytes(shapes: Sequence[tuple[int, int]], itemsize: float, packed: PackedFormat | None = None) -> int:
    """Return the bytes of matrices at `itemsize` bytes per value, including the scales of partial blocks and of tensors.

    packed: their format, if a value takes less than a byte.
    """
    if itemsize == FP8_BLOCK:
        return sum(k * n + 4 * math.ceil(k / 128) * math.ceil(n / 128) for k, n in shapes)
    num_bytes = round(sum(k * n * itemsize for k, n in shapes))
    if itemsize < 1 and packed is not None and packed.has_global:
        num_bytes += 4 * len(shapes)
    return num_bytes


def _packed(form: PackedFormat, wire: float = FP8_ROW, cache: float = BF16) -> dict[str, Precision]:
    """Return both precisions of a packed format by name: linear weights in FP8, and in bf16. Dense MLPs are packed too, except in INT4."""
    in_fp8 = Precision(
        form.name, form.bytes_per_value, FP8_BLOCK, cache, wire, packed=form, packs_mlp=not form.integers
    )
    in_bf16 = dataclasses.replace(in_fp8, name=form.name + UNQUANTISED, linear=BF16)
    return {in_fp8.name: in_fp8, in_bf16.name: in_bf16}


PRECISIONS = {
    "fp8": Precision("fp8", FP8_BLOCK, FP8_BLOCK, wire=FP8_ROW),
    "bf16": Precision("bf16", BF16, BF16),
    **_packed(NVFP4, wire=NVFP4.bytes_per_value, cache=1.0),
    **_packed(MXFP4, cache=1.0),
    **_packed(INT4),
    "int8": Precision("int8", FP8_BLOCK, FP8_BLOCK),
}
"""`fp8`: DeepSeek's own checkpoint. `nvfp4`: experts and dense MLP in FP4, attention FP8, FP8 cache, FP4 dispatch; `nvfp4-bf16`: the same
with attention in bf16, as NVIDIA's DeepSeek-R1-0528-FP4. `mxfp4`, `mxfp4-bf16`: the same with MXFP4, dispatched in FP8; `int4`,
`int4-bf16`: INT4, as Kimi-K2.5's checkpoint. dsjax itself packs only routed experts (`Precision.only_experts_packed`). `int8`: block-wise
INT8 as meituan/DeepSeek-R1-Block-INT8, dispatched in bf16, at FP8's speed: both units are equally fast on Hopper, Ada and B200."""


def named_precision(name: str, cache: str = "auto") -> Precision:
    """Return one of `PRECISIONS`, with its default cache or one in `bf16` or `fp8`. Raises `UserError` for an unknown name of either."""
    refuse("precision", name=name, cache=cache, known=list(PRECISIONS))
    if cache == "auto":
        return PRECISIONS[name]
    return dataclasses.replace(PRECISIONS[name], cache={"bf16": BF16, "fp8": 1.0}[cache])
