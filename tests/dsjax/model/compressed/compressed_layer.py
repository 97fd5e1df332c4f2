"""One layer of a tiny DeepSeek-V4 with its paged cache, of arrays: what the tests of `Compressed` write to and attend with."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from v4_models import v4_config, v4_tensors

from dsjax.checkpoint.load import from_hf_tensors
from dsjax.config import ModelConfig
from dsjax.kernels.table import PLAIN
from dsjax.model.compressed.family import Compressed
from dsjax.model.compressed.rotations import Rotations
from dsjax.model.forms import FORMS
from dsjax.model.layer_values import Tokens
from dsjax.model.paging import Rows
from dsjax.model.parameter_table import parameter_table
from dsjax.model.rows import GroupShape, RowGroup, flatten
from dsjax.model.sparse import IndexScores
from sharding import MeshSpec
from sharding.rules import Rules

T, LENGTH, CONTEXT = 128, 300, 3  # tokens of a page, of the prompt, and pages of its context
WIDE = {"rates": (4, 128), "sliding_window": 128, "head_dim": 32, "hidden_size": 32, "index_head_dim": 16}
BLOCKS = {"head_dim": 76, "index_head_dim": 64}  # two blocks that share a scale in FP8 and FP4
KINDS = {"window": 0, "csa": 1, "hca": 2}
WINDOWS = (LENGTH + 253) // T + 1  # pages of a row's ring, which no row goes around


@functools.cache
def model(topk=16, blocks=False):
    config = ModelConfig.from_dict(v4_config("wch", index_topk=topk, **WIDE | (BLOCKS if blocks else {})))
    table = parameter_table(config, weights="f32")
    return config, table, from_hf_tensors(config, v4_tensors(config))


@functools.cache
def projected(kind, seed=0, topk=16, blocks=False):
    """Projections of one sequence from position 0 on."""
    config, table, params = model(topk, blocks)

    def project(params, x):
        return weights_of(table, params, kind).project(x, Rotations.at(jnp.arange(LENGTH)[None], config))

    x = np.random.default_rng(seed).normal(0, 1, (1, LENGTH, WIDE["hidden_size"])).astype(np.float32)
    return jax.jit(project)(params, x)


def weights_of(table, params, kind):
    """The weights of attention in the only layer of a kind."""
    (stack,) = {path.split(".")[0] for path in table.infos if path.startswith(f"{kind}_moe_")}
    graph, state = nnx.split(getattr(table.bind(params), stack).attn)
    return nnx.merge(graph, jax.tree.map(lambda array: array[0], state))


@functools.cache
def programs(kind, requests, chunk, drafts, mesh, topk, kernels, windows, stored, scores, blocks):
    """Compiled programs of a layer, cached by its sizes: attention to the cache, and the same after writing to it."""
    config, table, _ = model(topk, blocks)
    spec = MeshSpec.parse(mesh)
    made = Compressed(spec.build(), Rules.for_mesh(spec), config, stored, drafts, kernels, scores)
    layer = jnp.int32(KINDS[kind])
    shape = GroupShape(requests, chunk, CONTEXT, FORMS["A_CC_ME"], windows)

    def attend(params, cache, p, group, filled=None):
        context, ring = jnp.split(group.tables, [CONTEXT], axis=-1)
        rows = Rows(group.positions, context, group.length, filled, ring)
        return made.attend(weights_of(table, params, kind), FORMS["A_CC_ME"], cache, layer, None, rows, p)

    def step(params, cache, p, group):
        flat = jax.tree.map(lambda a: a.reshape(len(a), -1, *a.shape[3:]), p)
        slots = flatten([group.window_slots(T)])
        tokens = Tokens([group], slots, flatten([group.active]), slots, Rotations.at(slots, config), None, slots)
        cache = made.cache_entries(weights_of(table, params, kind), cache, layer, tokens, flat)
        return attend(params, cache, p, group), cache

    return shape, jax.jit(attend), jax.jit(step)


class Layer:
    """One layer of a tiny model with its cache on a mesh, whose rows are requests with pages of their own."""

    def __init__(
        self,
        kind,
        requests=1,
        *,
        drafts=0,
        mesh="dp=1",
        topk=16,
        kernels=PLAIN,
        windows=WINDOWS,
        stored=np.float32,
        scores=IndexScores(),
        blocks=False,
    ):
        self.config, self.table, params = model(topk, blocks)
        spec = MeshSpec.parse(mesh)
        self.mesh, self.rules, self.kind = spec.build(), Rules.for_mesh(spec), kind
        stored = np.dtype(stored)
        family = Compressed(self.mesh, self.rules, self.config, stored, drafts, index_scores=scores)
        self.groups, self.layer = family.groups(range(3), T), KINDS[kind]
        self.sizes = drafts, mesh, topk, kernels, windows, stored, scores, blocks
        self.ranks, self.requests, self.windows = spec.dp_size, requests, windows
        infos = self.table.infos
        self.params = {
            p: jax.device_put(v, self.rules.sharding(self.mesh, infos[p].logical_axes, v.shape))
            for p, v in params.items()
        }
        # Page 0 of either kind is nobody's: what is written nowhere may be written there.
        pages = {"context": requests * CONTEXT + 1, "window": requests * self.windows + 1}
        own = P(None, spec.batch_axes)
        self.cache = {
            name: jax.device_put(
                np.zeros((len(group.layers), self.ranks * pages[group.table], group.entries, *shape), dtype),
                NamedSharding(self.mesh, own),
            )
            for group in self.groups
            for name, (shape, dtype) in group.arrays.items()
        }
        numbers = np.arange(requests)[:, None]
        tables = (
            np.concatenate(
                [numbers * CONTEXT + np.arange(CONTEXT), numbers * self.windows + np.arange(self.windows)], axis=1
            )
            + 1
        )
        self.tables = np.broadcast_to(tables.astype(np.int32), (self.ranks, *tables.shape))

    def run(self, p, start, length, *, writes=True, filled=None):
        """Write and attend: tokens ``[ranks, requests, C, …]`` of ``p`` from ``start`` on, of which ``length`` are no padding."""
        C = p.entry.shape[2]
        shape, attend, step = programs(self.kind, self.requests, C, *self.sizes)
        start, length = (np.broadcast_to(np.asarray(a, np.int32), (self.ranks, self.requests)) for a in (start, length))
        group = RowGroup(np.zeros((self.ranks, self.requests, C), np.int32), start, length, self.tables, shape)
        if not writes:
            return np.asarray(attend(self.params, self.cache, p, group, filled))
        out, self.cache = step(self.params, self.cache, p, group)
        return np.asarray(out)

    def feed(self, p, starts, lengths, C=LENGTH, **options):
        """``run`` of tokens of one sequence's ``p``, ``[1, S, …]``, the same for every rank; a row each."""
        at = np.clip(np.asarray(starts)[:, None] + np.arange(C), 0, p.entry.shape[1] - 1)
        part = jax.tree.map(lambda a: jnp.broadcast_to(a[0][at], (self.ranks, *at.shape, *a.shape[2:])), p)
        return self.run(part, starts, lengths, **options)

    def own(self, request):
        """The arrays of one request of the first rank, of this layer."""
        found = {}
        for group in self.groups:
            if self.layer not in group.layers:
                continue
            tables = (
                self.tables[0, request, :CONTEXT] if group.table == "context" else self.tables[0, request, CONTEXT:]
            )
            for name in group.arrays:
                found[name] = np.asarray(self.cache[name])[group.layers.index(self.layer), tables]
        return found


@functools.cache
def whole(kind, topk=16, kernels=PLAIN, blocks=False, **options):
    """A layer after one prompt of all tokens, its outputs and what it attended with."""
    layer = Layer(kind, topk=topk, kernels=kernels, blocks=blocks, **options)
    p = projected(kind, topk=topk, blocks=blocks)
    return layer, layer.feed(p, [0], [LENGTH])[0, 0], p
