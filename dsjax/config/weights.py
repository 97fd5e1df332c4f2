"""Table of weight formats: one row per ``--weights`` name, with its dtypes, sizes, blocks and matrix products.

All code looks formats up here by name. To add a format: a row, a folder (``dsjax/fp4`` for NVFP4, MXFP4, INT4), a reader of its tensors
in ``dsjax/checkpoint``, and its matrix products. This module does not import JAX, because the planner and the command line use it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsjax.config.fp4_quantization import fp4_quantization
from dsjax.config.quantization import QuantizationConfig
from dsjax.fp4.formats import FORMATS, UNQUANTISED, PackedFormat

_BYTES = {"f32": 4, "bf16": 2, "fp8": 1}
FP8_BLOCK = 128


@dataclass(frozen=True)
class WeightFormat:
    """Format of a model's matrices."""

    name: str  # the ``--weights`` value
    experts: str  # format of the routed experts' matrices: ``f32``, ``bf16``, ``fp8`` or a packed format
    others: str  # format of all other matrices: ``f32``, ``bf16`` or ``fp8``
    packed: PackedFormat | None = None  # packed format of the experts, if they have one
    serves: bool = False  # whether ``dsjax serve`` accepts the name; ``auto`` chooses the others
    converts: bool = False  # whether ``dsjax convert`` writes it
    listed: bool = False  # whether ``dsjax info`` shows its bytes

    @property
    def keeps_fp8(self) -> bool:
        """Whether matrices other than routed experts are FP8."""
        return self.others == "fp8"

    @property
    def plain(self) -> str:
        """Format of parameters that are never quantised: norms, router, embedding, head."""
        return "f32" if self.others == "f32" else "bf16"

    @property
    def expert_bytes(self) -> float:
        """Bytes per value of a routed expert, including its share of a packed block's scale."""
        return _BYTES[self.experts] if self.packed is None else self.packed.bytes_per_value

    @property
    def block(self) -> int | None:
        """Side length of an FP8 block, which sharding must not split; None without FP8."""
        return FP8_BLOCK if self.keeps_fp8 else None

    @property
    def expert_block(self) -> int | None:
        """Number of values along a routed expert's contraction dimension that share a packed scale; None: as ``block``."""
        return None if self.packed is None else self.packed.block

    @property
    def row_formats(self) -> tuple[str, ...]:
        """Formats besides FP8 that routed experts' activations can be quantised to, by ``--activation-scheme`` name."""
        return (self.packed.name,) if self.packed is not None and self.packed.has_global else ()

    @property
    def quantises_rows(self) -> bool:
        """Whether matrix products with these weights support quantised activations."""
        return self.experts == "fp8" or self.packed is not None

    def quantization_config(self, dense_layers: int) -> dict[str, Any] | None:
        """Return ``config.json``'s ``quantization_config``; None if unquantised. dense_layers: number of dense layers, never packed."""
        if self.packed is not None:
            return fp4_quantization(self.name, dense_layers)
        return QuantizationConfig().to_dict() if self.keeps_fp8 else None


def _rows() -> list[WeightFormat]:
    rows = [
        WeightFormat("f32", "f32", "f32", converts=True),
        WeightFormat("bf16", "bf16", "bf16", converts=True, listed=True),
        WeightFormat("mixed", "bf16", "f32"),
        WeightFormat("fp8", "fp8", "fp8", serves=True, converts=True, listed=True),
    ]
    for name, form in FORMATS.items():
        rows.append(WeightFormat(name, name, "fp8", form, serves=True, converts=True, listed=True))
        rows.append(WeightFormat(name + UNQUANTISED, name, "bf16", form, serves=True, converts=True))
    return rows


WEIGHT_FORMATS = {row.name: row for row in _rows()}
"""``mixed``: routed experts in bf16, all others in float32, for float32 computation from a bf16 checkpoint: widening is exact,
experts are most of the bytes, and only experts with tokens are read."""
SERVED = tuple(name for name, row in WEIGHT_FORMATS.items() if row.serves)
CONVERTED = tuple(name for name, row in WEIGHT_FORMATS.items() if row.converts)
PACKED = tuple(name for name, row in WEIGHT_FORMATS.items() if row.packed is not None)
ROW_FORMATS = tuple(dict.fromkeys(name for row in WEIGHT_FORMATS.values() for name in row.row_formats))
