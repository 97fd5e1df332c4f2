"""A DeepSeek-V4 served from a cache in FP8 with index scores in FP4: one device's tokens on other meshes, in other chunks, and again.

What is kept and what is computed from it is held to the published code in `test_quantised_cache.py`.
"""

import numpy as np
import pytest
from v4_engine import DRAFTS, DRAWN, LONGEST, G, answers, engine, handed_over, one_devices, prompts, write

from dsjax.engine.device.cache import bytes_per_page
from dsjax.errors import UserError

pytestmark = pytest.mark.slow

QUANTISED = {"kv_cache_dtype": "fp8", "index_scores": "fp4"}
SIZES = {"head_dim": 80, "index_head_dim": 64}  # of which 4 rotate: two blocks of unrotated values, and of an index key


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write(tmp_path_factory.mktemp("v4"), **SIZES)


@pytest.fixture(scope="module")
def expected(checkpoint):
    return one_devices(checkpoint, **QUANTISED)


def test_pages_have_the_bytes_of_fp8_entries_and_fp4_keys(checkpoint):
    llm = engine(checkpoint, mesh="dp=1", **QUANTISED)
    step = llm.executor.model
    entry, key = 76 + 8 + 2 * 4, 32 + 2
    assert bytes_per_page(step) == 2 * (G // 4 * (entry + key) + G // 8 * entry)
    states = 4 * (6 * (80 + 64) + 3 * 80)
    assert bytes_per_page(step, "window") == 4 * G * entry + 2 * states
    cache = llm.executor.state.cache
    assert {name: cache[name].dtype for name in ("window", "c4", "c4_index", "c128")} == dict.fromkeys(
        ("window", "c4", "c4_index", "c128"), np.uint8
    )
    llm.shutdown()


@pytest.mark.parametrize(
    "options", [{"mesh": "dp=2,tp=4"}, {"mesh": "dp=4,ep=2", "prefill_chunk": 5}, {"mesh": "pp=2,tp=2"}], ids=str
)
def test_tokens_on_a_mesh_and_in_other_chunks_are_one_devices(checkpoint, expected, options):
    llm = engine(checkpoint, **options, **QUANTISED)
    assert (answers(llm, prompts()), answers(llm, prompts(), DRAWN)) == expected
    llm.shutdown()


def test_drafted_preempted_and_found_again_the_tokens_are_one_devices(checkpoint, expected):
    llm = engine(checkpoint, mesh="dp=1", cache_tokens=LONGEST, **QUANTISED, **DRAFTS)
    (rank,) = llm.engine.core.scheduler.ranks
    rank.pool.allocate(rank.pool.num_free_windows - 9, windows=True)  # so requests wait for window pages
    for _ in range(2):
        assert answers(llm, prompts()) == expected[0]
    assert rank.hits["device"] > 0
    assert answers(llm, prompts(), DRAWN) == expected[1]
    assert rank.num_preemptions > 0
    llm.shutdown()


def test_quantised_pages_go_from_prefill_to_decode(checkpoint, expected):
    found, counts = handed_over(checkpoint, prefill_mesh="tp=2", decode_mesh="dp=2", **QUANTISED)
    assert found == expected[0]
    assert (counts.completed, counts.given_up) == (counts.asked, 0)


def test_it_is_batch_invariant(checkpoint, expected):
    llm = engine(checkpoint, mesh="dp=1", batch_invariant=True, **QUANTISED)
    assert [answers(llm, [prompt])[0] for prompt in prompts()] == expected[0]
    llm.shutdown()


def test_scores_of_another_family_and_keys_that_no_matrix_rotates_are_refused(checkpoint, tmp_path):
    with pytest.raises(
        UserError, match=r"--index-scores is fp8, and DeepSeek's code rounds this model's index .* to fp4"
    ):
        engine(checkpoint, mesh="dp=1", index_scores="fp8")
    odd = write(tmp_path, index_head_dim=24)
    with pytest.raises(UserError, match="wants a power of two, and this model's index_head_dim is 24"):
        engine(odd, mesh="dp=1", kv_cache_dtype="fp8")
