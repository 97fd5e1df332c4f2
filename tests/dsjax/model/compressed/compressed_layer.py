"""One layer of a tiny DeepSeek-V4 with its paged cache, of arrays: what the tests of `Compressed` write to and attend with."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from step_model import empty_groups, on_mesh
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
        self, kind, requests=1, *, drafts=0, mesh="dp=1", topk=16, kernels=PLAIN, windows=WINDOWS, stored=np.float32,
        scores=IndexScores(), blocks=False,
    ):  # fmt: skip
        self.config, self.table, params = model(topk, blocks)
        spec = MeshSpec.parse(mesh)
        self.mesh, self.rules, self.kind = spec.build(), Rules.for_mesh(spec), kind
        stored = np.dtype(stored)
        family = Compressed(self.mesh, self.rules, self.config, stored, drafts, index_scores=scores)
        self.groups, self.layer = family.groups(range(3), T), KINDS[kind]
        self.sizes = drafts, mesh, topk, kernels, windows, stored, scores, blocks
        self.ranks, self.requests, self.windows = spec.dp_size, requests, windows
        self.params = on_mesh(self.mesh, self.rules, self.table.infos, params)
        # Page 0 of either kind is nobody's: what is written nowhere may be written there.
        counts = {"context": CONTEXT, "window": windows}
        pages = {kind: self.ranks * (requests * count + 1) for kind, count in counts.items()}
        self.cache = empty_groups(self.groups, pages, NamedSharding(self.mesh, P(None, spec.batch_axes)))
        own = [1 + np.arange(requests * count).reshape(requests, count) for count in counts.values()]
        tables = np.concatenate(own, axis=1).astype(np.int32)
        self.tables = np.broadcast_to(tables, (self.ranks, *tables.shape))

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
        part = jax.tree.map(lambda a: np.broadcast_to(np.asarray(a)[0, at], (self.ranks, *at.shape, *a.shape[2:])), p)
        return self.run(part, starts, lengths, **options)

    def own(self, request):
        """The arrays of one request of the first rank, of this layer."""
        context, window = np.split(self.tables[0, request], [CONTEXT])
        tables = {"context": context, "window": window}
        return {
            name: np.asarray(self.cache[name])[group.layers.index(self.layer), tables[group.table]]
            for group in self.groups
            if self.layer in group.layers
            for name in group.arrays
        }


@functools.cache
def whole(kind, topk=16, kernels=PLAIN, blocks=False, **options):
    """A layer after one prompt of all tokens, its outputs and what it attended with."""
    layer = Layer(kind, topk=topk, kernels=kernels, blocks=blocks, **options)
    p = projected(kind, topk=topk, blocks=blocks)
    return layer, layer.feed(p, [0], [LENGTH])[0, 0], p


def assert_chunks_give_the_bits_of_the_whole(kind, sizes, **options):
    """Feed a prompt in chunks of these sizes. Chunks of one token run another program, that of decodes."""
    reference, expected, p = whole(kind, **options)
    layer, start = Layer(kind, **options), 0
    for size in sizes:
        found = layer.feed(p, [start], [size], 1 if size == 1 else LENGTH)
        np.testing.assert_array_equal(found[0, 0, :size], expected[start : start + size])
        start += size
    assert start == LENGTH
    jax.tree.map(np.testing.assert_array_equal, layer.own(0), reference.own(0))


def assert_rejected_drafts_leave_no_trace(kind, **options):
    _, expected, p = whole(kind, **options)
    layer, wrong = Layer(kind, drafts=3, **options), projected(kind, seed=1, blocks=options.get("blocks", False))
    layer.feed(p, [0], [120])
    # At 120 a token and three drafts, of which one is right; then from 122 on the right ones, over the states of the wrong.
    mixed = jax.tree.map(lambda right, other: jnp.concatenate([right[:, :122], other[:, 122:]], axis=1), p, wrong)
    np.testing.assert_array_equal(layer.feed(mixed, [120], [4], 4)[0, 0, :2], expected[120:122])
    for start in range(122, 140, 4):
        np.testing.assert_array_equal(layer.feed(p, [start], [4], 4)[0, 0], expected[start : start + 4])


MESHES = pytest.mark.parametrize(("kind", "mesh"), [("window", "tp=4"), ("csa", "dp=2,tp=4"), ("hca", "dp=2")])


def assert_a_mesh_gives_the_same_bits(kind, mesh, **options):
    _, expected, p = whole(kind, **options)
    for rank in Layer(kind, mesh=mesh, **options).feed(jax.tree.map(np.asarray, p), [0], [LENGTH]):
        np.testing.assert_array_equal(rank[0], expected)
