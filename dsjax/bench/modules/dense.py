"""Benchmark cases of the modules that every token passes (embedding, MLPs, router, norms, head) and of FP8 quantisation and products."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401 (NumPy learns bfloat16)
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dsjax.bench.modules.run import ModuleCase, ModuleWork
from dsjax.bench.modules.setting import LayerStack, Setting
from dsjax.bench.modules.timing import PreparedCase, call_loop, device_loop, host_loop
from dsjax.config import ModelConfig
from dsjax.config.layers import kinds_of
from dsjax.engine.device.sampler import greedy
from dsjax.model.layer_costs import residual_values
from dsjax.model.norm import RMSNorm
from dsjax.model.parameter_counts import attention_matrices
from dsjax.model.parameters import Declaration, Matrix, reinterpret
from dsjax.model.router import ExpertRouter, HashRouter
from dsjax.model.transformer import MLP, RESIDUALS, Embedding
from sharding import MeshSpec
from sharding.dispatch.wire import WireFormat
from sharding.host_memory import host_sharding, rows_from_host


def embedding_cases(setting: Setting, tokens: Iterable[int]) -> Iterator[ModuleCase]:
    """Yield cases that look up embedding rows, by number of tokens.

    `device`: the step's own lookup. `fetched`: the step's lookup with ``--embedding-location host``. `host`: NumPy gathers the rows in host
    memory and sends them to the device. `copied`: the whole table is sent to the device.
    """
    config = setting.config
    itemsize = setting.step.table.infos["embed.weight"].dtype.itemsize
    table_bytes = config.vocab_size * config.hidden_size * itemsize
    for count in tokens:
        read, written = (count * config.hidden_size * size for size in (itemsize, setting.dtype.itemsize))
        for variant, other_bytes, memory, make in (
            ("device", written, 2 * table_bytes, _device_lookup),
            ("fetched", 2 * written, table_bytes, _host_memory_lookup),
            ("host", 2 * written, table_bytes, _numpy_lookup),
        ):
            work, build = ModuleWork(0, read, other_bytes), partial(make, setting, count)
            yield ModuleCase("embedding", variant, {"tokens": count}, work, memory, build)
    copy = ModuleWork(0, weight_bytes=2 * table_bytes)
    yield ModuleCase("embedding", "copied", {"tokens": 1}, copy, 2 * table_bytes, partial(_table_copy, setting))


def _random_tokens(setting: Setting, count: int, call: int = 0) -> np.ndarray:
    return np.random.default_rng(setting.seed + call).integers(0, setting.config.vocab_size, (1, count), np.int32)


def _lookup_loop(setting: Setting, count: int, params: dict[str, jax.Array], gather: Callable) -> PreparedCase:
    """Gather rows as a step does, with different tokens in each call."""
    inputs = [params | {"tokens": jnp.asarray(_random_tokens(setting, count, call))} for call in range(4)]
    total = jnp.zeros((1, count, setting.config.hidden_size), setting.dtype)
    return call_loop(lambda inputs, total: total + gather(inputs), inputs, total)


def _device_lookup(setting: Setting, count: int) -> PreparedCase:
    stack = LayerStack.of(setting, lambda declare: Embedding(declare, setting.config), 1, depth=1)
    params = {path: array[0] for path, array in stack.values(setting.seed).items()}

    def gather(inputs):
        embed: Embedding = stack.table.bind({path: inputs[path] for path in stack.table.infos})
        return embed(inputs["tokens"], setting.dtype)

    return _lookup_loop(setting, count, params, gather)


def _host_memory_lookup(setting: Setting, count: int) -> PreparedCase:
    spec = MeshSpec()
    mesh = spec.build([setting.step.mesh.devices.flat[0]])
    info = setting.step.table.infos["embed.weight"]
    table = jax.device_put(_host_table(setting).view(info.storage_dtype), host_sharding(NamedSharding(mesh, P())))

    def gather(inputs):
        rows = rows_from_host(inputs["table"], inputs["tokens"], mesh, spec.batch_axes)
        return reinterpret(rows, info.dtype).astype(setting.dtype)

    return _lookup_loop(setting, count, {"table": table}, gather)


def _host_table(setting: Setting) -> np.ndarray:
    config, dtype = setting.config, setting.step.table.infos["embed.weight"].dtype
    block = np.random.default_rng(setting.seed).standard_normal(1 << 16, np.float32).astype(dtype)
    return np.resize(block, (config.vocab_size, config.hidden_size))


def _numpy_lookup(setting: Setting, count: int) -> PreparedCase:
    table, tokens = _host_table(setting), _random_tokens(setting, count)
    shifts, device = itertools.count(97, 97), setting.step.mesh.devices.flat[0]  # different tokens in each call

    def call():
        rows = table[(tokens + next(shifts)) % setting.config.vocab_size].astype(setting.dtype, copy=False)
        return jax.device_put(rows, device)

    return host_loop(call)


def _table_copy(setting: Setting) -> PreparedCase:
    table, device = _host_table(setting).view(np.uint8), setting.step.mesh.devices.flat[0]
    # On the CPU platform, `device_put` would alias the host buffer instead of copying it.
    return host_loop(lambda: jnp.array(table, copy=True, device=device))


class LayerNorms(nnx.Module):
    """A layer's two norms."""

    def __init__(self, declare: Declaration, width: int, eps: float):
        self.attn_norm, self.mlp_norm = RMSNorm(declare, width, eps), RMSNorm(declare, width, eps)


