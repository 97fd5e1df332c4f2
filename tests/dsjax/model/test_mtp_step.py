"""The MTP module against the paged cache gives what it gives on whole sequences, and holes in its cache are not seen."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from goldens.our_model import COMPILE_QUICKLY, bound
from layouts import TINY
from step_model import PAGES, G, Model, pack_rows, tensors

from dsjax.checkpoint.load import from_hf_tensors
from dsjax.config import ModelConfig
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.assembly import make_step
from dsjax.errors import UserError
from dsjax.model import mtp
from dsjax.model.parameter_table import parameter_table
from dsjax.model.router import ExpertRouter, Routing
from dsjax.model.rows import GroupShape, unpack
from sharding import MeshSpec
from sharding.placement import CopyTables

SMALL = TINY | {"num_hidden_layers": 2, "n_routed_experts": 8, "num_experts_per_tok": 3, "num_nextn_predict_layers": 1}
CONFIG = ModelConfig.from_dict(SMALL)
D, MODULE = CONFIG.hidden_size, CONFIG.num_hidden_layers
ROWS, CHUNK, TABLE = 2, 4, 4  # TABLE: pages of a row's table


class Module(Model):
    """A tiny model with its MTP module on a mesh; one program serves prompts' chunks and decodes."""

    def __init__(self, mesh="dp=2", form="A_CC_ME", block_tokens=None, router=None, **changes):
        super().__init__(mesh, CONFIG, report=True, mtp=True, mla_prefill=form, mla_decode=form, router=router)
        self.step = dataclasses.replace(self.step, block_tokens=block_tokens, **changes)
        self.shape = GroupShape(ROWS, CHUNK, TABLE, self.step.decode_form)
        self.copies = self.step.placement.tables
        self._further = jax.jit(self._run_further, compiler_options=COMPILE_QUICKLY)
        self._main = jax.jit(self._run_main, compiler_options=COMPILE_QUICKLY)

    def _run_further(self, params, cache, filled, packed, hidden, next_tokens, copies):
        groups = unpack(packed, (self.shape,))
        return mtp.further(self.step, params, cache, filled, groups, hidden, next_tokens, copies)

    def _run_main(self, params, cache, packed, copies):
        return self.step.hidden(params, cache, unpack(packed, (self.shape,)), copies)

    def empty(self, seed=9):
        """A cache full of what was left behind, and of no slot a word that it is filled."""
        rng = np.random.default_rng(seed)
        full = lambda array: jax.device_put(rng.normal(size=array.shape).astype(array.dtype), array.sharding)  # noqa: E731
        cache = {name: full(array) for name, array in self.empty_cache().items()}
        return cache, jax.device_put(np.zeros((self.ranks * PAGES, G), bool), self.rows)

    def pack(self, rows):
        return jax.device_put(pack_rows((self.ranks, ROWS), CHUNK, TABLE, rows), self.rows)

    def further(self, cache, filled, rows, copies=None, params=None):
        """``{(rank, row): (hidden, next_tokens, start, pages)}`` → the module's states of each row, cache, filled."""
        # Padding has states and tokens too, and they must not matter.
        hidden = np.full((self.ranks, ROWS, CHUNK, D), 50, np.float32)
        next_tokens = np.full((self.ranks, ROWS, CHUNK), 5, np.int32)
        for at, (own, tokens, *_) in rows.items():
            hidden[at][: len(own)], next_tokens[at][: len(own)] = own, tokens
        flat = (a.reshape(self.ranks, ROWS * CHUNK, *a.shape[3:]) for a in (hidden, next_tokens))
        packed = self.pack({at: (np.zeros_like(row[1]), *row[2:]) for at, row in rows.items()})  # tokens are not read
        given = params or self.params, cache, filled, packed, *jax.device_put((*flat,), self.rows)
        out, cache, filled, self.reports = jax.block_until_ready(self._further(*given, copies or self.copies))
        out = self.every = np.asarray(out).reshape(self.ranks, ROWS, CHUNK, D)
        assert np.all(np.isfinite(out))
        return {at: out[at][: len(row[0])] for at, row in rows.items()}, cache, filled

    def main(self, cache, rows, copies=None):
        """``{(rank, row): (tokens, start, pages)}`` → the model's states of each row, and the cache."""
        out, cache, _ = self._main(self.params, cache, self.pack(rows), copies or self.copies)
        out = np.asarray(out).reshape(self.ranks, ROWS, CHUNK, D)
        return {at: out[at][: len(row[0])] for at, row in rows.items()}, cache


@functools.cache
def module(mesh="dp=2", form="A_CC_ME", block_tokens=None):
    return Module(mesh, form, block_tokens)


