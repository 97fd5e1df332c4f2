"""The native kernels' products on this CPU at DeepSeek-V3's widths, each beside the time that reading its weights takes.

    python tools/bench_products.py                            # experts in bf16, FP8, NVFP4, MXFP4; other products in bf16, FP8
    python tools/bench_products.py --only experts --rows 1 8  # routed experts alone
    python tools/bench_products.py --threads 1 --processor-time --json products.json      # on a machine that others use, too

A call multiplies so many rows with one expert, or with one layer's matrix, another one each time, so that weights come from memory.
Calls of all numbers of rows take turns. Told of each: the least time of a call; the share of it that reading the weights takes, at the
best bandwidth that as many threads had in this run; and, behind a stroke, the share that the larger of two times takes: that of reading,
and that of the multiply-adds, at the best rate that the kernel has with a matrix that the caches hold. Few rows are bound by the first,
many by the second, and nothing can be faster than either.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from dsjax.bench.modules.setting import random_parameter
from dsjax.checkpoint.place import aligned_empty
from dsjax.config import ModelConfig, load_config
from dsjax.engine.device.process import cache_folder
from dsjax.kernels.table import Kernels, choose_kernels
from dsjax.model.experts import ExpertProduct
from dsjax.model.moe import RoutedExperts
from dsjax.model.parameters import Declaration, ParameterTable

EXPERT_FORMATS = {"bf16": "bf16", "FP8": "fp8", "NVFP4": "nvfp4", "MXFP4": "mxfp4"}
LEAST_BYTES = 200 << 20
"""All weights that take turns have so many bytes together, which is more than the caches hold."""


@dataclasses.dataclass(frozen=True)
class Product:
    """One product: `prepare(rows, turn)` makes a call's arguments for so many rows and the weights of that turn, `run` takes them.

    weight_bytes: of one turn; multiply_adds: for one row; read: an array of the weights, to measure the bandwidth on.
    """

    name: str
    weights: str
    weight_bytes: int
    multiply_adds: int
    read: np.ndarray
    prepare: Callable[[int, int], tuple]
    run: Callable[..., jax.Array]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument(
        "--only", choices=("experts", "others"), help="routed experts, or attention's and dense parts' matrices"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="count the time that processors compute, which others on the machine do not share",
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    clock = time.process_time if args.processor_time else time.perf_counter
    config = load_config("deepseek-v3")
    kernels = choose_kernels("native", "cpu", np.dtype(np.float32), devices=1, cache=cache_folder() / "native")
    kernels = dataclasses.replace(kernels, native=dataclasses.replace(kernels.native, threads=args.threads))
    bandwidth, rate, found, multiply_rate = 0.0, 0.0, [], multiplier(kernels)
    for product in products(config, kernels, args.only):
        times: dict[int, list[float]] = {rows: [] for rows in args.rows}
        for turn in range(args.rounds + 1):
            bandwidth = max(bandwidth, read_bandwidth(product.read, args.threads, clock))
            rate = max(rate, multiply_rate(clock))
            for rows, samples in times.items():
                seconds = time_of(product, rows, turn, clock)
                if turn:  # the first one compiles
                    samples.append(seconds)
        found += [
            (product.name, product.weights, product.weight_bytes, product.multiply_adds, rows, min(samples))
            for rows, samples in times.items()
        ]
        print(f"{product.name} in {product.weights}: done", file=sys.stderr)
    report(found, args, bandwidth, rate)


def report(found: list[tuple], args: argparse.Namespace, bandwidth: float, rate: float) -> None:
    """Print the table, and write the JSON."""
    table = Table(
        title=f"{args.threads} threads, {bandwidth / 1e9:.1f} GB/s read, {rate / 1e9:.0f} G multiply-adds a second from the caches"
    )
    for column in ("product", "weights", "MB", *(f"{rows} rows: ms" for rows in args.rows)):
        table.add_column(column, justify="left" if column in ("product", "weights") else "right")
    lines, records = {}, []
    for name, weights, size, multiply_adds, rows, seconds in found:
        reading, multiplying = size / bandwidth, rows * multiply_adds / rate
        of_reading, of_larger = reading / seconds, max(reading, multiplying) / seconds
        line = lines.setdefault((name, weights), [name, weights, f"{size / 1e6:.1f}"])
        line.append(f"{seconds * 1e3:.2f} ({of_reading:.0%} / {of_larger:.0%})")
        records.append(
            {"product": name, "weights": weights, "rows": rows, "seconds": seconds, "weight_bytes": size}
            | {"share_of_reading": of_reading, "share_of_the_larger": of_larger}
        )
    for line in lines.values():
        table.add_row(*line)
    Console(width=140).print(table)
    if args.json:
        head = {
            "bytes_per_s": bandwidth,
            "multiply_adds_per_s": rate,
            "threads": args.threads,
            "processor_time": args.processor_time,
        }
        args.json.write_text(json.dumps(head | {"products": records}, indent=1) + "\n")


def products(config: ModelConfig, kernels: Kernels, only: str | None) -> Iterator[Product]:
    """All products, one after the other, so that the weights of one are in memory."""
    if only != "others":
        for name, weights in EXPERT_FORMATS.items():
            yield expert_product(name, weights, config, kernels)
    if only != "experts":
        width, heads = config.hidden_size, config.num_attention_heads
        latent = config.kv_lora_rank + config.qk_rope_head_dim
        query = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
        shared = config.moe_intermediate_size * config.n_shared_experts
        matrices = {
            "attention: queries down": ((width, config.q_lora_rank), 1),
            "attention: queries up": ((config.q_lora_rank, query), 1),
            "attention: latents": ((width, latent), 1),
            "attention: output": ((heads * config.v_head_dim, width), 8),
            "dense MLP: gate and up": ((width, 2, config.intermediate_size), 1),
            "dense MLP: down": ((config.intermediate_size, width), 8),
            "shared expert: gate and up": ((width, 2, shared), 1),
            "shared expert: down": ((shared, width), 8),
        }
        for name, (shape, pieces) in matrices.items():
            for weights in ("bf16", "FP8"):
                yield dense_product(name, weights, shape, pieces, kernels)


def expert_product(name: str, weights: str, config: ModelConfig, kernels: Kernels) -> Product:
    """Gate, up and down of routed experts, of which all rows of a call use one."""
    one = ParameterTable.of(RoutedExperts(Declaration(weights, "cpu"), config, 1))
    size = sum(info.nbytes for info in one.infos.values())
    experts = -(-LEAST_BYTES // size)
    table = ParameterTable.of(RoutedExperts(Declaration(weights, "cpu"), config, experts))
    params = {path: on_large_pages(np.asarray(random_parameter(info, 1))) for path, info in table.infos.items()}
    run = jax.jit(ExpertProduct(weight_dtype=table.infos["down.weight"].dtype, kernels=kernels))

    def prepare(rows: int, turn: int) -> tuple:
        ids = jnp.full((rows, 1), turn % experts, jnp.int32)
        return params, jnp.ones((rows, config.hidden_size)), ids, jnp.ones((rows, 1))

    multiply_adds = 3 * config.hidden_size * config.moe_intermediate_size
    return Product("routed expert", name, size, multiply_adds, np.asarray(params["gate_up.weight"]), prepare, run)


def dense_product(name: str, weights: str, shape: tuple[int, ...], pieces: int, kernels: Kernels) -> Product:
    """A matrix of as many layers as take turns; `pieces` as of `NativeKernels.dense`."""
    itemsize, elements = {"bf16": 2, "FP8": 1}[weights], int(np.prod(shape))
    layers = -(-LEAST_BYTES // (elements * itemsize))
    rng = np.random.default_rng(0)
    # Any bits of finite numbers: a sign, small exponents.
    block = (
        rng.integers(0, 0x80, 1 << 20, np.uint8) if itemsize == 1 else rng.integers(0x3C00, 0x4000, 1 << 19, np.uint16)
    )
    matrix = on_large_pages(np.resize(np.minimum(block, 0x7E) if itemsize == 1 else block, (layers, *shape)))
    blocks = (layers, -(-shape[0] // 128), *shape[1:-1], -(-shape[-1] // 128))
    scale = jnp.full(blocks, 0.01, jnp.float32) if itemsize == 1 else None
    run = jax.jit(lambda matrix, scale, layer, rows: kernels.native.dense(matrix, scale, layer, rows, pieces=pieces))

    def prepare(rows: int, turn: int) -> tuple:
        return matrix, scale, jnp.int32(turn % layers), jnp.ones((rows, shape[0]))

    return Product(name, weights, elements * itemsize, elements, np.asarray(matrix), prepare, run)


def on_large_pages(values: np.ndarray) -> jax.Array:
    """The values where a checkpoint's would lie: in memory for which large pages are asked."""
    placed = aligned_empty(values.shape, values.dtype)
    placed[...] = values
    return jnp.asarray(placed)


