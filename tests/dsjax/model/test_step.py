"""The step: groups, padding and idle ranks change nothing that is not theirs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from goldens.our_model import COMPILE_QUICKLY, bound, hf_tensors, logits_of
from goldens.random_weights import RandomWeights
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import TINY

from dsjax.checkpoint.load import from_hf_tensors
from dsjax.config import ModelConfig
from dsjax.engine.device import cache as device_cache
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.assembly import make_step
from dsjax.engine.setup.loading import materialise
from dsjax.model.forms import cache_arrays
from dsjax.model.rows import GroupShape, RowGroup, unpack
from sharding import MeshSpec, fp8

# Every expert of the layer is used, so that rounding to bf16 cannot change the choice of experts.
SMALL = TINY | {"num_hidden_layers": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4}
CONFIG = ModelConfig.from_dict(SMALL)
G, PAGES, TABLE = 4, 12, 5  # slots of a page, pages of a rank, pages of a row's table
PREFILL, DECODE = (2, 6), (2, 1)  # rows and chunk


@functools.cache
def tensors():
    return hf_tensors(CONFIG, RandomWeights(3, bias_center=-0.2))


class Model:
    """A tiny model on a mesh, and its cache as one array after the other."""

    def __init__(self, mesh="dp=2", report=False, **options):
        spec = MeshSpec.parse(mesh)
        args = EngineArgs(mesh=mesh, page_size=G, **({"dtype": "float32"} | options))
        self.step = make_step(args, CONFIG, spec, spec.build())
        if report:
            self.step = dataclasses.replace(self.step, dispatch=dataclasses.replace(self.step.dispatch, report=True))
        weights = "f32" if self.step.dtype == np.float32 else "bf16"
        host = from_hf_tensors(CONFIG, tensors(), weights=weights, mtp=False)
        infos, rules, on = self.step.table.infos, self.step.rules, self.step.mesh
        params = {
            path: jax.device_put(value, rules.sharding(on, infos[path].logical_axes, value.shape))
            for path, value in host.items()
        }
        self.params = materialise(self.step, params)
        self.ranks = spec.dp_size
        self.rows = NamedSharding(on, P(spec.batch_axes))
        self._programs = {}

    def empty_cache(self):
        return {
            name: jax.device_put(np.zeros(array.shape, array.dtype), array.sharding)
            for name, array in device_cache.describe(self.step, PAGES).items()
        }

    def run(self, cache, groups, every_token=False):
        """Logits and cache of a step over ``groups``: ``(kind, rows by rank)``, a row ``(tokens, start, pages)``."""
        shapes, parts = [], []
        for (rows, chunk), form, by_rank in groups:
            shapes.append(GroupShape(rows, chunk, TABLE, form))
            lead = (self.ranks, rows)
            # Padding's tables name pages that are in use: a write that is not dropped would be seen.
            token, start, length = np.ones((*lead, chunk)), np.zeros(lead), np.zeros(lead)
            table = np.full((*lead, TABLE), 3)
            for rank, own in enumerate(by_rank):
                for i, (tokens, first, pages) in enumerate(own):
                    token[rank, i, : len(tokens)], start[rank, i], length[rank, i] = tokens, first, len(tokens)
                    table[rank, i] = [*pages, *[0] * (TABLE - len(pages))]
            parts.append(RowGroup.pack(*(a.astype(np.int32) for a in (token, start, length, table))))
        key = (tuple(shapes), every_token)
        if key not in self._programs:
            copies = self.step.placement.tables

            def run(params, cache, packed):
                parts = unpack(packed, key[0])
                hidden, cache, reports = self.step.hidden(params, cache, parts, copies)
                return self.step.logits(params, hidden if every_token else last_tokens(hidden, parts)), cache, reports

            self._programs[key] = jax.jit(run, compiler_options=COMPILE_QUICKLY)
        packed = jax.device_put(np.concatenate(parts, axis=1), self.rows)
        logits, cache, self.reports = jax.block_until_ready(self._programs[key](self.params, cache, packed))
        return np.asarray(logits), cache

    def prefill(self, *by_rank):
        return (PREFILL, self.step.prefill_form, by_rank)

    def decode(self, *by_rank):
        return (DECODE, self.step.decode_form, by_rank)


def last_tokens(x, groups):
    """Each row's last active token ``[B, R, D]``; its first slot where the row is padding."""
    indices, start = [], 0
    for group in groups:
        first = start + jnp.arange(group.shape.rows) * group.shape.chunk
        indices.append(first + jnp.maximum(group.length - 1, 0))
        start += group.shape.tokens
    return jnp.take_along_axis(x, jnp.concatenate(indices, axis=1)[..., None], axis=1)


