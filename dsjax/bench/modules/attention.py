"""Attention benchmark cases by rows and context: the projections, the cache write, attention, and the output projection."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsjax.bench.modules.run import ModuleCase, ModuleWork
from dsjax.bench.modules.setting import LayerStack, Setting
from dsjax.bench.modules.timing import PreparedCase, device_loop
from dsjax.engine.device import cache as device_cache
from dsjax.engine.schedule.pages import window_columns
from dsjax.model.cache_groups import TABLES
from dsjax.model.forms import Form
from dsjax.model.layer_costs import attention_cost
from dsjax.model.layer_values import Layer
from dsjax.model.paging import Cache
from dsjax.model.rows import GroupShape, RowGroup
from dsjax.model.step import ModelStep
from dsjax.model.transformer import attention_of

MOST_CACHE = 1 << 30
"""Maximum bytes of cache. If the model's layers do not all fit, the benchmark cycles through as many as do."""


@dataclass(frozen=True, eq=False)
class AttentionShape:
    """Attention of one kind and form at one size: rows of `chunk` tokens, each of which also attends to the `cached` positions before it.

    kind: see `LayerKind`. in_model: number of the model's layers of this kind.
    """

    setting: Setting
    kind: str
    in_model: int
    form: Form
    rows: int
    chunk: int
    cached: int

    def step_of(self, layers: int) -> ModelStep:
        """Return the step of a model with `layers` layers, all of this kind, and with the cache layout of this form."""
        config = self.setting.config.with_layers(self.kind, layers)
        return replace(self.setting.step, config=config, prefill_form=self.form, decode_form=self.form)

    @cached_property
    def step(self) -> ModelStep:
        """The step of `layers` layers."""
        return self.step_of(self.layers)

    @property
    def context(self) -> int:
        """Context length of a row, in tokens."""
        return self.cached + self.chunk

    @property
    def pages(self) -> dict[str, int]:
        """Pages per row, by page table. Layers without window pages do not use `window`."""
        page = self.setting.step.page_size
        return {"context": -(-self.context // page), "window": window_columns(self.chunk, page)}

    @cached_property
    def layer_bytes(self) -> int:
        """Cache bytes of one layer, page 0 included."""
        step = self.step_of(1)
        return sum((self.rows * self.pages[table] + 1) * device_cache.bytes_per_page(step, table) for table in TABLES)

    @cached_property
    def layers(self) -> int:
        """Number of cache layers: the model's, or as many as fit in `MOST_CACHE`."""
        return max(1, min(self.in_model, MOST_CACHE // self.layer_bytes))

    def cost(self) -> tuple[float, float]:
        """Return a layer's FLOPs, and the bytes that it moves apart from its weights."""
        shape = {"rows": self.rows, "chunk": self.chunk, "context": self.context}
        attended, itemsize = self.cached + (self.chunk + 1) / 2, self.setting.dtype.itemsize  # mean of the tokens
        shape |= {"cache_dtype": self.step.cache_dtype, "activation_itemsize": itemsize, "attended": attended}
        cost = attention_cost(self.step.config, self.kind, self.form, **shape)
        return cost.flops, cost.cache_read_bytes + cost.cache_write_bytes + cost.activation_bytes

    def arrays(self) -> dict[str, Any]:
        """Make `x` and the row group, with page tables."""
        setting, page = self.setting, self.setting.step.page_size
        # Pages in random order, as after serving for a while; page 0 is never used.
        rng = np.random.default_rng(setting.seed)
        page_numbers = {
            table: (rng.permutation(self.rows * count) + 1).reshape(self.rows, count)
            for table, count in self.pages.items()
        }
        num_windows = self.pages["window"] if any(g.table == "window" for g in self.step.cache_groups) else 0
        context_columns = -(-setting.max_model_len // page)
        tables = np.zeros((1, self.rows, context_columns + num_windows), np.int32)
        tables[0, :, : self.pages["context"]] = page_numbers["context"]
        tables[0, :, context_columns:] = page_numbers["window"][:, :num_windows]
        per_row = lambda value: jnp.full((1, self.rows), value, jnp.int32)  # noqa: E731
        shape = GroupShape(self.rows, self.chunk, context_columns, self.form, num_windows)
        tokens = jnp.zeros((1, self.rows, self.chunk), jnp.int32)
        return {
            "x": setting.random((1, self.rows * self.chunk, setting.config.hidden_size)),
            "group": RowGroup(tokens, per_row(self.cached), per_row(self.chunk), jnp.asarray(tables), shape),
        }

    def cache(self) -> Cache:
        """Make a zero-filled cache of `layers` layers."""
        context_pages, window_pages = (self.rows * self.pages[table] + 1 for table in TABLES)
        specs = device_cache.describe(self.step, context_pages, window_pages)
        return {name: jnp.zeros(spec.shape, spec.dtype) for name, spec in specs.items()}

    def attend(self, attention: nnx.Module, x: jax.Array, arrays: Mapping[str, Any], cache: Cache, number):
        """Run one layer's attention as the step does: projections, cache write, attention, output. Return `(out, cache)`.

        attention: the layer's module. number: the layer's number in the cache.
        """
        step, multiply = self.step, self.setting.multiply
        attention_family, tokens = step.attention, step.tokens([arrays["group"]])
        products = {"multiply": multiply, "normalise": step.products.normalise}
        projected = attention_family.project(attention, x, tokens.rotation, [self.form], **products)
        cache = attention_family.cache_entries(attention, cache, number, tokens, projected)
        layer = Layer(SimpleNamespace(attn=attention), None, number, tokens, None)
        [result] = step.parts.heads(layer, projected, cache)
        return attention_family.output(attention, self.form, result, multiply).reshape(x.shape), cache


def attention_cases(
    setting: Setting, kind: str, in_model: int, form: Form, phase: str, shapes: list[tuple[int, int, int]]
) -> Iterator[ModuleCase]:
    """Yield attention cases. shapes: (rows, tokens per row, cached positions). phase: decode, verify (decode with drafts) or prefill.

    kind, in_model: as in `AttentionShape`.
    """
    make = lambda declare: attention_of(replace(declare, materialise=form.materialised), setting.config, kind)  # noqa: E731
    stack = LayerStack.of(setting, make, in_model)
    for rows, chunk, cached in shapes:
        shape = AttentionShape(setting, kind, in_model, form, rows, chunk, cached)
        if shape.context > setting.max_model_len:
            continue
        flops, other_bytes = shape.cost()
        sizes = {"rows": rows, "chunk": chunk, "context": cached, "tokens": rows * chunk}
        sizes |= {"block": shape.step.attention.block(rows, chunk)}
        work, build = ModuleWork(flops, stack.layer_bytes, other_bytes), partial(_attention_loop, stack, shape)
        variant = f"{form if setting.config.family.has_forms else kind} {phase}"
        yield ModuleCase("attention", variant, sizes, work, stack.nbytes + 2 * shape.layers * shape.layer_bytes, build)


def _attention_loop(stack: LayerStack, shape: AttentionShape) -> PreparedCase:
    """Prepare a loop of attention over the layers."""
    setting, arrays = shape.setting, shape.arrays()

    def one_layer(inputs, index, carry):
        total, cache, number = carry
        out, cache = shape.attend(stack.layer(inputs["params"], index), inputs["x"], inputs, cache, number)
        return total + out, cache, (number + 1) % shape.layers

    carry = (jnp.zeros_like(arrays["x"]), shape.cache(), jnp.int32(0))
    inputs = arrays | {"params": stack.values(setting.seed)}
    return device_loop(one_layer, inputs, carry, depth=stack.depth, in_step=shape.in_model)
