"""The one weight quantisation that DeepSeek's checkpoints use: FP8 e4m3 with a float32 scale per 128 × 128 block."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dsjax.config.checks import check_choice, check_mapping, reject, required

_KEYS = ("quant_method", "fmt", "weight_block_size", "activation_scheme", "scale_fmt", "modules_to_not_convert")


@dataclasses.dataclass(frozen=True)
class QuantizationConfig:
    """How the checkpoint's linear weights are stored: `weight = fp8 × weight_scale_inv` of its block.

    `scale_fmt` is `"ue8m0"` where the scales are powers of two (V3.1); they are stored as float32 all the same.
    """

    weight_block_size: tuple[int, int] = (128, 128)
    fmt: str = "e4m3"
    scale_fmt: str | None = None

    def __post_init__(self):
        if self.weight_block_size != (128, 128):
            raise reject("quantization_config.weight_block_size", list(self.weight_block_size), "[128, 128]")
        check_choice("quantization_config.fmt", self.fmt, ("e4m3",))
        if self.scale_fmt is not None:
            check_choice("quantization_config.scale_fmt", self.scale_fmt, ("ue8m0", "float"))

    def to_dict(self) -> dict[str, Any]:
        """The value of `quantization_config` in Hugging Face's `config.json`."""
        written = {
            "activation_scheme": "dynamic",
            "fmt": self.fmt,
            "quant_method": "fp8",
            "weight_block_size": list(self.weight_block_size),
        }
        return written if self.scale_fmt is None else {**written, "scale_fmt": self.scale_fmt}


def read_quantization(raw: Mapping[str, Any]) -> QuantizationConfig | None:
    """Read `quantization_config` of a `config.json`; `None` where it is missing or null.

    Raises `ConfigError` on any other method, format, block or activation scheme, and on unknown keys.
    """
    if raw.get("quantization_config") is None:
        return None
    given = check_mapping("quantization_config", raw["quantization_config"])
    for key in given:
        if key not in _KEYS:
            raise reject(f"quantization_config.{key}", given[key], f"no such key; known are {', '.join(_KEYS)}")
    check_choice("quantization_config.quant_method", required(given, "quant_method", "quantization_config."), ("fp8",))
    if given.get("activation_scheme") is not None:
        check_choice("quantization_config.activation_scheme", given["activation_scheme"], ("dynamic",))
    block = required(given, "weight_block_size", "quantization_config.")
    if not isinstance(block, list | tuple):
        raise reject("quantization_config.weight_block_size", block, "[128, 128]")
    return QuantizationConfig(
        weight_block_size=tuple(block), fmt=given.get("fmt", "e4m3"), scale_fmt=given.get("scale_fmt")
    )
