"""The Pallas kernel of DeepSeek-V4's attention, run by its interpreter, gives what loops in float64 give."""

from dataclasses import replace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from kernel_cases import CompressedCase, spread

from dsjax.kernels.pallas import addressing
from dsjax.kernels.pallas.attention import AttentionTiles, split_context
from dsjax.kernels.pallas.compressed import compressed_attention, compressed_cost
from dsjax.kernels.pallas.shared_memory import Cores

pytestmark = pytest.mark.slow  # all together


def by_pallas(case, tiles=(16, 16), dtype=np.float32, **options):
    options |= {"stored": case.window.dtype, "interpret": True, "tiles": AttentionTiles(*tiles)}
    return case.by(compressed_attention, dtype, **options)


@spread(
    seed=range(6),
    R=[3, 1, 2],
    C=[7, 1, 2],
    H=[20, 2, 16],
    M=[40, 16, 130, 1],
    pages=[(8, 1), (32, 8), (5, 3)],
    longest=[200, 20, 1],
    kind=["csa", "hca", "window"],
    holes=[True, False],
    stored=[4, 2],
    tiles=[(16, 16), (32, 32)],
)
def test_attention_is_softmax_over_sink_window_entries(seed, R, C, H, M, pages, longest, kind, holes, stored, tiles):
    """A ring goes around; one query sees a single token. pages: slots of window pages and of pages of entries."""
    G, E = pages
    case = CompressedCase.drawn(
        seed, R=R, C=C, H=H, M=M, G=G, E=E, longest=longest, kind=kind, holes=holes, stored=stored
    )
    # Scores of M products reach 15; e to an error of a few units in their last place.
    np.testing.assert_allclose(by_pallas(case, tiles), case.expected(), atol=2e-4, rtol=2e-4)


def test_splitting_a_querys_entries_over_every_core_changes_a_result_by_rounding_alone():
    case = CompressedCase.drawn(3, R=2, C=1, H=4, M=16, G=8, E=4, longest=900, kind="hca")
    assert split_context(2, 2 + 16, cores=132) > split_context(2, 2 + 16, cores=2) == 1
    split, whole = (by_pallas(case, cores=Cores(count=count)) for count in (132, 2))
    assert np.any(split != whole)
    np.testing.assert_allclose(split, whole, atol=2e-6)
    np.testing.assert_allclose(split, case.expected(), atol=2e-4)


def test_bfloat16_queries_and_cache_give_bfloat16_of_nearly_the_same():
    case = CompressedCase.drawn(4, R=2, C=2, H=4, M=32, G=8, E=4, longest=100, kind="csa", stored=2)
    case = replace(case, query=case.query.astype(ml_dtypes.bfloat16).astype(np.float32))
    # Weights and results are rounded to 8 bits.
    np.testing.assert_allclose(by_pallas(case, dtype=jnp.bfloat16), case.expected(), atol=0.02, rtol=0.02)


def test_layers_that_are_copied_are_read_as_the_cache_is(monkeypatch):
    case = CompressedCase.drawn(5, R=2, C=2, H=3, M=16, G=8, E=4, longest=60, kind="hca")
    expected = by_pallas(case)
    monkeypatch.setattr(addressing, "addressable", lambda array: False)
    np.testing.assert_array_equal(by_pallas(case), expected)


def test_a_call_costs_its_tiles_products_and_each_vector_once():
    tiles, bf16 = AttentionTiles(), jnp.dtype(jnp.bfloat16)
    told = compressed_cost(32, 1, 64, 512, 128, 1024, False, bf16, 2, tiles, 4)
    assert told.flops == 2 * 32 * 64 * (128 + 1024) * 2 * 512
    assert told.bytes == 32 * (128 + 1024) * 1024 + 32 * 64 * 1024 + 4 * 32 * 64 * 513 * 4
    # A prompt's queries share a window and all entries, and each reads the entries that it chose.
    for chosen, reads in ((False, 1024), (True, 256 * 512)):
        entries = 512 if chosen else 1024
        prompt = compressed_cost(1, 256, 64, 512, 128, entries, chosen, bf16, 2, tiles, 1)
        assert prompt.bytes == (128 + 255 + reads) * 1024 + 2 * 256 * 64 * 1024
