"""What the kernels become on an H200, read out of their PTX: tensor cores, loads ahead of their use, registers that suffice.

Needs the compilers of the extra [cuda], no GPU. CI runs it beside the programs for accelerators.
"""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from test_shared_memory import lower_for

from dsjax.dryrun.topology import cuda_target
from dsjax.hardware import load_hardware
from dsjax.kernels.pallas import attention, compressed, products
from sharding import fp8

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the extra [cuda], without a GPU"
)
BF16, LAYER = np.dtype(ml_dtypes.bfloat16), jnp.int32(0)
REGISTER = re.compile(r"%\w+")
PRODUCT = re.compile(r"(?:wgmma\.mma_async|mma\.sync)\S+")


def ptx(folder: Path, kernel: str, function, *shapes) -> Path:
    """The PTX file of one kernel of ``function``, compiled for an H200."""
    lower_for("h200", cuda_target(load_hardware("h200")), function, *shapes).compile({"xla_dump_to": str(folder)})
    (found,) = (path for path in folder.glob("*.ptx") if f".entry {kernel}(" in path.read_text())
    return found


def attention_ptx(folder: Path, rows: int) -> Path:
    of, H = jax.ShapeDtypeStruct, 128

    def attend(q, rope, cache, start, length, tables):
        return attention.latent_attention(q, rope, cache, BF16, LAYER, start, length, tables, scale=0.1)

    cache = {"latent": of((2, 512, 16, 512), BF16), "rope": of((2, 512, 16, 64), BF16)}
    queries, row = [of((rows, 1, H, width), BF16) for width in (512, 64)], of((rows,), jnp.int32)
    return ptx(folder, "latent_attention", attend, *queries, cache, row, row, of((rows, 256), jnp.int32))


def compressed_ptx(folder: Path, rows: int, kind: str) -> Path:
    """The kernel of V4-Flash at 131,072 tokens: a window, and all entries of 128 tokens ("hca") or 512 chosen ones of 4 ("csa")."""
    of, H, M, i32 = jax.ShapeDtypeStruct, 64, 512, jnp.int32
    slots = {"window": None, "hca": 1, "csa": 32}[kind]
    entries = None if slots is None else of((2, 512, slots, M), BF16)
    chosen = of((rows, 1, 512), i32) if kind == "csa" else None

    def attend(q, sink, window, entries, positions, ring, tables, chosen, count):
        return compressed.compressed_attention(
            q, sink, window, entries, (LAYER, LAYER), positions, ring, tables, None, chosen, count,
            span=128, scale=0.1, stored=BF16,
        )  # fmt: skip

    return ptx(
        folder, "compressed_attention", attend, of((rows, 1, H, M), BF16), of((H,), jnp.float32),
        of((2, 96, 128, M), BF16), entries, of((rows, 1), i32), of((rows, 3), i32), of((rows, 1024), i32), chosen,
        of((rows, 1), i32),
    )  # fmt: skip


