"""A DeepSeek-V4 served from a cache in FP8 with index scores in FP4: one device's tokens on other meshes, in other chunks, and again.

What is kept and what is computed from it is held to the published code in `test_quantised_cache.py`; several processes are in
`test_v4_processes.py` and `test_wide_v4_sides.py`.
"""

import numpy as np
import pytest
from v4_engine import BLOCKS, DRAWN, PROMPTS, QUANTISED, G, answers, drafted_and_preempted, engine, one_devices, write

from dsjax.engine.device.cache import bytes_per_page
from dsjax.errors import UserError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write(tmp_path_factory.mktemp("v4"), **BLOCKS)


@pytest.fixture(scope="module")
def expected(checkpoint):
    return one_devices(checkpoint, **QUANTISED)


def test_pages_have_the_bytes_of_fp8_entries_and_fp4_keys(checkpoint):
    with engine(checkpoint, mesh="dp=1", **QUANTISED) as llm:
        step, cache = llm.executor.model, llm.executor.state.cache
        assert {cache[name].dtype for name in ("window", "c4", "c4_index", "c128")} == {np.dtype(np.uint8)}
    entry, key = 76 + 8 + 2 * 4, 32 + 2
    assert bytes_per_page(step) == 2 * (G // 4 * (entry + key) + G // 8 * entry)
    states = 4 * (6 * (80 + 64) + 3 * 80)
    assert bytes_per_page(step, "window") == 4 * G * entry + 2 * states


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": "dp=2,tp=4"},
        {"mesh": "pp=2,tp=2"},
        {"attention_mesh": "dp=2", "expert_mesh": "ep=2", "prefill_chunk": 5},
    ],
    ids=str,
)
def test_tokens_on_a_mesh_and_in_other_chunks_are_one_devices(checkpoint, expected, options):
    with engine(checkpoint, **options, **QUANTISED) as llm:
        assert (answers(llm), answers(llm, DRAWN)) == expected


def test_drafted_preempted_and_found_again_the_tokens_are_one_devices(checkpoint, expected):
    llm, rank = drafted_and_preempted(checkpoint, **QUANTISED)
    for _ in range(2):
        assert answers(llm) == expected[0]
    assert rank.hits["device"] > 0
    assert answers(llm, DRAWN) == expected[1]
    assert rank.num_preemptions > 0
    llm.shutdown()


def test_it_is_batch_invariant(checkpoint, expected):
    with engine(checkpoint, mesh="dp=1", batch_invariant=True, **QUANTISED) as llm:
        assert [answers(llm, given=[prompt])[0] for prompt in PROMPTS] == expected[0]


def test_scores_of_another_family_and_keys_that_no_matrix_rotates_are_refused(checkpoint, tmp_path):
    with pytest.raises(UserError, match=r"--index-scores is fp8, and .* rounds this model's index .* to fp4"):
        engine(checkpoint, mesh="dp=1", index_scores="fp8")
    odd = write(tmp_path, index_head_dim=24)
    with pytest.raises(UserError, match="wants a power of two, and this model's index_head_dim is 24"):
        engine(odd, mesh="dp=1", kv_cache_dtype="fp8")
