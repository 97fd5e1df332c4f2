"""Cases of attention: each MLA form over rows and contexts, projections, cache write, attending and output together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dsjax.bench.modules.run import ModuleCase, ModuleWork
from dsjax.bench.modules.setting import LayerStack, Setting
from dsjax.bench.modules.timing import PreparedCase, device_loop
from dsjax.model.attention import PagedAttention
from dsjax.model.forms import Form, common_layout
from dsjax.model.mla_costs import cache_bytes, mla_cost
from dsjax.model.paging import Cache, Rows
from dsjax.model.parameters import Multiply, storage_dtype
from dsjax.model.rope import Rotation
from dsjax.model.transformer import MLA

MOST_CACHE = 1 << 30
"""Bytes of cache at most; with less than the model's layers, layers take turns at those there are."""


def attention_cases(
    setting: Setting, form: Form, phase: str, shapes: list[tuple[int, int, int]]
) -> Iterator[ModuleCase]:
    """Shapes are (rows, tokens of each, positions already cached). phase: decode; verify: decode rows with drafts; or prefill."""
    itemsize = jnp.dtype(setting.step.cache_dtype).itemsize
    make = lambda declare: MLA(declare, setting.config, materialise=form == "AM_CC_ME")  # noqa: E731
    stack = LayerStack.of(setting, make, setting.config.num_hidden_layers)
    for rows, chunk, cached in shapes:
        context = cached + chunk
        if context > setting.max_model_len:
            continue
        flops, other = attention_cost(setting, form, rows, chunk, cached)
        block = paged_attention(setting, form).block(rows, chunk)
        layers = cache_layers(setting, form, rows, context)
        pages = rows * -(-context // setting.step.page_size) + 1
        cache = layers * pages * setting.step.page_size * cache_bytes(setting.config, form, itemsize)
        sizes = {"rows": rows, "chunk": chunk, "context": cached, "tokens": rows * chunk, "block": block}
        work = ModuleWork(flops, stack.layer_bytes, other)
        build = partial(attention_loop, setting, stack, form, rows, chunk, cached)
        yield ModuleCase("attention", f"{form} {phase}", sizes, work, stack.nbytes + 2 * cache, build)


def attention_cost(setting: Setting, form: Form, rows: int, chunk: int, cached: int) -> tuple[float, float]:
    """Operations of a layer's attention, and the bytes that it moves beside its weights."""
    cost = mla_cost(
        setting.config,
        form,
        rows=rows,
        chunk=chunk,
        context=cached + chunk,
        attended=cached + (chunk + 1) / 2,
        cache_itemsize=jnp.dtype(setting.step.cache_dtype).itemsize,
        activation_itemsize=setting.dtype.itemsize,
    )
    return cost.flops, cost.cache_read_bytes + cost.cache_write_bytes + cost.activation_bytes


def cache_layers(setting: Setting, form: Form, rows: int, context: int) -> int:
    """Layers of cache to run through: the model's, or as many as `MOST_CACHE` takes."""
    one = rows * context * cache_bytes(setting.config, form, jnp.dtype(setting.step.cache_dtype).itemsize)
    return max(1, min(setting.config.num_hidden_layers, MOST_CACHE // max(one, 1)))


@dataclass(frozen=True)
class AttentionInputs:
    """What attention of one shape is: the model's attention, the form, the shape."""

    attention: PagedAttention
    form: Form
    rows: int
    chunk: int
    multiply: Multiply

    @classmethod
    def of(
        cls, setting: Setting, form: Form, rows: int, chunk: int, cached: int
    ) -> tuple[AttentionInputs, dict[str, jax.Array]]:
        """Make them with their arrays: `x`, positions, page tables, slots, for rows that attend to all of `cached`."""
        step, config = setting.step, setting.config
        page, pages = step.page_size, -(-(cached + chunk) // step.page_size)
        # Pages in a random order, as after some time of serving; page 0 is never used.
        order = np.random.default_rng(setting.seed).permutation(rows * pages) + 1
        tables = np.zeros((1, rows, -(-setting.max_model_len // page)), np.int32)
        tables[0, :, :pages] = order.reshape(rows, pages)
        positions = np.broadcast_to(np.arange(cached, cached + chunk), (1, rows, chunk))
        slots = np.take_along_axis(tables, positions // page, axis=2) * page + positions % page
        arrays = {
            "x": setting.random((1, rows * chunk, config.hidden_size)),
            "positions": jnp.asarray(positions, jnp.int32),
            "tables": jnp.asarray(tables),
            "slots": jnp.asarray(slots.reshape(1, -1), jnp.int32),
        }
        return cls(paged_attention(setting, form), form, rows, chunk, setting.multiply), arrays


def paged_attention(setting: Setting, form: Form) -> PagedAttention:
    """Make the step's attention, with the cache in the layout that the form reads."""
    step, layout = setting.step, common_layout(form, form)
    return PagedAttention(
        step.mesh, step.spec, setting.config, layout, step.cache_dtype, step.block_tokens, step.kernels
    )


def cache_for(setting: Setting, form: Form, rows: int, context: int) -> Cache:
    """Make a cache of zeros, for `cache_layers` layers."""
    step, pages = setting.step, rows * -(-context // setting.step.page_size) + 1
    lead = (cache_layers(setting, form, rows, context), pages, step.page_size)
    return {
        name: jnp.zeros((*lead, *width), storage_dtype(dtype, setting.platform))
        for name, (width, dtype) in paged_attention(setting, form).arrays.items()
    }


def attend_layer(at: AttentionInputs, mla: MLA, x: jax.Array, arrays: Mapping[str, jax.Array], cache: Cache, layer):
    """Compute all of attention in a layer of the step: projections, cache write, attending, output; gives `(out, cache)`."""
    rows, chunk, config = at.rows, at.chunk, at.attention.config
    rotation = Rotation.at(arrays["positions"].reshape(1, -1), config.rope, config.qk_rope_head_dim)
    p = mla.project(x, rotation, query_heads=at.form != "AM_CC_ME", multiply=at.multiply)
    cache = at.attention.write(mla, cache, layer, arrays["slots"], p)
    part = jax.tree.map(lambda a: a.reshape(1, rows, chunk, *a.shape[2:]), p)
    heads = at.attention.attend(mla, at.form, cache, layer, Rows(arrays["positions"], arrays["tables"]), part)
    out = mla.add_output_bias(heads) if at.form == "AM_CC_ME" else mla.output(heads, at.multiply)
    return out.reshape(x.shape), cache


def attention_loop(setting: Setting, stack: LayerStack, form: Form, rows: int, chunk: int, cached: int) -> PreparedCase:
    """Attention over layers, for rows that attend to all of `cached`."""
    layers = cache_layers(setting, form, rows, cached + chunk)
    attention, arrays = AttentionInputs.of(setting, form, rows, chunk, cached)

    def one_layer(inputs, index, carry):
        total, cache, layer = carry
        mla: MLA = stack.layer(inputs["params"], index)
        out, cache = attend_layer(attention, mla, inputs["x"], inputs, cache, layer)
        return total + out, cache, (layer + 1) % layers

    carry = (jnp.zeros_like(arrays["x"]), cache_for(setting, form, rows, cached + chunk), jnp.int32(0))
    inputs = arrays | {"params": stack.values(setting.seed)}
    return device_loop(one_layer, inputs, carry, depth=stack.depth, in_call=setting.config.num_hidden_layers)