def time_of(product: Product, rows: int, turn: int, clock: Callable[[], float]) -> float:
    """Seconds of a call."""
    arguments = jax.block_until_ready(product.prepare(rows, turn))
    start = clock()
    jax.block_until_ready(product.run(*arguments))
    return clock() - start


def read_bandwidth(weights: np.ndarray, threads: int, clock: Callable[[], float]) -> float:
    """Bytes a second that so many threads read together."""
    flat = weights.reshape(-1).view(np.uint64)
    parts = np.array_split(flat, threads)
    with ThreadPoolExecutor(threads) as pool:
        start = clock()
        list(pool.map(np.max, parts))
        return flat.nbytes / (clock() - start)


def multiplier(kernels: Kernels) -> Callable[[Callable[[], float]], float]:
    """Multiply-adds a second of 96 rows with a float32 matrix of 512 x 512, as the kernel does them, by a clock."""
    rows, matrix = jnp.ones((96, 512)), jnp.ones((1, 512, 512))
    run = jax.jit(lambda rows, matrix: kernels.native.dense(matrix, None, jnp.int32(0), rows))

    def rate(clock: Callable[[], float]) -> float:
        jax.block_until_ready(run(rows, matrix))
        start = clock()
        jax.block_until_ready(run(rows, matrix))
        return rows.size * 512 / (clock() - start)

    return rate


if __name__ == "__main__":
    main()
