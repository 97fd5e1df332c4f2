"""Cases of FP8: quantising activations as dispatch does, and products with FP8 weights as the model does them."""

import dataclasses
from collections.abc import Iterable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsjax.bench.modules.dense import layer_loop
from dsjax.bench.modules.run import ModuleCase, ModuleWork
from dsjax.bench.modules.setting import LayerStack, Setting
from dsjax.bench.modules.timing import PreparedCase, device_loop
from dsjax.model.parameters import Declaration, Matrix
from sharding.dispatch.wire import WireFormat


def quantisation_cases(setting: Setting, tokens: Iterable[int]) -> Iterator[ModuleCase]:
    """`quantise`: rows packed for the wire in e4m3, a scale for each 1 × 128 block; `dequantise`: read back out of packed rows."""
    D, size = setting.config.hidden_size, setting.dtype.itemsize
    wire = _wire(setting)
    for count in tokens:
        for variant in ("quantise", "dequantise"):
            work = ModuleWork(3 * count * D, 0, count * (D * size + wire.row_bytes))
            memory = 4 * count * (D * size + wire.row_bytes)
            build = partial(_quantisation, setting, count, variant)
            yield ModuleCase("fp8", variant, {"tokens": count}, work, memory, build)


def _wire(setting: Setting) -> WireFormat:
    return WireFormat(setting.config.hidden_size, max(1, setting.config.num_experts_per_tok), setting.dtype, fp8=True)


def _quantisation(setting: Setting, count: int, variant: str) -> PreparedCase:
    wire, K = _wire(setting), max(1, setting.config.num_experts_per_tok)
    x = setting.random((count, setting.config.hidden_size))
    ids, weights = jnp.zeros((count, K), jnp.int32), jnp.zeros((count, K), jnp.float32)

    if variant == "quantise":

        def one_round(inputs, _, words):
            # One value of the last result goes into the rows, so that a round waits for the one before it.
            x = inputs.at[0, 0].set((words[0, 0] % 7).astype(inputs.dtype))
            return wire.pack(x, ids, weights, jnp.int32(0))

        return device_loop(one_round, x, jnp.zeros((count, wire.row_words), wire.word))

    words = jax.jit(wire.pack)(x, ids, weights, jnp.int32(0))

    def one_round(inputs, _, rows):
        words = inputs.at[0, 0].set((jnp.abs(rows[0, 0]) * 3).astype(wire.word))
        return wire.payload(words)

    return device_loop(one_round, words, jnp.zeros_like(x))


class OutputProjection(nnx.Module):
    """The attention's output projection, `[heads × value width, hidden]`: the largest product that is in every layer."""

    def __init__(self, declare: Declaration, rows: int, columns: int):
        self.matrix = Matrix(declare, (rows, columns), ("heads", "embed"))


def product_cases(setting: Setting, tokens: Iterable[int]) -> Iterator[ModuleCase]:
    """One product by weights kept as bf16, float32 and FP8 with block scales; of the last as ``--activation-scheme`` says."""
    config = setting.config
    rows, columns = config.num_attention_heads * config.v_head_dim, config.hidden_size
    for weights in ("f32", "bf16", "fp8"):
        if weights == "f32" and setting.dtype != np.float32:
            continue
        kept = dataclasses.replace(setting, weights=weights)
        make = lambda declare: OutputProjection(declare, rows, columns)  # noqa: E731
        stack = LayerStack.of(kept, make, config.num_hidden_layers)

        def apply(product: OutputProjection, x, total, kept=kept):
            wide = jnp.broadcast_to(x[..., :1], (*x.shape[:-1], rows))
            return total + kept.multiply(product.matrix, wide)

        for count in tokens:
            moved = count * setting.dtype.itemsize * (rows + columns)
            work = ModuleWork(2 * count * rows * columns, stack.layer_bytes, moved)
            build = partial(layer_loop, kept, stack, apply, config.num_hidden_layers, count)
            sizes = {"tokens": count, "n": columns, "k": rows}
            yield ModuleCase("product", weights, sizes, work, stack.nbytes + 4 * moved, build)
