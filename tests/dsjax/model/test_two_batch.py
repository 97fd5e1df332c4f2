"""A step in two halves gives what the whole step gives; what runs beside its exchanges, ``tests/dsjax/dryrun/test_topology.py`` holds."""

import dataclasses
import functools

import numpy as np
import pytest
from layouts import TINY
from step_model import Model

from dsjax.config import ModelConfig
from dsjax.model.micro_batches import TwoBatchOverlap
from dsjax.model.rows import GroupShape
from dsjax.model.two_batch import _beside

ALWAYS = TwoBatchOverlap(1, 1)
CONFIG = ModelConfig.from_dict(TINY)


def answers(model: Model):
    """Logits of every token of two steps of one program: two prompts on each rank, then a piece of one beside a decode of the other."""
    draw = np.random.default_rng(0)
    tokens = lambda n: draw.integers(1, 40, n).tolist()  # noqa: E731
    prefill, decode = model.step.prefill_form, model.step.decode_form

    def groups(prompts=(), decodes=(), further=()):
        shapes = ((2, 6), prefill, prompts), ((3, 1), decode, decodes), ((1, 6), prefill, further)
        return [(shape, form, [rows] * model.ranks) for shape, form, rows in shapes]

    prompts = groups(prompts=[(tokens(6), 0, [1, 2, 5]), (tokens(4), 0, [6, 7, 8])])
    first, cache = model.run(model.empty_cache(), prompts)
    # A row alone is cut.
    second, _ = model.run(cache, groups(decodes=[(tokens(1), 4, [6, 7, 8])], further=[(tokens(5), 6, [1, 2, 5])]))
    return first, second, model.reports


@pytest.fixture(scope="module")
def whole():
    """``whole(mesh, **options)``: a model that computes whole steps, and its answers, made once."""

    @functools.cache
    def of(mesh, **options):
        model = Model(mesh, CONFIG, report=True, **options)
        return model.step.is_exact, *answers(model)

    return of


@pytest.mark.slow  # all together
@pytest.mark.parametrize(
    ("mesh", "dispatch", "chunk", "options"),
    [
        ("dp=2,tp=2,ep=2", "ragged", 2, {"kernels": "plain"}),
        ("dp=4", "hierarchical", None, {"dispatch_wire": "fp8"}),
        ("dp=4", "padded", None, {"dispatch_wire": "fp8"}),
    ],
)
def test_halves_give_what_the_whole_gives(mesh, dispatch, chunk, options, whole):
    exact, *expected, counted = whole(mesh, dispatch="padded", **options)
    halves = Model(mesh, CONFIG, report=True, dispatch=dispatch, moe_chunk_tokens=chunk, **options)
    # A queue of more than two rows takes further rounds, which both halves run together.
    small_queues = dataclasses.replace(halves.step.dispatch, capacity=2, devices_per_host=2)
    halves.step = dataclasses.replace(halves.step, overlap=ALWAYS, dispatch=small_queues)
    *found, counts = answers(halves)
    for one, other in zip(expected, found, strict=True):
        # Without native kernels, products of other numbers of rows add in another order.
        np.testing.assert_allclose(other, one, atol=0 if exact else 2e-5, rtol=0)
    # Every pair is computed once, of every layer; and each layer had two exchanges of each.
    np.testing.assert_array_equal(counts["tokens_per_expert"].sum((1, 2)), counted["tokens_per_expert"].sum((1, 2)))
    assert (counts["rounds"] >= 2).all()
    assert (counts["rounds"] > 2).any() or dispatch not in ("padded", "hierarchical")


def test_the_shapes_of_a_step_decide_whether_it_is_halved():
    overlap = TwoBatchOverlap(decode_tokens=32, prefill_tokens=512, decode_chunk=3)
    assert overlap.halves([GroupShape(32, 1, 4, "A_CC_ME")])
    assert not overlap.halves([GroupShape(31, 1, 4, "A_CC_ME")])
    assert overlap.halves([GroupShape(11, 3, 4, "A_CC_ME")]), "rows with drafts are decodes"
    assert not overlap.halves([GroupShape(64, 1, 4, "A_CC_ME"), GroupShape(1, 256, 4, "CC")]), "it has prompts"
    assert overlap.halves([GroupShape(64, 1, 4, "A_CC_ME"), GroupShape(1, 448, 4, "CC")])


@pytest.mark.parametrize("number", [1, 2, 3])
def test_every_exchange_and_both_works_run_once(number):
    stages = [lambda x, digit=digit: 10 * x + digit for digit in range(1, number + 1)]
    works = tuple(lambda value, cache, digit=digit: (10 * value + digit, cache + 1) for digit in (7, 8))
    assert [*map(int, _beside(stages, 0, works, 0, 0))] == [int("123"[:number]), 78, 2]
