"""A step in two halves gives what the whole step gives; what runs beside its exchanges, ``tests/dsjax/dryrun/test_topology.py`` holds."""

import dataclasses
import functools

import numpy as np
import pytest
import test_step
from layouts import TINY

from dsjax.config import ModelConfig
from dsjax.model.rows import GroupShape, RowGroup
from dsjax.model.two_batch import MicroBatches, TwoBatchOverlap, count_micro_batches

ALWAYS = TwoBatchOverlap(1, 1)
SMALL = TINY | {"num_hidden_layers": 3, "n_routed_experts": 32, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}


def answers(model: test_step.Model):
    """Logits of every token: two prompts on each rank, then a longer piece of one beside a decode of the other in three rows."""
    draw = np.random.default_rng(0)
    tokens = lambda n: draw.integers(1, 40, n).tolist()  # noqa: E731
    form, other = model.step.prefill_form, model.step.decode_form
    prompts = [[(tokens(6), 0, [1, 2, 5]), (tokens(4), 0, [6, 7, 8])] for _ in range(model.ranks)]
    further = [[(tokens(5), 6, [1, 2, 5])] for _ in range(model.ranks)]
    decodes = [[(tokens(1), 4, [6, 7, 8])] for _ in range(model.ranks)]
    first, cache = model.run(model.empty_cache(), [((2, 6), form, prompts)])
    second, _ = model.run(cache, [((3, 1), other, decodes), ((1, 6), form, further)])
    return first, second, model.reports


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(test_step, "CONFIG", ModelConfig.from_dict(SMALL))
    monkeypatch.setattr(test_step, "tensors", functools.cache(test_step.tensors.__wrapped__))


@pytest.mark.slow  # each compiles two models
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("dp=8", {"dispatch": "padded"}),
        ("dp=2,tp=4", {"dispatch": "ragged"}),
        ("dp=4,ep=2", {"dispatch": "padded", "dispatch_wire": "fp8"}),
        ("dp=4", {"dispatch": "hierarchical"}),
        ("dp=4", {"dispatch": "hierarchical", "kernels": "plain"}),
        ("dp=4", {"dispatch": "ragged", "moe_chunk_tokens": 2}),
        ("dp=4", {"dispatch": "gather"}),
    ],
)
def test_halves_give_what_the_whole_gives(mesh, options, small):
    whole = test_step.Model(mesh, report=True, **options)
    halves = test_step.Model(mesh, report=True, **options)
    # A queue of more than two rows takes further rounds, which both halves run together.
    small_queues = dataclasses.replace(halves.step.dispatch, capacity=2, devices_per_host=2)
    halves.step = dataclasses.replace(halves.step, overlap=ALWAYS, dispatch=small_queues)
    *expected, counted = answers(whole)
    *found, counts = answers(halves)
    for one, other in zip(expected, found, strict=True):
        # Without native kernels, products of other numbers of rows add in another order.
        np.testing.assert_allclose(other, one, atol=0 if whole.step.is_exact else 2e-5, rtol=0)
    # Every pair is computed once, of every layer; and each layer had two exchanges of each.
    np.testing.assert_array_equal(counts["tokens_per_expert"].sum((1, 2)), counted["tokens_per_expert"].sum((1, 2)))
    assert (counts["rounds"] >= 2).all()
    assert (counts["rounds"] > 2).any() or options.get("dispatch") not in ("padded", "hierarchical")


def test_the_shapes_of_a_step_decide_whether_it_is_halved():
    overlap = TwoBatchOverlap(decode_tokens=32, prefill_tokens=512, decode_chunk=3)
    assert overlap.halves([GroupShape(32, 1, 4, "A_CC_ME")])
    assert not overlap.halves([GroupShape(31, 1, 4, "A_CC_ME")])
    assert overlap.halves([GroupShape(11, 3, 4, "A_CC_ME")]), "rows with drafts are decodes"
    assert not overlap.halves([GroupShape(64, 1, 4, "A_CC_ME"), GroupShape(1, 256, 4, "CC")]), "it has prompts"
    assert overlap.halves([GroupShape(64, 1, 4, "A_CC_ME"), GroupShape(1, 448, 4, "CC")])


def test_every_second_row_goes_to_each_half_and_a_row_alone_is_cut():
    def group(rows, chunk, lengths):
        arrays = (
            np.zeros((1, rows, chunk)),
            np.full((1, rows), 7),
            np.array([lengths]),
            np.zeros((1, rows, test_step.TABLE)),
        )
        return RowGroup(*arrays, GroupShape(rows, chunk, test_step.TABLE, "CC"))

    groups = [group(3, 1, [1, 1, 0]), group(1, 5, [4]), group(1, 1, [1])]
    halves = MicroBatches.of(groups, 2)
    a, b = halves.groups
    assert [(one.shape.rows, one.shape.chunk) for one in a] == [(2, 1), (1, 3), (1, 1)]
    assert [(one.shape.rows, one.shape.chunk) for one in b] == [(1, 1), (1, 2)]
    assert halves.places.tolist() == [0, 2, 3, 4, 5, 8, 1, 6, 7]
    assert halves.borders == [6]
    assert np.asarray(b[1].start).item() == 7 + 3
    assert np.asarray(b[1].length).item() == 1
    assert np.asarray(a[1].length).item() == 3

    four = MicroBatches.of(groups, 4)
    assert [[(one.shape.rows, one.shape.chunk) for one in part] for part in four.groups] == [
        [(1, 1), (1, 2), (1, 1)],
        [(1, 1), (1, 1)],
        [(1, 1), (1, 1)],
        [(1, 1)],
    ]
    assert sorted(four.places.tolist()) == list(range(9))
    assert four.borders == [4, 6, 8]
    assert [np.asarray(part[-1].length).item() for part in four.groups[1:]] == [1, 1, 0]
    assert count_micro_batches([one.shape for one in groups], 4) == 4
    assert len(MicroBatches.of(groups[:1], 4).groups) == count_micro_batches([groups[0].shape], 4) == 3
