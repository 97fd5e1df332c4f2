"""Weight quantisation of DeepSeek's checkpoints: FP8 e4m3 with a float32 scale per 128 × 128 block; some have 4-bit experts."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dsjax.config.checks import check_choice, check_mapping, reject, required
from dsjax.config.fp4_quantization import METHODS, FP4Quantization, hf_quant_config, read_fp4_quantization

_KEYS = (
    "quant_method",
    "fmt",
    "weight_block_size",
    "activation_scheme",
    "scale_fmt",
    "modules_to_not_convert",
    "expert_dtype",
)


QUANTIZATION_FILES = ("hf_quant_config.json",)
"""Files that some quantisation methods add beside `config.json`; they repeat its `quantization_config`."""


@dataclasses.dataclass(frozen=True)
class QuantizationConfig:
    """Storage of the checkpoint's linear weights: `weight = fp8 × weight_scale_inv` of its block.

    `scale_fmt` is `"ue8m0"` if the scales are powers of two (V3.1), which are still stored as float32.
    """

    weight_block_size: tuple[int, int] = (128, 128)
    fmt: str = "e4m3"
    scale_fmt: str | None = None
    expert_dtype: str | None = None
    """Format of the routed experts: `"fp4"` is MXFP4, as in DeepSeek-V4; `"nvfp4"` and `"int4"` name themselves."""

    def __post_init__(self):
        if self.weight_block_size != (128, 128):
            raise reject("quantization_config.weight_block_size", list(self.weight_block_size), "[128, 128]")
        check_choice("quantization_config.fmt", self.fmt, ("e4m3",))
        if self.scale_fmt is not None:
            check_choice("quantization_config.scale_fmt", self.scale_fmt, ("ue8m0", "float"))
        if self.expert_dtype is not None:
            check_choice("quantization_config.expert_dtype", self.expert_dtype, ("fp8", "fp4", "nvfp4", "int4"))

    @property
    def weights(self) -> str:
        """The `--weights` name of this format."""
        return {None: "fp8", "fp4": "mxfp4"}.get(self.expert_dtype, self.expert_dtype)

    def to_dict(self) -> dict[str, Any]:
        """Return the value of `quantization_config` in Hugging Face's `config.json`."""
        written = {
            "activation_scheme": "dynamic",
            "fmt": self.fmt,
            "quant_method": "fp8",
            "weight_block_size": list(self.weight_block_size),
        }
        further = {"scale_fmt": self.scale_fmt, "expert_dtype": self.expert_dtype}
        return written | {name: value for name, value in further.items() if value is not None}


def read_quantization(raw: Mapping[str, Any]) -> QuantizationConfig | FP4Quantization | None:
    """Read `quantization_config` of a `config.json`; return `None` if it is missing or null.

    Raises `ConfigError` on an unsupported method, format, block or activation scheme, and on unknown keys.
    """
    if raw.get("quantization_config") is None:
        return None
    given = check_mapping("quantization_config", raw["quantization_config"])
    if given.get("quant_method") in METHODS:
        return read_fp4_quantization(given)
    for key in given:
        if key not in _KEYS:
            raise reject(f"quantization_config.{key}", given[key], f"no such key; known are {', '.join(_KEYS)}")
    check_choice(
        "quantization_config.quant_method", required(given, "quant_method", "quantization_config."), ("fp8", *METHODS)
    )
    if given.get("activation_scheme") is not None:
        check_choice("quantization_config.activation_scheme", given["activation_scheme"], ("dynamic",))
    block = required(given, "weight_block_size", "quantization_config.")
    if not isinstance(block, list | tuple):
        raise reject("quantization_config.weight_block_size", block, "[128, 128]")
    return QuantizationConfig(
        weight_block_size=tuple(block),
        fmt=given.get("fmt", "e4m3"),
        scale_fmt=given.get("scale_fmt"),
        expert_dtype=given.get("expert_dtype"),
    )


Quantization = QuantizationConfig | FP4Quantization
"""Any parsed `quantization_config`."""


def quantization_files(written: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the contents of those `QUANTIZATION_FILES` that accompany a `quantization_config`, by file name."""
    fields = hf_quant_config(written)
    return {} if fields is None else {QUANTIZATION_FILES[0]: fields}
