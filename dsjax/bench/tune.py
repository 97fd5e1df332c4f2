"""Autotuning of the Pallas kernels' tile sizes on the current device, for ``dsjax tune``.

Times attention and each matrix product of a model's layers, as sharded to one device of a mesh, with the default tile sizes and with all
others that fit. The table is written after each kernel, so that an interrupted run can resume.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from dsjax.bench.modules.timing import TOO_NOISY, Budget, device_loop
from dsjax.config import ModelConfig
from dsjax.errors import UserError
from dsjax.kernels.pallas import attention, products
from dsjax.kernels.pallas.attention import AttentionTiles
from dsjax.kernels.pallas.cost import power
from dsjax.kernels.pallas.products import BLOCK, SLACK, Groups, ProductTiles
from dsjax.kernels.pallas.shared_memory import Cores
from dsjax.kernels.pallas.tile_table import ATTENTION, Product, TileTable, Tuned
from dsjax.model.cache_groups import CacheGroup, cache_groups
from dsjax.model.parameters import ParameterInfo
from sharding import MeshSpec, Rules, fp8

STACK_BYTES = 2**30
"""Bytes of matrices that timing cycles through, so that each is evicted from the device's cache (50 MB on an H200) before its next use."""
NEAR = 0.99
"""Maximum ratio of another tile size's time to the default's for it to be chosen: a smaller gain is noise."""
TUNED = frozenset({"q", "q_a", "q_b", "kv_a", "kv", "query", "o", "o_b", "gate_up", "down"})
"""Names of the matrices that kernels with a tile table multiply with."""
MOST_CACHE_BYTES = 8 * 2**30
"""Maximum bytes of cache per layer; attention is not timed for row counts that need more."""
Tiles = ProductTiles | AttentionTiles
Timer = Callable[[Product, Tiles], float | None]
"""Returns a kernel's seconds with the given tiles; None if the device cannot run them."""