def assert_near(found, expected):
    assert np.abs(found - expected).max() <= bound(expected)


class ById(ExpertRouter):
    """Expert ``token mod E`` and those after it."""

    def choose(self, logits, tokens):
        ids = (tokens[..., None] + jnp.arange(self.config.num_experts_per_tok)) % self.config.n_routed_experts
        return Routing(ids, jnp.full(ids.shape, 0.5), logits)


@functools.cache
def dense_passes():
    """The model and the module on whole sequences."""
    table, params = parameter_table(CONFIG, weights="f32"), jax.device_put(from_hf_tensors(CONFIG, tensors(CONFIG)))

    quickly = functools.partial(jax.jit, compiler_options=COMPILE_QUICKLY)
    forward = quickly(lambda tokens: table.bind(params)(tokens).hidden)
    further = quickly(lambda hidden, tokens: table.bind(params).predict_further(hidden, tokens).hidden)
    return lambda t: np.asarray(forward(t[None])[0]), lambda h, t: np.asarray(further(h[None], t[None])[0])


class Sequence:
    """States and the tokens after them, and where their cache lies."""

    def __init__(self, seed, length, at, pages):
        rng = np.random.default_rng(seed)
        self.hidden = rng.normal(size=(length, D)).astype(np.float32)
        self.next_tokens = rng.integers(2, CONFIG.vocab_size, size=length)
        self.at, self.pages = at, pages

    def rows(self, start, end):
        return {self.at: (self.hidden[start:end], self.next_tokens[start:end], start, self.pages)}


@functools.cache
def sequences(ranks):
    """Two of unequal length, on the first and the last rank."""
    return Sequence(0, 11, (0, 0), [1, 2, 7]), Sequence(1, 6, (ranks - 1, 1), [5, 4])


# Every form, with the context in one block or in several, and with heads over two devices where a layout has heads.
CASES = [("dp=2", "CC", 4), ("dp=2", "A_CC", 4), ("dp=2", "A_CC_ME", None)]
CASES += [("dp=2,tp=2", "AM_CC_ME", 4), ("dp=2,tp=2", "CD", None)]


@pytest.mark.parametrize(("mesh", "form", "block"), CASES)
def test_chunks_of_a_prompt_and_decodes_of_several_tokens_are_the_module_on_the_whole(mesh, form, block):
    one = module(mesh, form, block)
    long, short = sequences(one.ranks)
    cache, filled = one.empty()
    found = {long.at: [], short.at: []}
    for rows in (
        long.rows(0, 4) | short.rows(0, 3),
        long.rows(4, 7) | short.rows(3, 4),
        long.rows(7, 8),  # the other rank is idle
        long.rows(8, 11) | short.rows(4, 6),
    ):
        states, cache, filled = one.further(cache, filled, rows)
        for at, own in states.items():
            found[at].append(own)
    for sequence in (long, short):
        assert_near(np.concatenate(found[sequence.at]), dense_passes()[1](sequence.hidden, sequence.next_tokens))


@pytest.mark.parametrize(("mesh", "form", "block"), CASES)
def test_holes_in_its_cache_are_not_seen(mesh, form, block):
    """Everything before the short one's last token is a hole, and so is the first block of the long one; later a place within it too."""
    one, further = module(mesh, form, block), dense_passes()[1]
    long, short = sequences(one.ranks)
    found = []
    for seed, start in ((9, 6), (9, 7), (10, 7)):  # the cache was full of something else
        _, cache, filled = one.further(*one.empty(seed), long.rows(4, 6))
        found.append(one.further(cache, filled, long.rows(start, 10) | short.rows(5, 6))[0])
    for sequence, first, start, end in ((long, 4, 6, 10), (short, 5, 5, 6)):
        expected = further(sequence.hidden[first:end], sequence.next_tokens[first:end])[start - first :]
        assert_near(found[0][sequence.at], expected)
        seen = further(sequence.hidden[:end], sequence.next_tokens[:end])[start:]
        assert np.abs(seen - expected).max() > 100 * bound(expected)
        np.testing.assert_array_equal(found[1][sequence.at], found[2][sequence.at])


def test_its_router_is_given_the_tokens_after_the_hidden_states():
    one = Module(router=ById)
    long, short = sequences(one.ranks)
    one.further(*one.empty(), long.rows(0, 3) | short.rows(0, 2))
    first = np.concatenate([long.next_tokens[:3], short.next_tokens[:2]])
    experts = (first[:, None] + np.arange(CONFIG.num_experts_per_tok)) % CONFIG.n_routed_experts
    counts = np.asarray(one.reports["tokens_per_expert"]).reshape(-1, CONFIG.n_routed_experts).sum(0)
    np.testing.assert_array_equal(counts, np.bincount(experts.ravel(), minlength=CONFIG.n_routed_experts))