class LayerModule(NamedTuple):
    """A module that layers have: in how many layers of the model, its costs, and how to build and apply it."""

    layers: int
    flops: int  # per token
    moved: int  # bytes per token besides the weights
    make: Callable[[Declaration], nnx.Module]
    apply: Callable[[Any, jax.Array, jax.Array], jax.Array]  # (module, x, total) → new total
    variant: str = ""
    streams: tuple[int, ...] = ()  # axes of x between tokens and width
    table: int = 0  # bytes of a table in a layer's weights; the one row that a token reads counts in `moved`


def _norms(setting: Setting) -> LayerModule:
    config, width = setting.config, setting.config.hidden_size

    def apply(norms: LayerNorms, x, total):
        return norms.mlp_norm(norms.attn_norm(total))

    make = lambda declare: LayerNorms(declare, width, config.rms_norm_eps)  # noqa: E731
    return LayerModule(config.num_hidden_layers, 8 * width, 4 * width * setting.dtype.itemsize, make, apply)


class LayerResiduals(nnx.Module):
    """A layer's two residual connections."""

    def __init__(self, declare: Declaration, config: ModelConfig):
        kind = RESIDUALS[config.residual]
        self.attn_residual, self.mlp_residual = kind(declare, config), kind(declare, config)


def _residual(setting: Setting) -> LayerModule:
    """Return the connections of several streams. With one stream, ``flops`` is 0: other modules include the plain addition."""
    config, kernels = setting.config, setting.step.products

    def apply(layer: LayerResiduals, x, total):
        for residual in map(kernels.residual, (layer.attn_residual, layer.mlp_residual)):
            read, mix = residual.pre(total)
            total = residual.post(total, mix, read)
        return total

    moved = 2 * config.hidden_size * (3 * sum(config.streams) + 2) * setting.dtype.itemsize
    make = lambda declare: LayerResiduals(declare, config)  # noqa: E731
    flops = 2 * 2 * residual_values(config)
    return LayerModule(config.num_hidden_layers, flops, moved, make, apply, streams=config.streams)


def _routers(setting: Setting) -> Iterator[LayerModule]:
    config, width = setting.config, setting.config.hidden_size

    def apply(router: ExpertRouter, x, total):
        routing = router(x, jnp.zeros(x.shape[:-1], jnp.int32))
        return total.at[..., : routing.ids.shape[-1]].add((routing.weights + routing.ids).astype(total.dtype))

    flops = 2 * width * config.n_routed_experts
    moved = width * setting.dtype.itemsize + config.n_routed_experts * 4 * 4
    id_bytes = 4 * config.num_experts_per_tok  # a token's row in the table of hash routing
    for router_class, mlp, variant, row in ((ExpertRouter, "moe", "", 0), (HashRouter, "hash", "hash", id_bytes)):
        layers = sum(count for kind, count in kinds_of(config.layer_runs) if kind.mlp == mlp)
        make = lambda declare, router_class=router_class: router_class(declare, config)  # noqa: E731
        yield LayerModule(layers, flops, moved + row, make, apply, variant, table=row * config.vocab_size)