def dense_ptx(folder: Path, stored: np.dtype, quantised: bool, rows: int) -> Path:
    of, K, N = jax.ShapeDtypeStruct, 7168, 2048
    scale = of((2, K // 128, N // 128), jnp.float32) if stored == fp8.E4M3 else None
    x = fp8.Quantised(of((rows, K), fp8.E4M3), of((rows, K // 128), jnp.float32)) if quantised else of((rows, K), BF16)
    last = stored == fp8.E4M3  # as GPUs store FP8 matrices

    def multiply(weight, scale, x):
        return products.dense(weight, scale, stored, LAYER, x, dtype=BF16, depth_last=last)

    return ptx(folder, "dense" + "_fp8" * quantised, multiply, of((2, N, K) if last else (2, K, N), stored), scale, x)


def experts_ptx(folder: Path, kernel: str, pairs_per_expert: int) -> Path:
    """FP8 rows times FP8 experts of DeepSeek-V3's sizes."""
    of, X, D, F = jax.ShapeDtypeStruct, 8, 7168, 2048
    multiply, *sizes = (products.gate_up, D, 2, F) if kernel == "experts_gate_up" else (products.down, F, D)
    weight, scale = (2, X, *sizes), (2, X, sizes[0] // 128, *sizes[1:-1], sizes[-1] // 128)
    rows = pairs_per_expert * X + products.SLACK
    x = fp8.Quantised(of((rows, sizes[0]), fp8.E4M3), of((rows, sizes[0] // 128), jnp.float32))

    def run(weight, scale, x, start, count):
        groups = products.Groups(start, count, float(pairs_per_expert))
        return multiply(weight, scale, fp8.E4M3, LAYER, x, groups, dtype=BF16, depth_last=True)

    arrays = of((*weight[:2], *weight[3:], weight[2]), fp8.E4M3), of(scale, jnp.float32), x, *[of((X,), jnp.int32)] * 2
    return ptx(folder, f"{kernel}_fp8", run, *arrays)


def spilled(path: Path) -> int:
    """Bytes that ptxas stores because it has no register for them."""
    ptxas = shutil.which("ptxas") or next(Path(np.__file__).parents[1].glob("nvidia/*/bin/ptxas"))
    command = [ptxas, "-v", "--gpu-name", "sm_90a", path, "-o", "/dev/null"]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(re.search(r"(\d+) bytes spill stores", said.stdout + said.stderr).group(1))


def loops(lines: list[str]) -> list[list[str]]:
    """The loops of a kernel, shortest first."""
    labels = {line[:-1]: at for at, line in enumerate(lines) if re.fullmatch(r"\$L\w+:", line)}
    jumps = [(at, re.search(r"bra\S*\s+(\$L\w+)", line)) for at, line in enumerate(lines)]
    ends = ((labels.get(found.group(1), at), at) for at, found in jumps if found)
    return sorted((lines[begin:end] for begin, end in ends if begin < end), key=len)


def waiting_copies(lines: list[str]) -> int:
    """Asynchronous copies whose address comes from a load of the same turn of the loop, for which they must wait."""
    loaded, waiting = set(), 0
    for statement in re.sub(r"//[^\n]*", "", "\n".join(lines)).split(";"):
        if "cp.async" in statement:
            waiting += bool(loaded & set(REGISTER.findall(statement)))
        elif found := re.match(r"\s*(?:@!?%\w+\s+)?([\w.:]+)\s+(\{[^}]*\}|%\w+)\s*,(.*)", statement):
            instruction, written, read = found.groups()
            comes = "ld.global" in instruction or loaded & set(REGISTER.findall(read))
            loaded = (set.union if comes else set.difference)(loaded, REGISTER.findall(written))
    return waiting


KERNELS = ("mla", 1), ("mla", 32), ("window", 32), ("hca", 1), ("hca", 256), ("csa", 256)


@pytest.mark.parametrize(("kind", "rows"), KERNELS)
def test_attention_multiplies_in_tensor_cores_and_copies_entries_without_waiting_for_pages(kind, rows, tmp_path):
    path = attention_ptx(tmp_path, rows) if kind == "mla" else compressed_ptx(tmp_path, rows, kind)
    loop = loops(path.read_text().replace("\t", " ").splitlines())[-1]
    assert sum("wgmma.mma_async" in line for line in loop) >= (64 if kind == "mla" else 32)
    assert sum("cp.async" in line for line in loop) >= 16
    assert waiting_copies(loop) == 0
    assert spilled(path) <= (256 if kind == "mla" else 320)


BF16_PRODUCT = "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"
FP8_PRODUCT = "wgmma.mma_async.sync.aligned.m64n{}k32.f32.e4m3.e4m3"
DENSE = [(BF16, False, 128, BF16_PRODUCT), (fp8.E4M3, False, 128, BF16_PRODUCT)]
DENSE += [(fp8.E4M3, True, rows, FP8_PRODUCT.format(rows)) for rows in (16, 32, 128)]


@pytest.mark.parametrize(("stored", "quantised", "rows", "instruction"), DENSE)
def test_products_multiply_in_tensor_cores_and_copy_ahead(stored, quantised, rows, instruction, tmp_path):
    path = dense_ptx(tmp_path, stored, quantised, rows)
    text = path.read_text()
    assert set(PRODUCT.findall(text)) == {instruction}
    assert text.count("cp.async") >= 8
    assert "prmt" not in text or not quantised, "FP8 weights are transposed in registers"
    assert spilled(path) == 0


@pytest.mark.parametrize(("pairs", "n"), [(16, 32), (64, 128)])
@pytest.mark.parametrize("kernel", ["experts_gate_up", "experts_down"])
def test_experts_multiply_fp8_rows_by_fp8_weights_in_fp8_tensor_cores(kernel, pairs, n, tmp_path):
    path = experts_ptx(tmp_path, kernel, pairs)
    text = path.read_text()
    assert set(PRODUCT.findall(text)) == {FP8_PRODUCT.format(n)}
    loop = next(loop for loop in loops(text.splitlines()) if any("wgmma.mma_async" in line for line in loop))
    assert any("cp.async" in line for line in loop)
    assert not any("prmt" in line or "st.shared" in line for line in loop), "FP8 weights are transposed in registers"
    assert spilled(path) == 0
