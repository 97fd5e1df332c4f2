"""Attention over a paged cache by the Pallas kernels, run by their interpreter."""

import jax.numpy as jnp
import numpy as np
import pytest
from compressed_layer import LENGTH, Layer, T, model, whole

from dsjax.kernels.table import Kernels, PallasKernels
from dsjax.model.compressed.family import Compressed
from dsjax.model.forms import FORMS
from dsjax.model.sparse import IndexScores
from sharding import MeshSpec
from sharding.rules import Rules

PALLAS = Kernels(pallas=PallasKernels(interpret=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "topk", "mesh"), [("window", 16, "tp=2"), ("csa", 16, "dp=1"), ("csa", 96, "tp=4"), ("hca", 16, "dp=2")]
)
def test_the_pallas_kernels_interpreted_give_what_the_plain_form_gives(kind, topk, mesh):
    """A prompt in chunks on a ring of window pages, a decode, and padding, which gives zeros."""
    _, expected, p = whole(kind, topk)
    layer, start = Layer(kind, mesh=mesh, topk=topk, kernels=PALLAS, windows=3), 0
    for size in (T, T, LENGTH - 2 * T - 1, 1):
        found = layer.feed(p, [start], [size], T if size > 1 else 1)
        for rank in found[:, 0]:
            assert np.abs(rank[:size] - expected[start : start + size]).max() <= 1e-5 * np.abs(expected).max()
            assert not rank[size:].any()
        start += size


def test_pallas_kernels_leave_a_quantised_cache_to_the_plain_form():
    def backend(stored, scores="float"):
        config, spec = model()[0], MeshSpec.parse("dp=1")
        index = IndexScores.parse(scores, config.v4.indexer.head_dim, False, published="fp4")
        made = Compressed(spec.build(), Rules.for_mesh(spec), config, np.dtype(stored), 0, PALLAS, index)
        return made.backend(FORMS["CC"])

    assert backend(np.float32) == backend(jnp.bfloat16) == "pallas"
    assert backend(jnp.float8_e4m3fn) == backend(np.float32, "fp4") == "plain"
