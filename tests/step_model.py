"""A tiny model's step on a mesh, run without an engine: one program for a group of decodes beside a group of prompts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from goldens.our_model import COMPILE_QUICKLY, hf_tensors
from goldens.random_weights import RandomWeights
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dsjax.checkpoint.load import from_hf_tensors
from dsjax.engine.device import cache as device_cache
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.assembly import make_step
from dsjax.model.derived import materialise
from dsjax.model.rows import GroupShape, RowGroup, unpack
from sharding import MeshSpec

G, PAGES, TABLE = 4, 12, 5  # slots of a page, pages of a rank, pages of a row's table
PREFILL, DECODE = (2, 6), (2, 1)  # rows and chunk


@functools.cache
def tensors(config):
    return hf_tensors(config, RandomWeights(3, bias_center=-0.2))


def on_mesh(mesh, rules, infos, host):
    """The parameters on a mesh."""
    shardings = {path: rules.sharding(mesh, infos[path].logical_axes, value.shape) for path, value in host.items()}
    return jax.device_put(host, shardings)


def placed(step, host):
    """The parameters on the step's mesh, with those that are derived from them."""
    return materialise(step, on_mesh(step.mesh, step.rules, step.table.infos, host))


def empty_groups(groups, pages, sharding):
    """The empty cache arrays of groups. pages: how many each table has."""
    return {
        name: jax.device_put(np.zeros((len(group.layers), pages[group.table], group.entries, *shape), dtype), sharding)
        for group in groups
        for name, (shape, dtype) in group.arrays.items()
    }


def pack_rows(lead, chunk, table_width, rows):
    """``{(rank, row): (tokens, start, pages)}`` of ``lead`` ranks and rows as a step's integers.

    Padding's tables name pages that are in use: a write that is not dropped would be seen.
    """
    token, start, length = np.ones((*lead, chunk)), np.zeros(lead), np.zeros(lead)
    table = np.full((*lead, table_width), 3)
    for at, (own, first, pages) in rows.items():
        token[at][: len(own)], start[at], length[at] = own, first, len(own)
        table[at] = [*pages, *[0] * (table_width - len(pages))]
    return RowGroup.pack(*(a.astype(np.int32) for a in (token, start, length, table)))


class Model:
    """A tiny model on a mesh, and its cache as one array after the other."""

    def __init__(self, mesh, config, report=False, rules=None, mtp=False, **options):
        spec = MeshSpec.parse(mesh)
        args = EngineArgs(mesh=mesh, page_size=G, **({"dtype": "float32"} | options))
        self.step = make_step(args, config, spec, spec.build(), mtp=mtp)
        if rules:
            self.step = dataclasses.replace(self.step, rules=self.step.rules.replace(**rules))
        if report:
            self.step = dataclasses.replace(self.step, dispatch=dataclasses.replace(self.step.dispatch, report=True))
        weights = options.get("weights", "f32" if self.step.dtype == np.float32 else "bf16")
        self.params = placed(self.step, from_hf_tensors(config, tensors(config), weights=weights, mtp=mtp))
        self.ranks = spec.dp_size
        self.rows = NamedSharding(self.step.mesh, P(spec.batch_axes))
        self._programs = {}

    def empty_cache(self):
        arrays = device_cache.describe(self.step, PAGES)
        return {name: jax.device_put(np.zeros(one.shape, one.dtype), one.sharding) for name, one in arrays.items()}

    def run(self, cache, groups, prompt_length=None):
        """Logits and cache of a step over ``groups``: ``(kind, rows by rank)``, a row ``(tokens, start, pages)``.

        prompt_length: of all rows; None: their tokens have the form of their group.
        """
        shapes, parts = [], []
        for (rows, chunk), form, by_rank in groups:
            shapes.append(GroupShape(rows, chunk, TABLE, form))
            placed_rows = {(rank, i): row for rank, own in enumerate(by_rank) for i, row in enumerate(own)}
            parts.append(pack_rows((self.ranks, rows), chunk, TABLE, placed_rows))
        key = (*shapes, prompt_length)
        if key not in self._programs:
            copies = self.step.placement.tables

            def run(params, cache, packed):
                parts = unpack(packed, shapes)
                if prompt_length is not None:
                    lengths = [jnp.full_like(part.length, prompt_length) for part in parts]
                    parts = [
                        dataclasses.replace(part, prompt_length=own) for part, own in zip(parts, lengths, strict=True)
                    ]
                hidden, cache, reports = self.step.hidden(params, cache, parts, copies)
                return self.step.logits(params, last_tokens(hidden, parts)), cache, reports

            self._programs[key] = jax.jit(run, compiler_options=COMPILE_QUICKLY)
        packed = jax.device_put(np.concatenate(parts, axis=1), self.rows)
        logits, cache, self.reports = jax.block_until_ready(self._programs[key](self.params, cache, packed))
        return np.asarray(logits), cache

    def prefill(self, *by_rank):
        return (PREFILL, self.step.prefill_form, by_rank)

    def decode(self, *by_rank):
        return (DECODE, self.step.decode_form, by_rank)

    def both(self, decodes=((), ()), prompts=((), ())):
        """A group of decodes and one of prompts: one program for a step of either, and of both."""
        return [self.decode(*decodes), self.prefill(*prompts)]


def last_tokens(x, groups):
    """Each row's last active token ``[B, R, D]``; its first slot where the row is padding."""
    indices, start = [], 0
    for group in groups:
        first = start + jnp.arange(group.shape.rows) * group.shape.chunk
        indices.append(first + jnp.maximum(group.length - 1, 0))
        start += group.shape.tokens
    return jnp.take_along_axis(x, jnp.concatenate(indices, axis=1)[..., None], axis=1)
