"""Attention benchmark cases: each MLA form by rows and context, from the projections and cache write to the output projection."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np

from dsjax.bench.modules.run import ModuleCase, ModuleWork
from dsjax.bench.modules.setting import LayerStack, Setting
from dsjax.bench.modules.timing import PreparedCase, device_loop
from dsjax.model.attention import AttentionFamily
from dsjax.model.forms import Form
from dsjax.model.layer_values import Tokens
from dsjax.model.mla_costs import mla_cost
from dsjax.model.paging import Cache, Rows
from dsjax.model.parameters import storage_dtype
from dsjax.model.rope import Rotation
from dsjax.model.transformer import MLA

MOST_CACHE = 1 << 30
"""Maximum bytes of cache. If the layers do not all fit, the benchmark cycles through the cache layers that do."""


@dataclass(frozen=True, eq=False)
class AttentionShape:
    """The step's attention in one MLA form: rows of `chunk` tokens, each of which attends to the `cached` positions before it."""

    setting: Setting
    form: Form
    rows: int
    chunk: int
    cached: int

    @cached_property
    def attention(self) -> AttentionFamily:
        """The step's attention, with the cache in the layout that the form reads."""
        return replace(self.setting.step.attention, config=self.setting.config, layout=self.form.layouts[0])

    @property
    def context(self) -> int:
        """Context length of a row, in tokens."""
        return self.cached + self.chunk

    @property
    def pages(self) -> int:
        """Pages per row."""
        return -(-self.context // self.setting.step.page_size)

    @cached_property
    def token_bytes(self) -> int:
        """Cache bytes per token in one layer."""
        return sum(group.page_bytes for group in self.attention.groups((0,)))

    @property
    def layers(self) -> int:
        """Number of cache layers: the model's, or as many as fit in `MOST_CACHE`."""
        one = max(self.rows * self.context * self.token_bytes, 1)
        return int(max(1, min(self.setting.config.num_hidden_layers, MOST_CACHE // one)))

    def cost(self) -> tuple[float, float]:
        """Return a layer's FLOPs, and the bytes that it moves apart from its weights."""
        shape = {"rows": self.rows, "chunk": self.chunk, "context": self.context}
        attended, itemsize = self.cached + (self.chunk + 1) / 2, self.setting.dtype.itemsize
        shape |= {"cache_dtype": self.attention.cache_dtype, "activation_itemsize": itemsize, "attended": attended}
        cost = mla_cost(self.setting.config, self.form, **shape)
        return cost.flops, cost.cache_read_bytes + cost.cache_write_bytes + cost.activation_bytes

    def arrays(self) -> dict[str, jax.Array]:
        """Make `x`, positions, page tables and slots."""
        setting, page = self.setting, self.setting.step.page_size
        # Pages in random order, as after serving for a while; page 0 is never used.
        order = np.random.default_rng(setting.seed).permutation(self.rows * self.pages) + 1
        tables = np.zeros((1, self.rows, -(-setting.max_model_len // page)), np.int32)
        tables[0, :, : self.pages] = order.reshape(self.rows, self.pages)
        positions = np.broadcast_to(np.arange(self.cached, self.context), (1, self.rows, self.chunk))
        slots = np.take_along_axis(tables, positions // page, axis=2) * page + positions % page
        return {
            "x": setting.random((1, self.rows * self.chunk, setting.config.hidden_size)),
            "positions": jnp.asarray(positions, jnp.int32),
            "tables": jnp.asarray(tables),
            "slots": jnp.asarray(slots.reshape(1, -1), jnp.int32),
        }

    def cache(self) -> Cache:
        """Make a zero-filled cache of `layers` layers."""
        lead = (self.layers, self.rows * self.pages + 1, self.setting.step.page_size)
        return {
            name: jnp.zeros((*lead, *width), storage_dtype(dtype, self.setting.platform))
            for name, (width, dtype) in self.attention.arrays.items()
        }

    def attend(self, mla: MLA, x: jax.Array, arrays: Mapping[str, jax.Array], cache: Cache, layer):
        """Run one layer's attention as the step does: projections, cache write, attention, output. Return `(out, cache)`."""
        config, multiply, attention, form = self.setting.config, self.setting.multiply, self.attention, self.form
        rotation = Rotation.at(arrays["positions"].reshape(1, -1), config.rope, config.mla.qk_rope_head_dim)
        p = attention.project(mla, x, rotation, [form], multiply=multiply)
        tokens = Tokens((), None, None, arrays["slots"], rotation)
        cache = attention.cache_entries(mla, cache, layer, tokens, p)
        part = jax.tree.map(lambda a: a.reshape(1, self.rows, self.chunk, *a.shape[2:]), p)
        rows = Rows(arrays["positions"], arrays["tables"])
        found = attention.attend(mla, form, cache, layer, None, rows, part)
        return attention.output(mla, form, found, multiply).reshape(x.shape), cache


def attention_cases(
    setting: Setting, form: Form, phase: str, shapes: list[tuple[int, int, int]]
) -> Iterator[ModuleCase]:
    """Yield attention cases. shapes: (rows, tokens per row, cached positions). phase: decode, verify (decode with drafts) or prefill."""
    make = lambda declare: MLA(replace(declare, materialise=form.materialised), setting.config)  # noqa: E731
    stack = LayerStack.of(setting, make, setting.config.num_hidden_layers)
    for rows, chunk, cached in shapes:
        shape = AttentionShape(setting, form, rows, chunk, cached)
        if shape.context > setting.max_model_len:
            continue
        flops, other = shape.cost()
        cache = shape.layers * (rows * shape.pages + 1) * setting.step.page_size * shape.token_bytes
        block = shape.attention.block(rows, chunk)
        sizes = {"rows": rows, "chunk": chunk, "context": cached, "tokens": rows * chunk, "block": block}
        work, build = ModuleWork(flops, stack.layer_bytes, other), partial(_attention_loop, stack, shape)
        yield ModuleCase("attention", f"{form} {phase}", sizes, work, stack.nbytes + 2 * cache, build)


def _attention_loop(stack: LayerStack, shape: AttentionShape) -> PreparedCase:
    """Prepare a loop of attention over the layers."""
    setting, arrays = shape.setting, shape.arrays()

    def one_layer(inputs, index, carry):
        total, cache, layer = carry
        mla: MLA = stack.layer(inputs["params"], index)
        out, cache = shape.attend(mla, inputs["x"], inputs, cache, layer)
        return total + out, cache, (layer + 1) % shape.layers

    carry = (jnp.zeros_like(arrays["x"]), shape.cache(), jnp.int32(0))
    inputs = arrays | {"params": stack.values(setting.seed)}
    return device_loop(one_layer, inputs, carry, depth=stack.depth, in_step=setting.config.num_hidden_layers)
