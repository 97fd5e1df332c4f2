"""Write tests/goldens/fp4.npz: matrices in NVFP4, MXFP4 and INT4, made by torchao and compressed-tensors.

    pip install --no-deps torchao compressed-tensors loguru    # into an environment with torch
    python tools/make_fp4_goldens.py

The file has a matrix, what each library makes of it (values two a byte, scales, the tensor's scale), and what each decodes that to. The
matrix's blocks are of unlike sizes; one is zeros, one holds values midway between two e2m1 numbers, and one very small values.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

OUT = Path(__file__).parents[1] / "tests" / "goldens" / "fp4.npz"
ROWS, COLUMNS = 12, 192


def matrix() -> torch.Tensor:
    """A float32 matrix whose blocks of 16 and 32 differ much in size."""
    rng = np.random.default_rng(28)
    values = rng.standard_normal((ROWS, COLUMNS)).astype(np.float32)
    values *= np.exp2(rng.integers(-4, 5, (ROWS, COLUMNS // 16))).repeat(16, axis=1).astype(np.float32)
    values[0, :32] = 0
    values[1, :16] = [6, 5, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, -5, -3.5, -2.5, -1.75, -1.25, -0.75, -0.25, -6]
    values[2, :32] *= 1e-3
    import torch

    return torch.from_numpy(values)


def from_torchao(x: torch.Tensor) -> dict[str, np.ndarray]:
    """Both formats as torchao has them, decoded by itself to float32."""
    import torch
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    whole = per_tensor_amax_to_scale(x.abs().max())
    nv = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=whole)
    mx = MXTensor.to_mx(x, torch.float4_e2m1fn_x2, 32)
    return {
        "torchao_nvfp4_values": nv.qdata.numpy(),
        "torchao_nvfp4_scale": nv.scale.view(torch.uint8).numpy().reshape(ROWS, -1),
        "torchao_nvfp4_whole": whole.numpy().reshape(1),
        "torchao_nvfp4_decoded": nv.dequantize(torch.float32).numpy(),
        "torchao_mxfp4_values": mx.qdata.view(torch.uint8).numpy(),
        "torchao_mxfp4_scale": mx.scale.view(torch.uint8).numpy().reshape(ROWS, -1),
        "torchao_mxfp4_decoded": mx.dequantize(torch.float32).numpy(),
    }


def from_compressed_tensors(x: torch.Tensor) -> dict[str, np.ndarray]:
    """Both formats as compressed-tensors stores them, decoded by itself."""
    import torch
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

    made = {}
    for name, compressor in (("nvfp4", NVFP4PackedCompressor), ("mxfp4", MXFP4PackedCompressor)):
        scheme = preset_name_to_scheme({"nvfp4": "NVFP4A16", "mxfp4": "MXFP4A16"}[name], ["Linear"])
        size = scheme.weights.group_size
        blocks = x.reshape(ROWS, -1, size)
        state = {"weight": x.clone()}
        if name == "nvfp4":
            state["weight_global_scale"] = generate_gparam(x.min(), x.max())
        scale, _ = calculate_qparams(
            blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=state.get("weight_global_scale")
        )
        state["weight_scale"] = scale
        stored = compressor.compress(state, scheme)
        made[f"ct_{name}_values"] = stored["weight_packed"].numpy()
        made[f"ct_{name}_scale"] = stored["weight_scale"].detach().view(torch.uint8).numpy()
        if name == "nvfp4":
            made["ct_nvfp4_whole"] = stored["weight_global_scale"].detach().numpy().reshape(1)
        decoded = compressor.decompress(dict(stored), scheme)["weight"]
        made[f"ct_{name}_decoded"] = decoded.detach().to(torch.float32).numpy()
    return made | _int4(x)


def _int4(x: torch.Tensor) -> dict[str, np.ndarray]:
    """INT4 in groups of 32 with scales in bfloat16, as compressed-tensors stores it. It divides by them in float32."""
    import torch
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization.quant_args import QuantizationArgs
    from compressed_tensors.quantization.quant_scheme import QuantizationScheme
    from compressed_tensors.quantization.utils.helpers import calculate_qparams

    weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    groups = x.reshape(ROWS, -1, 32)
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), weights)
    scale = scale.to(torch.bfloat16)
    stored = PackedQuantizationCompressor.compress({"weight": x.clone(), "weight_scale": scale.float()}, scheme)
    decoded = PackedQuantizationCompressor.decompress(dict(stored), scheme)["weight"]
    return {
        "ct_int4_values": stored["weight_packed"].numpy().view(np.uint8),
        "ct_int4_scale": scale.view(torch.int16).numpy().view(np.uint16),
        "ct_int4_shape": stored["weight_shape"].numpy(),
        "ct_int4_decoded": decoded.float().numpy(),
    }


def main() -> None:
    """Write the file."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    x = matrix()
    np.savez_compressed(OUT, matrix=x.numpy(), **from_torchao(x), **from_compressed_tensors(x))
    print(f"{OUT}: {OUT.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
