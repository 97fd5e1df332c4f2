"""What the sweep over layouts says of runs that differ because of a rounding edge."""

import numpy as np
import pytest
from layouts import Answer
from rounding_edges import Edges, nearest_edge

from dsjax.model.fp8_product import ActivationScheme
from sharding import fp8

# The scale is 1; 6.75 is the edge between 6.5 and 7, of which rounding takes the even one.
ROW = np.array([[448.0, 6.75, 3.0]], np.float32)
ABOVE, BELOW = ROW * 1, np.nextafter(ROW, 0, where=ROW == 6.75, out=ROW.copy())


def run_of(row):
    """A run of which the logits are a row as an FP8 product reads it, eight times so large."""

    def make(**kept):
        assert kept.keys() == {"activation_scheme", "kv_cache_dtype"}
        values, scales = ActivationScheme(dynamic=True).quantise(row)
        return Answer(8 * fp8.dequantise(values, scales), [[3]])

    return make


def edges_of(row):
    return Edges(run_of(row), {"activation_scheme": "dynamic", "kv_cache_dtype": "fp8"})


def test_values_about_an_edge_are_told_from_values_that_differ():
    quantise = fp8.quantise, ActivationScheme.quantise
    on_an_edge, why = edges_of(ABOVE).explain(run_of(BELOW), "differ")
    assert on_an_edge
    assert why.startswith("differ; without rounding to FP8 equal")
    assert "6.75" in why
    assert "become 6.5 and 7" in why
    differs, why = edges_of(ABOVE).explain(run_of(ROW + 1), "differ")
    assert not differs
    assert "without rounding to FP8 logits differ" in why
    assert (fp8.quantise, ActivationScheme.quantise) == quantise


def test_the_edge_is_that_of_the_nearest_blocks_and_not_of_what_follows_from_them():
    block = np.zeros((2, fp8.BLOCK), np.float32)
    block[0, :3], block[1, :3] = ABOVE[0], [448, 100, 30]
    other = block.copy()
    other[0, :3], other[1, :3] = BELOW[0], [448, 120, 40]
    assert nearest_edge(other, block).startswith("2 of 2 blocks")
    assert "the edge 6.75" in nearest_edge(other, block)
    assert "each block has the FP8 numbers" in nearest_edge(block, block)


@pytest.mark.parametrize("powers", [False, True])
def test_without_rounding_a_product_reads_what_was_given(powers):
    x = np.array([[0.3, -5.1, 77.7]], np.float32)

    def make(**kept):
        assert kept == {"weights": "fp8", "kv_cache_dtype": "auto"}
        return Answer(fp8.dequantise(*ActivationScheme(dynamic=True, powers=powers).quantise(x)), [[3]])

    kept = {"weights": "fp8", "kv_cache_dtype": "fp8"}
    np.testing.assert_allclose(Edges(make, kept).unrounded(make).logits, x, rtol=3e-7)