@functools.cache
def model(mesh="dp=2", **options):
    return Model(mesh, **options)


def tokens_of(length, seed):
    return np.random.default_rng(seed).integers(2, CONFIG.vocab_size, size=length).tolist()


FIRST, SECOND = tokens_of(6, 0), tokens_of(5, 1)
FIRST_PAGES, SECOND_PAGES = [1, 2], [5, 4]


def test_every_position_has_the_logits_of_the_model_without_cache():
    one = model()
    logits, _ = one.run(one.empty_cache(), [one.prefill([(FIRST, 0, FIRST_PAGES)], [(SECOND, 0, SECOND_PAGES)])], True)
    for rank, tokens in enumerate((FIRST, SECOND)):
        reference = logits_of(CONFIG, tensors(), np.array([tokens]))[0]
        assert np.abs(logits[rank, : len(tokens)] - reference).max() <= bound(reference)


def test_the_last_tokens_logits_are_those_of_every_token_there(kernels):
    one = model()
    group = one.prefill([(FIRST, 0, FIRST_PAGES), (SECOND, 0, SECOND_PAGES)], [])
    every, _ = one.run(one.empty_cache(), [group], True)
    last, _ = one.run(one.empty_cache(), [group])
    np.testing.assert_array_equal(last[0, 0], every[0, 5])
    np.testing.assert_array_equal(last[0, 1], every[0, 6 + 4])


def test_groups_in_one_step_give_what_they_give_in_steps_of_their_own(kernels):
    one = model()
    _, cache = one.run(one.empty_cache(), [one.prefill([(FIRST, 0, FIRST_PAGES)], [])])
    decode = one.decode([([7], 6, FIRST_PAGES)], [])
    prefill = one.prefill([], [(SECOND, 0, SECOND_PAGES)])
    decoded, after_decode = one.run(cache, [decode])
    prefilled, after_both = one.run(after_decode, [prefill])
    mixed, after_mixed = one.run(cache, [decode, prefill])
    np.testing.assert_array_equal(mixed[0, 0], decoded[0, 0])
    np.testing.assert_array_equal(mixed[1, 2], prefilled[1, 0])
    for name in cache:
        np.testing.assert_array_equal(after_mixed[name], after_both[name])
        assert np.any(np.asarray(after_mixed[name]) != np.asarray(cache[name]))


def test_a_rank_gets_the_same_logits_whether_the_other_is_idle_or_busy(kernels):
    one = model()
    alone, _ = one.run(one.empty_cache(), [one.prefill([(FIRST, 0, FIRST_PAGES)], [])])
    beside, _ = one.run(one.empty_cache(), [one.prefill([(FIRST, 0, FIRST_PAGES)], [(SECOND, 0, SECOND_PAGES)] * 2)])
    np.testing.assert_array_equal(alone[0, 0], beside[0, 0])
    assert np.all(np.isfinite(alone[1]))


# One layout each, and both that decode with one form and prefill with another.
CACHES = {
    "split": {},
    "split, bf16": {"kv_cache_dtype": "bfloat16"},
    "split, fp8": {"kv_cache_dtype": "fp8"},
    "joined": {"mla_prefill": "A_CC", "mla_decode": "A_CC"},
    "decompressed": {"mla_prefill": "CD", "mla_decode": "CD"},
}