def test_padding_stays_zeros_which_native_kernels_pass_over(kernels):
    """Ranks without a draft would else read the module's matrices and the head for nothing."""
    one, [long, _] = Module(kernels=kernels), sequences(2)
    one.further(*one.empty(), long.rows(0, 3))
    assert one.every.any(axis=-1).sum() == 3


def test_it_fills_its_tokens_slots_in_its_own_layer_and_no_other():
    one = module()
    long, short = sequences(one.ranks)
    before, filled = one.empty()
    _, after, filled = one.further(before, filled, long.rows(3, 6) | short.rows(4, 6))
    written = {(0, 1, 3), (0, 2, 0), (0, 2, 1), (1, 4, 0), (1, 4, 1)}  # rank, page, offset

    def places(marked):
        return {(int(page) // PAGES, int(page) % PAGES, int(offset)) for page, offset in np.argwhere(marked)}

    assert places(np.asarray(filled)) == written
    counts = np.asarray(one.reports["tokens_per_expert"])
    assert (counts.shape[0], counts.sum()) == (1, 5 * CONFIG.num_experts_per_tok), "its report counts no padding"
    for name, array in before.items():
        changed = np.any(np.asarray(after[name]) != np.asarray(array), axis=tuple(range(3, array.ndim)))
        assert [places(layer) for layer in changed] == [set()] * MODULE + [written]
    slots = jax.device_put(np.array([[2 * G, 1 * G + 3], [4 * G, -1]], np.int32), one.rows)
    left = jax.jit(lambda f, s: mtp.mark(one.step, f, s, False))(filled, slots)
    assert places(np.asarray(left)) == {(0, 2, 1), (1, 4, 1)}


@pytest.mark.slow
def test_it_drafts_on_from_the_models_states_and_from_its_own():
    one = module("dp=2,tp=2", "AM_CC_ME", 4)
    tokens, pages, at = np.array([7, 3, 60, 11, 28, 90, 14]), [1, 2], (0, 0)
    cache, filled = one.empty()
    states = []
    for start in (0, 4):
        found, cache = one.main(cache, {at: (tokens[:-1][start : start + 4], start, pages)})
        rows = {at: (found[at], tokens[1:][start : start + 4], start, pages)}
        drafted, cache, filled = one.further(cache, filled, rows)
        states.append(found[at])
    forward, further = dense_passes()
    hidden = forward(tokens[:-1])
    assert_near(np.concatenate(states), hidden)
    expected = further(hidden, tokens[1:])
    assert_near(drafted[at], expected[4:])
    # The next position has no state of the model yet: the module's own stands in, with its draft as the token after.
    again, cache, filled = one.further(cache, filled, {at: (drafted[at][-1:], [33], 6, pages)})
    assert_near(again[at], further(np.concatenate([hidden, expected[-1:]]), np.append(tokens[1:], 33))[-1:])


def test_the_modules_experts_have_the_last_row_of_the_placement_and_the_model_the_others(kernels):
    one = module()
    long, _ = sequences(one.ranks)
    rows = long.rows(0, 4)
    straight, *_ = one.further(*one.empty(), rows)
    names = [path for path in one.params if path.startswith("mtp.") and ".experts." in path]
    turned_params = one.params | {path: one.params[path][:, ::-1] for path in names}
    physical = one.copies.physical_EC.copy()
    physical[-1] = CONFIG.n_routed_experts - 1 - physical[-1]
    turned = CopyTables(physical, one.copies.copies_E)
    assert len(physical) == CONFIG.num_moe_layers + 1
    found, *_ = one.further(*one.empty(), rows, turned, turned_params)
    np.testing.assert_array_equal(found[long.at], straight[long.at])
    misplaced, *_ = one.further(*one.empty(), rows, turned)
    assert np.abs(misplaced[long.at] - straight[long.at]).max() > 1e-2
    prompt = {(0, 0): ([7, 8, 9], 0, [1])}
    models, _ = one.main(one.empty()[0], prompt)
    np.testing.assert_array_equal(one.main(one.empty()[0], prompt, turned)[0][0, 0], models[0, 0])


def test_a_model_without_a_module_is_refused_by_the_options_name():
    spec = MeshSpec.parse("dp=1")
    with pytest.raises(UserError, match=r"--speculative-config .*num_nextn_predict_layers is 0"):
        make_step(EngineArgs(), ModelConfig.from_dict(TINY), spec, spec.build(), mtp=True)
