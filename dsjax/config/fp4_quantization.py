"""`quantization_config` of checkpoints with FP4 or INT4 matrices: accepted values, and the values that `dsjax convert` writes.

The tensors determine each matrix's format; the configuration only states a supported method.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dsjax.config.checks import check_choice, check_mapping, reject
from dsjax.fp4.formats import INT4, UNQUANTISED, experts_format

_MODELOPT = ("NVFP4", "NVFP4_AWQ", "W4A8_NVFP4_FP8", "W4A8_MXFP4_FP8", "MIXED_PRECISION")
_INT4 = "pack-quantized"
_COMPRESSED_TENSORS = ("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mixed-precision", _INT4)
_INT4_WEIGHTS = {
    "num_bits": 4,
    "group_size": INT4.block,
    "type": "int",
    "strategy": "group",
    "symmetric": True,
    "actorder": None,
}
"""Required values for `pack-quantized` weights."""
METHODS = ("modelopt", "modelopt_fp4", "compressed-tensors", "quark", "mxfp4")


@dataclasses.dataclass(frozen=True)
class FP4Quantization:
    """A method of `METHODS`."""

    fields: Mapping[str, Any] = dataclasses.field(hash=False)  # the whole `quantization_config`, written back unchanged
    scale_fmt: str | None = None
    """Format of activation scales, as in `QuantizationConfig`; always None, since these methods have no such field."""

    @property
    def weights(self) -> str | None:
        """The `--weights` name of the files' format; None if the fields do not determine it."""
        return INT4.name + UNQUANTISED if self.fields.get("format") == _INT4 else None

    def to_dict(self) -> dict[str, Any]:
        """Return the value of `quantization_config` in Hugging Face's `config.json`."""
        return dict(self.fields)


def read_fp4_quantization(given: Mapping[str, Any]) -> FP4Quantization:
    """Read a `quantization_config` whose `quant_method` is one of `METHODS`.

    Raises `ConfigError` on algorithms other than FP4 and INT4.
    """
    method = given["quant_method"]
    if method.startswith("modelopt"):
        check_choice("quantization_config.quant_algo", given.get("quant_algo", "NVFP4"), _MODELOPT)
    elif method == "compressed-tensors":
        if check_choice("quantization_config.format", given.get("format"), _COMPRESSED_TENSORS) == _INT4:
            _check_int4(given)
    elif method == "quark":
        weight = (given.get("global_quant_config") or {}).get("weight") or {}
        found = weight.get("dtype", "fp4") if isinstance(weight, Mapping) else "fp4"
        if found != "fp4":
            raise reject("quantization_config.global_quant_config.weight.dtype", found, "'fp4'")
    return FP4Quantization(given)


def _check_int4(given: Mapping[str, Any]) -> None:
    """Raise `ConfigError` unless the packed integers are 4-bit, in symmetric groups of 32."""
    place = "quantization_config.config_groups"
    for name, group in check_mapping(place, given.get("config_groups")).items():
        weights = check_mapping(f"{place}.{name}.weights", check_mapping(f"{place}.{name}", group).get("weights"))
        for key, value in _INT4_WEIGHTS.items():
            if weights.get(key) != value:
                raise reject(f"{place}.{name}.weights.{key}", weights.get(key), repr(value))


def fp4_quantization(weights: str, dense_layers: int) -> dict[str, Any]:
    """Return the `quantization_config` for a weight format. dense_layers: number of dense layers, whose MLPs are not packed."""
    form = experts_format(weights)
    if not weights.endswith(UNQUANTISED):
        # As in DeepSeek-V4's own: FP8 except for the experts.
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "expert_dtype": {"mxfp4": "fp4"}.get(form.name, form.name),
        }
    if form.integers:  # as in Kimi-K2.5's own
        group = {"targets": ["Linear"], "weights": {**_INT4_WEIGHTS, "dynamic": False, "observer": "minmax"}}
        left = ["self_attn", "shared_experts", r"mlp\.(gate|up|gate_up|down)_proj", "eh_proj"]
        return {
            "quant_method": "compressed-tensors",
            "format": _INT4,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group | {"input_activations": None, "output_activations": None}},
            "ignore": ["lm_head", *(f"re:.*{name}.*" for name in left)],
            "kv_cache_scheme": None,
        }
    left = ["lm_head", "model.embed_tokens", "*self_attn*", "*shared_experts*", "*mlp.gate", "*eh_proj"]
    left += [f"model.layers.{layer}.mlp*" for layer in range(dense_layers)]
    if form.has_global:
        return {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": form.block,
            "kv_cache_quant_algo": None,
            "ignore": left,
        }
    return {"quant_method": "mxfp4", "modules_to_not_convert": left}


def hf_quant_config(quantization: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return ModelOpt's `hf_quant_config.json` for a `quantization_config` of its method; None for other methods."""
    if quantization.get("quant_method") != "modelopt":
        return None
    fields = {name: quantization.get(name) for name in ("quant_algo", "kv_cache_quant_algo", "group_size")}
    return {"producer": {"name": "dsjax"}, "quantization": {**fields, "exclude_modules": quantization.get("ignore")}}