@pytest.mark.parametrize("name", CACHES)
def test_a_step_writes_its_active_tokens_slots_and_no_other_byte(name):
    one = model(**CACHES[name])
    rng = np.random.default_rng(5)
    shardings = jax.tree.map(lambda array: array.sharding, one.empty_cache())
    before, kept = {}, cache_arrays(one.step.attention.layout, CONFIG, one.step.cache_dtype)
    for key, array in one.empty_cache().items():
        values = rng.normal(size=array.shape).astype(kept[key][1])
        before[key] = values.view(array.dtype)
    groups = [
        one.decode([([7], 4, [9, 8])], []),
        one.prefill(
            [(FIRST[:3], 2, [1, 2])], [(SECOND, 0, [5, 4])]
        ),  # a row that is shorter than the chunk, one padding row
    ]
    written = {(0, 8, 0), (0, 1, 2), (0, 1, 3), (0, 2, 0)}  # rank, page, offset
    written |= {(1, 5, offset) for offset in range(G)} | {(1, 4, 0)}
    _, after = one.run(jax.device_put(before, shardings), groups)
    for key, array in before.items():
        changed = np.any(np.asarray(after[key]) != array, axis=tuple(range(3, array.ndim)))
        for layer in range(CONFIG.num_hidden_layers):
            found = {
                (int(page) // PAGES, int(page) % PAGES, int(offset)) for page, offset in np.argwhere(changed[layer])
            }
            assert found == written, key


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        # bf16 has 8 bits: a rounding moves a value by at most 2⁻⁹ of itself, 0.2 %. Cached latents are rounded once;
        ({"kv_cache_dtype": "bfloat16"}, 1e-2),
        # e4m3 has 4 bits: a rounding moves a value by at most 2⁻⁴ of its block's largest one;
        ({"kv_cache_dtype": "fp8"}, 1e-1),
        # in bf16 throughout, weights and some ten activations of each layer are rounded, and their errors add up.
        ({"dtype": "bfloat16"}, 5e-2),
    ],
    ids=["bf16 cache", "fp8 cache", "bf16 compute"],
)
def test_fewer_bits_stay_close_to_float32(options, tolerance):
    def logits(one):
        groups = [one.prefill([(FIRST, 0, FIRST_PAGES)], [(SECOND, 0, SECOND_PAGES)])]
        _, cache = one.run(one.empty_cache(), groups)
        return one.run(cache, [one.decode([([7], 6, FIRST_PAGES)], [([8], 5, SECOND_PAGES)])])[0][:, 0]

    exact, rounded = logits(model()), logits(model(**options))
    difference = np.abs(rounded - exact).max() / np.abs(exact).max()
    assert 0 < difference <= tolerance


