"""Cases of attention: each MLA form over rows and contexts, projections, cache write, attending and output together."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsjax.bench.modules.case import Case, Work
from dsjax.bench.modules.setting import Setting, Stack
from dsjax.bench.modules.timing import Prepared, device_loop
from dsjax.model.attention import PagedAttention, Rows
from dsjax.model.forms import Form, cache_widths, common_layout
from dsjax.model.mla import MLA
from dsjax.model.mla_costs import cache_bytes, mla_cost
from dsjax.model.parameters import storage_dtype
from dsjax.model.rope import Rotation

MOST_CACHE = 1 << 30
"""Bytes of cache at most; with less than the model's layers, layers take turns at those there are."""


def attention_cases(setting: Setting, form: Form, shapes: list[tuple[int, int, int]]) -> Iterator[Case]:
    """Shapes are (rows, tokens of each, positions already cached)."""
    itemsize = jnp.dtype(setting.step.cache_dtype).itemsize
    for rows, chunk, cached in shapes:
        context = cached + chunk
        if context > setting.max_model_len:
            continue
        cost = mla_cost(
            setting.config,
            form,
            rows=rows,
            chunk=chunk,
            context=context,
            attended=cached + (chunk + 1) / 2,
            weight_itemsize=1,
            cache_itemsize=itemsize,
            activation_itemsize=setting.dtype.itemsize,
        )
        stack = _stack(setting, form)
        other = cost.cache_read_bytes + cost.cache_write_bytes + cost.activation_bytes
        layers = cache_layers(setting, form, rows, context)
        pages = rows * -(-context // setting.step.page_size) + 1
        cache = layers * pages * setting.step.page_size * cache_bytes(setting.config, form, itemsize)
        yield Case(
            "attention",
            f"{form} {'decode' if chunk == 1 else 'prefill'}",
            {"rows": rows, "chunk": chunk, "context": cached, "tokens": rows * chunk},
            Work(cost.flops, stack.layer_bytes, other),
            stack.nbytes + 2 * cache,
            lambda rows=rows, chunk=chunk, cached=cached: attention_loop(setting, form, rows, chunk, cached),
        )


def cache_layers(setting: Setting, form: Form, rows: int, context: int) -> int:
    """Layers of cache to run through: the model's, or as many as `MOST_CACHE` takes."""
    one = rows * context * cache_bytes(setting.config, form, jnp.dtype(setting.step.cache_dtype).itemsize)
    return max(1, min(setting.config.num_hidden_layers, MOST_CACHE // max(one, 1)))


def attention_loop(setting: Setting, form: Form, rows: int, chunk: int, cached: int) -> Prepared:
    """All that attention does in a layer of the step, over layers, for rows that attend to all of `cached`."""
    step, config = setting.step, setting.config
    page, stack = step.page_size, _stack(setting, form)
    layout = common_layout(form, form)
    attention = PagedAttention(step.mesh, step.spec, config, layout, step.cache_dtype, step.block_tokens)
    pages = -(-(cached + chunk) // page)
    layers = cache_layers(setting, form, rows, cached + chunk)
    stored = storage_dtype(jnp.dtype(step.cache_dtype), setting.platform)
    cache = {
        name: jnp.zeros((layers, rows * pages + 1, page, *width), stored)
        for name, width in cache_widths(layout, config).items()
    }
    # Pages in a random order, as after some time of serving; page 0 is never used.
    order = np.random.default_rng(setting.seed).permutation(rows * pages) + 1
    tables = np.zeros((1, rows, -(-setting.max_model_len // page)), np.int32)
    tables[0, :, :pages] = order.reshape(rows, pages)
    positions = np.broadcast_to(np.arange(cached, cached + chunk), (1, rows, chunk))
    slots = np.take_along_axis(tables, positions // page, axis=2) * page + positions % page
    inputs = {
        "params": stack.values(setting.seed),
        "x": setting.random((1, rows * chunk, config.hidden_size)),
        "positions": jnp.asarray(positions, jnp.int32),
        "tables": jnp.asarray(tables),
        "slots": jnp.asarray(slots.reshape(1, -1), jnp.int32),
    }

    graph = stack.graph

    def one_layer(inputs, index, carry):
        total, cache, layer = carry
        flat = inputs["positions"].reshape(1, -1)
        rotation = Rotation.at(flat, config.rope, config.qk_rope_head_dim)
        mla: MLA = nnx.merge(graph, stack.layer(inputs["params"], index))
        p = mla.project(inputs["x"], rotation, query_heads=form != "AM_CC_ME")
        cache = attention.write(mla, cache, layer, inputs["slots"], p)
        part = jax.tree.map(lambda a: a.reshape(1, rows, chunk, *a.shape[2:]), p)
        at = Rows(inputs["positions"], inputs["tables"])
        heads = attention.attend(mla, form, cache, layer, at, part)
        out = mla.add_output_bias(heads) if form == "AM_CC_ME" else mla.output(heads)
        return total + out.reshape(total.shape), cache, (layer + 1) % layers

    carry = (jnp.zeros_like(inputs["x"]), cache, jnp.int32(0))
    return device_loop(one_layer, inputs, carry, depth=stack.depth, in_call=config.num_hidden_layers)


def _stack(setting: Setting, form: Form) -> Stack:
    make = lambda declare: MLA(declare, setting.config, materialise=form == "AM_CC_ME")  # noqa: E731
    return Stack.of(setting, make, setting.config.num_hidden_layers)
