"""Every layout, dispatch and MLA form gives the logits and the greedy tokens of one device."""

import functools

import numpy as np
import pytest
from goldens.our_model import bound, hf_tensors, logits_of
from goldens.random_weights import RandomWeights
from layouts import DISPATCHES, LAYOUTS, TINY, difference, prompts, wide, write_checkpoint
from layouts import answer as answer_of

from dsjax.config import ModelConfig

pytestmark = pytest.mark.slow  # all together

# Half of what tools/check_layouts.py makes: eight pages of each prompt's, and steps on 32 emulated devices take their time.
answer = functools.partial(answer_of, new_tokens=32)

# Between them these pairs prefill or decode with each of the five forms. Each layout meets two of them and two of the three
# dispatches; which go together turns from layout to layout. All combinations: tools/check_layouts.py.
FORMS = (("CC", "A_CC"), ("A_CC_ME", "AM_CC_ME"), ("CD", "CD"))
RUNS = [
    (layout, DISPATCHES[(turn + index) % 3], *FORMS[(turn // 3 + index) % 3])
    for turn, layout in enumerate(LAYOUTS)
    for index in range(2)
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


@pytest.mark.parametrize(("layout", "dispatch", "prefill", "decode"), RUNS)
def test_layout_gives_the_answer_of_one_device(checkpoint, one_device, layout, dispatch, prefill, decode):
    assert difference(answer(checkpoint, layout, dispatch, prefill, decode), one_device) is None


@pytest.mark.parametrize(
    ("layout", "dispatch", "prefill", "decode"),
    [
        ("dp=8", "padded", "A_CC_ME", "CC"),
        ("dp=2,tp=4", "gather", "CC", "A_CC_ME"),
        ("dp=4,tp=8", "ragged", "A_CC", "A_CC"),
    ],
)
def test_layouts_with_plain_kernels_give_it_too(checkpoint, one_device, layout, dispatch, prefill, decode):
    assert difference(answer(checkpoint, layout, dispatch, prefill, decode, kernels="plain"), one_device) is None


@pytest.fixture(scope="module")
def one_device_with_an_fp8_cache(checkpoint):
    return answer(checkpoint, "dp=1", "auto", "CC", "A_CC_ME", kernels="plain", kv_cache_dtype="fp8")


@pytest.mark.parametrize(
    ("layout", "dispatch", "prefill", "decode"),
    [
        ("dp=1", "auto", "CC", "CC"),
        ("dp=8", "padded", "CC", "A_CC_ME"),
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
    """Whole blocks of 128 on each of two ``tp`` devices: two blocks of each width."""
    return write_checkpoint(tmp_path_factory.mktemp("wide"), **wide(2))


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
    # Exact while no activation lies within float32's rounding of the middle between two FP8 numbers: none of these does.
    found = answer(wide_checkpoint, layout, dispatch, prefill, decode, weights="fp8", activation_scheme="dynamic")
    assert difference(found, one_device_with_fp8_products) is None


@pytest.mark.parametrize("layout", ["dp=1", "dp=4,tp=8"])
def test_prompts_and_decodes_in_one_launch_change_nothing(checkpoint, one_device, layout):
    assert difference(answer(checkpoint, layout, "padded", "CC", "A_CC_ME", mixed=True), one_device) is None


def test_redundant_experts_change_nothing(checkpoint, one_device):
    found = answer(checkpoint, "dp=8", "padded", "CC", "A_CC_ME", redundant_experts=8)
    assert difference(found, one_device) is None


def test_experts_that_do_not_divide_are_filled_up_with_redundant_ones(checkpoint, one_device):
    found = answer(checkpoint, "dp=12", "padded", "CC", "A_CC_ME", redundant_experts=4)
    assert difference(found, one_device) is None


FUSED = {"dp=1": "gather", "dp=8": "padded", "tp=8,ep=1": "padded", "dp=8,ep=2": "gather", "dp=16,tp=2,ep=8": "ragged"}


@pytest.mark.parametrize("layout", FUSED)
def test_the_shared_expert_as_a_routed_one_changes_nothing(checkpoint, one_device, layout):
    found = answer(
        checkpoint, layout, FUSED[layout], "CC", "A_CC_ME", redundant_experts=8, enable_shared_experts_fusion=True
    )
    assert difference(found, one_device) is None


def test_bounded_dispatch_chunks_change_nothing(checkpoint, one_device):
    found = answer(checkpoint, "dp=4", "padded", "CC", "A_CC_ME", moe_chunk_tokens=5)
    assert difference(found, one_device) is None