def test_an_fp8_cache_holds_the_rounded_entries_and_every_form_reads_them_alike():
    def prefilled(one):
        groups = [one.prefill([(FIRST, 0, FIRST_PAGES)], [(SECOND, 0, SECOND_PAGES)])]
        return one.run(one.empty_cache(), groups)[1]

    exact, kept = prefilled(model()), prefilled(model(kv_cache_dtype="fp8"))
    values, scale = fp8.quantise(exact["latent"][0])
    # The first layer's entries do not depend on the cache: they are the very ones, rounded.
    np.testing.assert_array_equal(np.asarray(kept["latent"][0]).view(fp8.E4M3), np.asarray(values))
    np.testing.assert_array_equal(np.where(kept["scale"][0] == 0, 1, kept["scale"][0]), scale)
    rope = np.asarray(kept["rope"][0]).view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(rope, np.asarray(exact["rope"][0]).astype(rope.dtype))

    held, found = {name: np.asarray(array) for name, array in kept.items()}, {}
    for form in ("CC", "A_CC_ME", "AM_CC_ME"):
        one = model(kv_cache_dtype="fp8", mla_decode=form, kernels="plain")
        cache = {name: jax.device_put(held[name], array.sharding) for name, array in one.empty_cache().items()}
        found[form] = one.run(cache, [one.decode([([7], 6, FIRST_PAGES)], [([8], 5, SECOND_PAGES)])])[0][:, 0]
    largest = np.abs(found["CC"]).max()
    for form, logits in found.items():
        # A last bit of float32 may turn the rounding of the decoded token's own entry.
        assert np.abs(logits - found["CC"]).max() <= 1e-2 * largest, form


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ((0, 6), [[4, 5, 6, 7, 8, 9], [-1] * 6]),  # pages 1 and 2
        ((3, 2), [[7, 8, -1, -1, -1, -1], [-1] * 6]),
        ((18, 1), [[22, -1, -1, -1, -1, -1], [-1] * 6]),  # the last page of the table
    ],
)
def test_tokens_go_to_the_slots_of_their_pages_and_padding_to_none(positions, expected):
    start, length = positions
    shape = GroupShape(2, 6, TABLE, "CC")
    tables = np.array([[[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]])
    fields = np.zeros((1, 2, 6), int), np.array([[start, 0]]), np.array([[length, 0]]), tables
    packed = RowGroup.pack(*fields)
    assert packed.shape == (1, shape.packed_width)
    assert packed.dtype == np.int32
    group = RowGroup.unpack(jax.numpy.asarray(packed), shape)
    np.testing.assert_array_equal(group.slots(G)[0], expected)
    for name, value in zip(("tokens", "start", "length", "tables"), fields, strict=True):
        np.testing.assert_array_equal(getattr(group, name), value)


def test_reports_count_every_token_of_every_moe_layer_and_no_padding():
    one = model(mesh="dp=2", report=True, dispatch="padded")
    one.run(one.empty_cache(), [one.prefill([(FIRST, 0, FIRST_PAGES)], [(SECOND, 0, SECOND_PAGES)])])
    pairs = (len(FIRST) + len(SECOND)) * CONFIG.num_experts_per_tok
    assert np.asarray(one.reports["tokens_per_expert"]).sum() == pairs * CONFIG.num_moe_layers
    assert set(np.asarray(one.reports["rounds"]).ravel().tolist()) == {1}


def test_an_fp8_wire_moves_logits_by_its_rounding_only():
    exact, rounded = model(mesh="dp=2"), model(mesh="dp=2", dispatch="padded", dispatch_wire="fp8")
    found = []
    for one in (exact, rounded):
        found.append(
            one.run(one.empty_cache(), [one.prefill([(FIRST, 0, FIRST_PAGES)], [(SECOND, 0, SECOND_PAGES)])])[0]
        )
    # e4m3 has 3 mantissa bits: values are off by up to 2⁻⁴ of themselves, sums of many by a small part of that.
    difference = np.abs(found[0][:, 0] - found[1][:, 0]).max()
    assert 0 < difference <= 2**-4 * np.abs(found[0][:, 0]).max()


@pytest.mark.parametrize(
    ("mesh", "options", "load"),
    [
        ("dp=8", {}, 8 * 4 / 32 * 8),  # 8 ranks of 8 tokens, 4 experts each, of 32
        ("dp=8,ep=2", {}, 2 * 8 * 4 / 32),  # a copy of the experts sees the tokens of its own two ranks
        ("dp=2,tp=4", {}, 2 * 8 * 4 / 32),  # a replica's tokens are split over its devices, not repeated
        ("dp=8", {"moe_chunk_tokens": 2}, 8 * 2 * 4 / 32),
        ("tp=8,ep=1", {}, 8 * 4 / 32),  # each device has a part of every expert, for which it sees all tokens
        ("dp=8,ep=2,etp=2", {}, 4 * 8 * 4 / 32),  # and here those of all ranks that share a copy of the experts
    ],
)
def test_the_expert_product_is_chosen_for_the_pairs_that_even_routing_brings(mesh, options, load):
    spec = MeshSpec.parse(mesh)
    step = make_step(EngineArgs(mesh=mesh, **options), ModelConfig.from_dict(TINY), spec, spec.build())
    assert step.experts.mean_load(8 * spec.dp_size) == load