def _mlp(setting: Setting, layers: int, hidden: int, limit: float | None = None) -> LayerModule:
    width = setting.config.hidden_size

    def apply(mlp: MLP, x, total):
        return total + mlp(x, setting.multiply)

    moved = (3 * width + 5 * hidden) * setting.dtype.itemsize
    make = lambda declare: MLP(declare, width, hidden, "mlp_width", limit)  # noqa: E731
    return LayerModule(layers, 6 * width * hidden, moved, make, apply)


def layer_cases(setting: Setting, module: str, tokens: Iterable[int]) -> Iterator[ModuleCase]:
    """Yield cases of `norms`, `residual`, `router`, `dense MLP` or `shared expert`; none if the model has no such layers.

    MLP cases include the residual addition; router cases include scores, groups and expert selection.
    """
    config = setting.config
    shared = config.n_shared_experts * config.moe_intermediate_size
    makers = {
        "norms": lambda: [_norms(setting)],
        "residual": lambda: [_residual(setting)],
        "router": lambda: _routers(setting),
        "shared expert": lambda: [_mlp(setting, config.num_moe_layers, shared, config.swiglu_limit)],
        "dense MLP": lambda: [_mlp(setting, config.num_dense_layers, config.intermediate_size)],
    }
    for layer in makers[module]():
        if not (layer.layers and layer.flops):
            continue
        stack = LayerStack.of(setting, layer.make, layer.layers)
        for count in tokens:
            work = ModuleWork(count * layer.flops, stack.layer_bytes - layer.table, count * layer.moved)
            memory = stack.nbytes + 4 * count * (layer.moved + config.hidden_size * setting.dtype.itemsize)
            build = partial(layer_loop, setting, stack, layer.apply, layer.layers, count, layer.streams)
            yield ModuleCase(module, layer.variant, {"tokens": count}, work, memory, build)


def layer_loop(
    setting: Setting, stack: LayerStack, apply: Callable, layers: int, tokens: int, streams: tuple[int, ...] = ()
) -> PreparedCase:
    """Loop a module over layers as the step does: as slices of a stack or, if the model has only one such layer, as separate arrays.

    streams: axes of x between tokens and width.
    """
    x = setting.random((1, tokens, *streams, setting.config.hidden_size))
    if layers == 1:
        return single_layer_loop(setting, stack, apply, x)

    def one_layer(inputs, index, total):
        return apply(stack.layer(inputs["params"], index), inputs["x"], total)

    inputs = {"params": stack.values(setting.seed), "x": x}
    return device_loop(one_layer, inputs, jnp.zeros_like(x), depth=stack.depth, in_step=layers)


def single_layer_loop(setting: Setting, stack: LayerStack, apply: Callable, x: jax.Array) -> PreparedCase:
    """Run a module that occurs once in the model, once per call with separate arrays. Successive calls alternate between copies."""
    values = stack.values(setting.seed)
    copies = [{path: array[i] for path, array in values.items()} | {"x": x} for i in range(stack.depth)]

    def one_call(inputs, total):
        params = {path: inputs[path] for path in stack.table.infos}
        return apply(stack.table.bind(params), inputs["x"], total)

    return call_loop(one_call, copies, jnp.zeros_like(x))


class Head(nnx.Module):
    """The sum of several streams, the final norm, and the output projection."""

    def __init__(self, declare: Declaration, config: ModelConfig):
        D, V = config.hidden_size, config.vocab_size
        self.residual = RESIDUALS[config.residual](declare, config, ends=True)
        self.norm = RMSNorm(declare, D, config.rms_norm_eps)
        self.head = Matrix(declare, (D, V), ("embed", "vocab"), quantise=False)


