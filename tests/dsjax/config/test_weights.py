"""The table of weight formats says of each name what the model, its checkpoint and the planner make of it."""

import math

import pytest

from dsjax.config import load_config
from dsjax.config.weights import WEIGHT_FORMATS
from dsjax.model.parameter_table import abstract_parameters


@pytest.mark.parametrize("row", WEIGHT_FORMATS.values(), ids=WEIGHT_FORMATS)
def test_a_row_gives_the_bytes_and_the_dtypes_of_a_models_parameters(row):
    config = load_config("deepseek-v3")
    infos = abstract_parameters(config, weights=row.name, mtp=False)
    experts = [info for path, info in infos.items() if ".experts." in path]
    numbers = 58 * 256 * 3 * 7168 * 2048
    assert sum(info.count for info in experts) == numbers
    # FP8 has a float32 scale for 128 × 128 numbers, and a format with a scale of the tensor four bytes for each matrix.
    scales = 4 * math.ceil(numbers / 128**2) if row.experts == "fp8" else 0
    scales += 4 * 58 * 256 * 3 if row.packed is not None and row.packed.has_global else 0
    assert sum(info.nbytes for info in experts) == numbers * row.expert_bytes + scales
    dtypes = {"f32": "float32", "bf16": "bfloat16", "fp8": "float8_e4m3fn"}
    assert infos["moe_layers.attn.q_b.weight"].dtype.name == dtypes[row.others]
    assert infos["embed.weight"].dtype.name == dtypes[row.plain]


def test_a_checkpoint_says_which_quantisation_it_has():
    methods = {name: (row.quantization_config(3) or {}).get("quant_method") for name, row in WEIGHT_FORMATS.items()}
    assert methods == {
        "f32": None, "bf16": None, "mixed": None, "fp8": "fp8", "nvfp4": "fp8", "nvfp4-bf16": "modelopt", "mxfp4": "fp8",
        "mxfp4-bf16": "mxfp4", "int4": "fp8", "int4-bf16": "compressed-tensors",
    }  # fmt: skip
