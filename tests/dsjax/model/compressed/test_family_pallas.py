"""Attention over a paged cache by the Pallas kernels, run by their interpreter, gives what the plain form gives."""

import numpy as np
import pytest
from test_family import KINDS, LENGTH, Layer, T, whole

from dsjax.kernels.table import choose_kernels

pytestmark = pytest.mark.slow  # all together
PALLAS = choose_kernels("pallas", "cpu", np.dtype(np.float32), devices=1, cache=None)


@pytest.mark.parametrize(("kind", "topk", "mesh"), [("window", 16, "tp=2"), ("csa", 16, "dp=1"), ("hca", 16, "dp=2")])
def test_a_prompt_in_chunks_and_a_decode_give_what_the_plain_form_gives(kind, topk, mesh):
    _, expected, p = whole(kind, topk)
    layer, start = Layer(kind, mesh=mesh, topk=topk, kernels=PALLAS, windows=3), 0
    for size in (T, T, LENGTH - 2 * T - 1, 1):
        found = layer.feed(p, [start], [size], T if size > 1 else 1)
        for rank in found:
            np.testing.assert_allclose(rank[0, :size], expected[start : start + size], atol=2e-6, rtol=1e-5)
        start += size


def test_a_table_of_few_entries_is_read_in_order():
    _, expected, p = whole("csa", 96)
    found = Layer("csa", topk=96, kernels=PALLAS).feed(p, [0], [LENGTH])[0, 0]
    np.testing.assert_allclose(found, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_gives_zeros_and_changes_no_other_row(kind):
    _, expected, p = whole(kind)
    layer = Layer(kind, 2, kernels=PALLAS)
    found = layer.feed(p, [0, 0], [5, 0], 8)[0]
    np.testing.assert_allclose(found[0, :5], expected[:5], atol=2e-6, rtol=1e-5)
    assert not found[0, 5:].any()
    assert not found[1].any()