def head_cases(setting: Setting, tokens: Iterable[int]) -> Iterator[ModuleCase]:
    """Yield cases of the final norm, output projection and greedy sampling. tokens: numbers of sampled rows."""
    config = setting.config
    D, V = config.hidden_size, config.vocab_size
    stack = LayerStack.of(setting, lambda declare: Head(declare, config), 1)

    def apply(module: Head, x, total):
        hidden = module.norm(setting.step.products.residual(module.residual).leave(x))
        weight = module.head.value(setting.dtype)
        logits = jnp.einsum("btd,dv->btv", hidden, weight, preferred_element_type=jnp.float32)
        sampled = greedy(logits)[0].reshape(-1, *[1] * len(config.streams))
        return total.at[0, :, ..., 0].add(sampled.astype(total.dtype))

    for count in tokens:
        shape = 1, count, *config.streams, D
        x_bytes = math.prod(shape) * setting.dtype.itemsize
        work = ModuleWork(2 * count * D * V, stack.layer_bytes, x_bytes + 3 * 4 * count * V)
        build = lambda shape=shape: single_layer_loop(setting, stack, apply, setting.random(shape))  # noqa: E731
        yield ModuleCase("head", "", {"tokens": count}, work, stack.nbytes + 2 * (x_bytes + 4 * count * V), build)


def quantisation_cases(setting: Setting, tokens: Iterable[int]) -> Iterator[ModuleCase]:
    """Yield FP8 cases. `quantise` packs rows in the e4m3 wire format, one scale per 1 × 128 block; `dequantise` unpacks them."""
    D, size = setting.config.hidden_size, setting.dtype.itemsize
    wire = _wire(setting)
    for count in tokens:
        moved = count * (D * size + wire.row_bytes)
        for variant in ("quantise", "dequantise"):
            build = partial(_quantisation, setting, count, variant)
            yield ModuleCase("fp8", variant, {"tokens": count}, ModuleWork(3 * count * D, 0, moved), 4 * moved, build)


def _wire(setting: Setting) -> WireFormat:
    return WireFormat(setting.config.hidden_size, max(1, setting.config.num_experts_per_tok), setting.dtype, fp8=True)


def _quantisation(setting: Setting, count: int, variant: str) -> PreparedCase:
    wire, x = _wire(setting), setting.random((count, setting.config.hidden_size))
    ids, weights = (jnp.zeros((count, wire.top_k), dtype) for dtype in (jnp.int32, jnp.float32))

    # Put one value of the previous result into the input, so that each iteration depends on the one before.
    if variant == "quantise":

        def quantise(x, _, words):
            x = x.at[0, 0].set((words[0, 0] % 7).astype(x.dtype))
            return wire.pack(x, ids, weights, jnp.int32(0))

        return device_loop(quantise, x, jnp.zeros((count, wire.row_words), wire.word))

    def dequantise(words, _, rows):
        words = words.at[0, 0].set((jnp.abs(rows[0, 0]) * 3).astype(wire.word))
        return wire.payload(words)

    words = jax.jit(wire.pack)(x, ids, weights, jnp.int32(0))
    return device_loop(dequantise, words, jnp.zeros_like(x))


class LargestMatrix(nnx.Module):
    """The largest matrix that attention of every layer has: the output projection, `[heads × value width, hidden]` in V3."""

    def __init__(self, declare: Declaration, rows: int, columns: int):
        self.matrix = Matrix(declare, (rows, columns), ("heads", "embed"))


def product_cases(setting: Setting, tokens: Iterable[int]) -> Iterator[ModuleCase]:
    """Yield one matrix product with block-scaled FP8 (by ``--activation-scheme``), bf16 and, if the step is float32, float32 weights."""
    config = setting.config
    matrices, _ = attention_matrices(config, attention=config.layer_runs[0].kinds[0].attention)
    rows, columns = max(matrices, key=lambda shape: (math.prod(shape), shape[0]))
    for weights in ("f32", "bf16", "fp8"):
        if weights == "f32" and setting.dtype != np.float32:
            continue
        own_setting = dataclasses.replace(setting, weights=weights)
        make = lambda declare: LargestMatrix(declare, rows, columns)  # noqa: E731
        stack = LayerStack.of(own_setting, make, config.num_hidden_layers)

        def apply(product: LargestMatrix, x, total, setting=own_setting):
            wide = jnp.broadcast_to(x[..., :1], (*x.shape[:-1], rows))
            return total + setting.multiply(product.matrix, wide)

        for count in tokens:
            moved = count * setting.dtype.itemsize * (rows + columns)
            work = ModuleWork(2 * count * rows * columns, stack.layer_bytes, moved)
            build = partial(layer_loop, own_setting, stack, apply, config.num_hidden_layers, count)
            sizes = {"tokens": count, "n": columns, "k": rows}
            yield ModuleCase("product", weights, sizes, work, stack.nbytes + 4 * moved, build)
