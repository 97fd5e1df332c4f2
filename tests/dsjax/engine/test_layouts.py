"""Every layout, dispatch and MLA form gives the logits and the greedy tokens of one device."""

import functools
import itertools

import numpy as np
import pytest
from goldens.our_model import bound, hf_tensors, logits_of
from goldens.random_weights import RandomWeights
from layouts import DISPATCHES, LAYOUTS, TINY, difference, prompts, wide, write_checkpoint
from layouts import answer as answer_of
from rounding_edges import Edges

from dsjax.config import ModelConfig

pytestmark = pytest.mark.slow  # all together

# A quarter of what tools/check_layouts.py makes: four pages of each prompt's, and steps on 32 emulated devices take their time.
answer = functools.partial(answer_of, new_tokens=16)

PLAIN = {"kernels": "plain"}
MIXED = {"mixed": True}  # prompts and decodes in one launch
FUSED = {"redundant_experts": 8, "enable_shared_experts_fusion": True}  # the shared expert as a routed one
CHUNKS = {"moe_chunk_tokens": 5}

FORMS = (("CC", "A_CC"), ("A_CC_ME", "AM_CC_ME"), ("CD", "CD"))
# Each layout; each dispatch with each of these pairs of forms; between them each form in prefill and, with A_CC_ME further below, in
# decode; and on several layouts whatever may change nothing: in one table, since nearly all of a run is the compilation of its programs.
# 32 experts do not divide by 12 ranks: four redundant ones fill them up. All combinations of layout, dispatch and forms:
# tools/check_layouts.py.
RUNS = [
    ("dp=1", "gather", "CC", "A_CC", MIXED | FUSED),
    ("dp=8", "padded", "CD", "CD", FUSED),
    ("dp=8", "ragged", "A_CC_ME", "CC", PLAIN),
    ("dp=2,tp=4", "gather", "A_CC", "A_CC", PLAIN),
    ("dp=2,tp=4", "ragged", "CC", "A_CC", {}),
    ("tp=8", "gather", "A_CC_ME", "AM_CC_ME", {}),
    ("tp=8,ep=1", "gather", "CD", "CD", FUSED),
    ("dp=8,ep=2", "gather", "CC", "A_CC", FUSED),
    ("dp=32", "ragged", "CD", "CD", {}),
    ("dp=4,tp=8", "padded", "CC", "A_CC", MIXED),
    ("dp=16,tp=2,ep=8", "ragged", "A_CC_ME", "AM_CC_ME", FUSED),
    ("dp=12", "padded", "A_CC_ME", "AM_CC_ME", {"redundant_experts": 4} | CHUNKS),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def one_device(checkpoint):
    # The plain forms: whatever `--kernels auto` brings to the layouts below is held to them, too.
    return answer(checkpoint, "dp=1", "auto", "CC", "A_CC_ME", kernels="plain")


def test_one_device_gives_the_logits_of_the_model_without_cache_or_mesh(one_device):
    config = ModelConfig.from_dict(TINY)
    tokens = np.array([prompts()[-1]["prompt_token_ids"]])
    reference = logits_of(config, hf_tensors(config, RandomWeights(7, bias_center=-0.2)), tokens)[0]
    assert np.abs(one_device.logits - reference).max() <= bound(reference)


def test_the_runs_meet_every_layout_and_every_dispatch_with_each_pair_of_forms():
    assert set(LAYOUTS) <= {layout for layout, *_ in RUNS}
    met = {(dispatch, (prefill, decode)) for _, dispatch, prefill, decode, _ in RUNS}
    assert met >= set(itertools.product(DISPATCHES, FORMS))


@pytest.mark.parametrize(("layout", "dispatch", "prefill", "decode", "options"), RUNS)
def test_layout_gives_the_answer_of_one_device(checkpoint, one_device, layout, dispatch, prefill, decode, options):
    assert difference(answer(checkpoint, layout, dispatch, prefill, decode, **options), one_device) is None


@pytest.fixture(scope="module")
def one_device_with_an_fp8_cache(checkpoint):
    return answer(checkpoint, "dp=1", "auto", "CC", "A_CC_ME", kernels="plain", kv_cache_dtype="fp8")


@pytest.mark.parametrize(
    ("layout", "dispatch", "prefill", "decode"),
    [
        ("dp=8", "padded", "CC", "CC"),
        ("dp=2,tp=4", "ragged", "A_CC_ME", "AM_CC_ME"),
    ],
)
def test_layouts_give_it_with_an_fp8_cache_too(
    checkpoint, one_device_with_an_fp8_cache, layout, dispatch, prefill, decode
):
    # Exact while no entry lies within float32's rounding of the middle between two FP8 numbers: none of these does.
    found = answer(checkpoint, layout, dispatch, prefill, decode, kv_cache_dtype="fp8")
    assert difference(found, one_device_with_an_fp8_cache) is None


@pytest.fixture(scope="module")
def wide_checkpoint(tmp_path_factory):
    """Whole blocks of 128 on each of two ``tp`` devices: two blocks of each width.

    With the seed of the others a value lies on a rounding edge on some processors, which four more runs would have to prove.
    """
    return write_checkpoint(tmp_path_factory.mktemp("wide"), seed=8, **wide(2))


@pytest.fixture(scope="module")
def one_device_with_fp8_products(wide_checkpoint):
    return answer(
        wide_checkpoint, "dp=1", "auto", "CC", "A_CC_ME", kernels="plain", weights="fp8", activation_scheme="dynamic"
    )


@pytest.mark.parametrize(
    ("layout", "dispatch", "prefill", "decode"),
    [("dp=2,tp=2", "ragged", "CC", "A_CC_ME"), ("tp=2,ep=1", "gather", "CC", "A_CC_ME")],
)
def test_layouts_give_it_with_fp8_products_too(
    wide_checkpoint, one_device_with_fp8_products, layout, dispatch, prefill, decode
):
    # Exact while no activation lies within float32's rounding of the middle between two FP8 numbers. Whether one does depends on the
    # processor's instructions; where one does, the run without rounding must be equal.
    run = functools.partial(answer, wide_checkpoint, layout, dispatch, prefill, decode)
    kept = {"weights": "fp8", "activation_scheme": "dynamic"}
    different = difference(run(**kept), one_device_with_fp8_products)
    if different is not None:
        one_device = functools.partial(answer, wide_checkpoint, "dp=1", "auto", "CC", "A_CC_ME", kernels="plain")
        is_edge, text = Edges(one_device, kept).explain(run, different)
        assert is_edge, text
