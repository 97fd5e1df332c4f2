"""The table of weight formats: one row for each name of ``--weights``, which says how it is kept, stored, cut, sized and multiplied.

Whoever has to know a format asks the row of its name. A new format is a row, its folder (``dsjax/fp4`` is that of NVFP4, MXFP4, INT4), a
reader of its tensors in ``dsjax/checkpoint`` and its products. No JAX here: planner and command line read it, too.
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
    """How a model's matrices are kept.

    name: what ``--weights`` calls it. experts, others: how routed experts' matrices and all other ones are kept: ``f32``, ``bf16``,
    ``fp8``, and of experts the name of a packed format too. packed: that format. serves: whether ``dsjax serve`` takes the name; others
    come from ``auto``. converts: whether ``dsjax convert`` writes it. listed: whether ``dsjax info`` gives its bytes.
    """

    name: str
    experts: str
    others: str
    packed: PackedFormat | None = None
    serves: bool = False
    converts: bool = False
    listed: bool = False

    @property
    def keeps_fp8(self) -> bool:
        """Whether matrices other than routed experts are FP8."""
        return self.others == "fp8"

    @property
    def plain(self) -> str:
        """How what is never quantised is kept: norms, router, embedding, head."""
        return "f32" if self.others == "f32" else "bf16"

    @property
    def expert_bytes(self) -> float:
        """Bytes of a number of a routed expert, with its share of a packed block's scale."""
        return _BYTES[self.experts] if self.packed is None else self.packed.bytes_per_value

    @property
    def block(self) -> int | None:
        """Numbers along a side of an FP8 block, which no split of a matrix may cut; None where there is none."""
        return FP8_BLOCK if self.keeps_fp8 else None

    @property
    def expert_block(self) -> int | None:
        """Numbers along a routed expert's depth that share a packed block's scale; None: as ``block``."""
        return None if self.packed is None else self.packed.block

    @property
    def row_formats(self) -> tuple[str, ...]:
        """Formats that rows of routed experts can be quantised to beside FP8, as ``--activation-scheme`` calls them."""
        return (self.packed.name,) if self.packed is not None and self.packed.has_global else ()

    @property
    def quantises_rows(self) -> bool:
        """Whether products with its weights can take quantised rows at all."""
        return self.experts == "fp8" or self.packed is not None

    def quantization_config(self, dense_layers: int) -> dict[str, Any] | None:
        """What ``config.json`` of a checkpoint says of it; None where nothing is quantised. dense_layers: of the model, never packed."""
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
"""``mixed``: routed experts in bf16, all others in float32. It is for computing in float32 from a bf16 checkpoint: widening is exact,
experts are most of the bytes, and only those that have tokens are read."""
SERVED = tuple(name for name, row in WEIGHT_FORMATS.items() if row.serves)
CONVERTED = tuple(name for name, row in WEIGHT_FORMATS.items() if row.converts)
PACKED = tuple(name for name, row in WEIGHT_FORMATS.items() if row.packed is not None)
ROW_FORMATS = tuple(dict.fromkeys(name for row in WEIGHT_FORMATS.values() for name in row.row_formats))