@dataclass(frozen=True)
class AttentionSetting:
    """Settings for timing attention: ``heads`` per device, and rows of ``context`` positions in a cache of ``cache_dtype``."""

    config: ModelConfig
    heads: int
    cache_dtype: np.dtype
    page_size: int
    context: int

    @property
    def latents(self) -> CacheGroup:
        """One layer's cache group of the latents."""
        return cache_groups(self.config, (0,), self.cache_dtype)[0]

    def find(self, tokens: Iterable[int], chunk: int, drafts: int) -> list[Product]:
        """Return the distinct attention sizes of steps with ``tokens`` per DP rank: decode rows with drafts, and prefill chunks."""
        width = self.config.mla.kv_lora_rank + self.config.mla.qk_rope_head_dim
        shapes = [(count, 1 + drafts) for count in tokens]
        shapes += [(count // chunk, chunk) for count in tokens if count >= chunk]
        most = max(1, MOST_CACHE_BYTES // (self.context * self.latents.entry_bytes))
        of = lambda rows, chunk_len: attention.attention_product(rows, chunk_len * self.heads, width, self.cache_dtype)  # noqa: E731
        return list(dict.fromkeys(of(rows, chunk_len) for rows, chunk_len in shapes if rows <= most))


def find_products(
    config: ModelConfig, infos: dict[str, ParameterInfo], spec: MeshSpec, rules: Rules, tokens: Iterable[int], *,
    n_physical: int, quantises: bool,
) -> list[Product]:  # fmt: skip
    """Return the distinct matrix products of a device's layers, for each number of tokens per DP rank in a step.

    infos: of all parameters. n_physical: number of physical experts. quantises: whether activations are FP8 if the weights are.
    """
    mesh = AbstractMesh(spec.shape, spec.axes)
    found: list[Product] = []
    for path, info in infos.items():
        name = path.split(".")[-2]
        wanted = path.partition(".")[0] not in ("mtp", "head", "embed") and path.endswith(".weight")
        # Kernels for packed formats have no tile table.
        if not wanted or info.packed > 1 or name not in TUNED or ".compressor." in path:
            continue
        local = list(NamedSharding(mesh, rules.spec(info.logical_axes)).shard_shape(info.shape))
        if info.depth_last:
            local.insert(2 if ".experts." in path else 1, local.pop())
        suffix = "_fp8" * (info.quantised and quantises)
        dtype = info.dtype.name
        for count in tokens:
            if ".experts." in path:
                load = count * spec.dp_size / spec.num_devices * spec.ep_size * config.num_experts_per_tok / n_physical
                found.append(Product(f"experts_{name}{suffix}", local[2], local[-1], dtype, load))
            else:
                found.append(Product(f"dense{suffix}", local[1], math.prod(local[2:]), dtype, count))
    return list(dict.fromkeys(found))


def candidates(product: Product) -> Iterator[Tiles]:
    """Yield a product's default tiles, then all others worth trying."""
    default = default_tiles(product)
    yield default
    if isinstance(default, AttentionTiles):
        rows = [size for size in (16, 32, 64, 128) if size <= 2 * power(product.columns)]
        for sizes in itertools.product(rows, (32, 64, 128), (4, 8), (1, 2, 3, 4)):
            if AttentionTiles(*sizes) != default:
                yield AttentionTiles(*sizes)
        return
    pairs = product.rows + 2 * product.rows**0.5 if product.kernel.startswith("experts") else product.rows
    columns = (BLOCK,) if product.kernel == "experts_gate_up_fp8" else (64, 128)
    splits = sorted({1, default.splits, 2 * default.splits}) if product.kernel.startswith("dense") else [1]
    rows = [size for size in (16, 32, 64, 128) if size <= 2 * power(pairs)]
    for values in itertools.product(rows, columns, (64, 128), (4, 8), (2, 3, 4), splits):
        sizes = dict(zip(("rows", "columns", "depth", "warps", "stages", "splits"), values, strict=True))
        if sizes["splits"] * sizes["depth"] > max(product.depth, sizes["depth"]):
            continue
        tiles = replace(default, **sizes, spread=max(1, math.ceil(pairs / sizes["rows"])))
        if tiles != default:
            yield tiles


def default_tiles(product: Product) -> Tiles:
    """Return the tiles that a product has without a table, on the first device."""
    if product.kernel == ATTENTION:
        return attention.default_tiles(product.columns)
    if product.kernel.startswith("dense"):
        return ProductTiles.dense(
            int(product.rows), product.depth, product.columns, Cores.of(jax.local_devices()[0]).count
        )
    return ProductTiles.for_load(product.rows)


def tune(table: TileTable, todo: Iterable[Product], path: Path, timer: Timer) -> TileTable:
    """Time each product that the table lacks, writing the table after each."""
    done = {entry.product for entry in table.entries}
    for product in todo:
        if product in done:
            continue
        default, *others = candidates(product)
        default_seconds = timer(product, default)
        if default_seconds is None:
            raise UserError(
                f"{product.title}: the device does not run the kernel with its default sizes; see dsjax doctor"
            )
        best, seconds = default, default_seconds
        for tiles in others:
            timed = timer(product, tiles)
            if timed is not None and timed < min(seconds, NEAR * default_seconds):
                best, seconds = tiles, timed
        sizes = tuple(sorted((name, size) for name, size in vars(best).items() if name not in ("spread", "pieces")))
        table = table.with_entry(Tuned(product, sizes, seconds, default_seconds))
        table.write(path)
    return table


def device_timer(
    dtype: np.dtype, experts: int, setting: AttentionSetting, budget: Budget, *, interpret: bool = False
) -> Timer:
    """Return a timer of kernels on the first device, with random values. dtype: of computation. experts: physical experts per device."""
    kept: dict[Product, tuple] = {}
    cores = Cores.of(jax.local_devices()[0])

    def attend(inputs, start, length, layer, options):
        q_latent, q_rope, cache, tables = inputs
        at = (cache, setting.cache_dtype, layer, start, length, tables)
        scale = setting.config.softmax_scale
        return attention.latent_attention(q_latent, q_rope, *at, scale=scale, **options)

    def multiply(kernel, inputs, groups, layer, options):
        weight, scale, x = inputs
        arguments = (weight, scale, weight.dtype, layer, x)
        options = options | {"dtype": dtype, "depth_last": weight.dtype == fp8.E4M3}
        if kernel == "dense":
            return products.dense(*arguments, **options)
        return (products.gate_up if kernel == "experts_gate_up" else products.down)(*arguments, groups, **options)

    def timer(product: Product, tiles: Tiles) -> float | None:
        is_attention = product.kernel == ATTENTION
        kernel = product.kernel.removesuffix("_fp8")
        if product not in kept:
            kept.clear()
            kept[product] = _cache(product, dtype, setting) if is_attention else _arrays(product, dtype, experts)
        inputs, *fixed = kept[product]
        # For the default sizes pass None: the kernel itself chooses sizes that fit the device.
        options = {"tiles": None if tiles == default_tiles(product) else tiles, "cores": cores, "interpret": interpret}

        def apply(inputs, layer, total):
            made = (
                attend(inputs, *fixed, layer, options)
                if is_attention
                else multiply(kernel, inputs, *fixed, layer, options)
            )
            return total + jax.tree.leaves(made)[-1].reshape(-1)[0].astype(jnp.float32)

        try:
            depth = (next(iter(inputs[2].values())) if is_attention else inputs[0]).shape[0]
            prepared = device_loop(apply, inputs, jnp.float32(0), depth=depth)
            prepared.warm_up(budget)
            times = prepared.take(budget)
        except jax.errors.JaxRuntimeError:
            return None  # the tiles do not fit a core
        if times is None:
            raise UserError(f"a kernel cannot be timed: {TOO_NOISY}; what was tuned before is kept")
        return times.median

    return timer


def _cache(product: Product, dtype: np.dtype, setting: AttentionSetting) -> tuple:
    """Return queries at the end of each row's context, layers of cache, and page tables in random order without shared pages."""
    R, H, M = int(product.rows), setting.heads, setting.config.mla.kv_lora_rank
    C, O, G = product.columns // H, setting.config.mla.qk_rope_head_dim, setting.page_size
    pages = -(-setting.context // G)
    layers = min(64, max(2, STACK_BYTES // (R * pages * G * setting.latents.entry_bytes)))
    key = jax.random.key(0)

    def stack(shape: tuple[int, ...], kept_in: np.dtype):
        one = lambda layer: jax.random.normal(jax.random.fold_in(key, layer), (R * pages, G, *shape), jnp.bfloat16).astype(kept_in)  # noqa: E731  # fmt: skip
        return jax.lax.map(one, jnp.arange(layers))

    cache = {name: stack(shape, kept_in) for name, (shape, kept_in) in setting.latents.arrays.items()}
    tables = jax.random.permutation(key, R * pages).reshape(R, pages).astype(jnp.int32)
    q_latent, q_rope = (jax.random.normal(key, (R, C, H, width), jnp.float32).astype(dtype) for width in (M, O))
    return (q_latent, q_rope, cache, tables), jnp.full((R,), setting.context - C), jnp.full((R,), C)


def _arrays(product: Product, dtype: np.dtype, experts: int) -> tuple:
    """Return a stack of weights with scales, rows, and the experts' groups under even routing."""
    stored = jnp.dtype(product.weights)
    quantised = product.kernel.endswith("_fp8")
    dense, fused = product.kernel.startswith("dense"), product.kernel.startswith("experts_gate_up")
    K, N, X = product.depth, product.columns, 1 if dense else experts
    lead = () if dense else (X,)
    stack = (2,) if fused else ()
    shape = (*lead, *stack, N, K) if stored == fp8.E4M3 else (*lead, K, *stack, N)  # as GPUs store them
    layers = min(64, max(2, STACK_BYTES // (math.prod(shape) * stored.itemsize)))
    key = jax.random.key(0)
    # Layer by layer, so that the whole stack exists only in its stored dtype.
    one = lambda layer: jax.random.normal(jax.random.fold_in(key, layer), shape, jnp.bfloat16).astype(stored)  # noqa: E731
    weight = jax.lax.map(one, jnp.arange(layers))
    scale = None
    if stored == fp8.E4M3:
        scale = jnp.full((layers, *lead, -(-K // BLOCK), *stack, -(-N // BLOCK)), K**-0.5, jnp.float32)
    load = max(1, round(product.rows))
    rows = load if dense else X * load + SLACK
    x = jax.random.normal(key, (rows, K), jnp.float32).astype(dtype)
    groups = Groups(jnp.arange(X) * load, jnp.full((X,), load), product.rows)
    return (weight, scale, fp8.quantise(x) if quantised else x), groups
