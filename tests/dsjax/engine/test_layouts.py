"""Every layout, dispatch and MLA form gives the logits and the greedy tokens of one device."""

import numpy as np
import pytest
from goldens.our_model import bound, hf_tensors, logits_of
from goldens.random_weights import RandomWeights
from layouts import DISPATCHES, FORMS, LAYOUTS, TINY, answer, difference, prompts, write_checkpoint

from dsjax.config import ModelConfig

# Each layout meets every dispatch and every form at least once. All pairs: tools/check_layouts.py.
PAIRS = [
    (DISPATCHES[0], FORMS[0]),
    (DISPATCHES[1], FORMS[1]),
    (DISPATCHES[2], FORMS[2]),
    (DISPATCHES[1], FORMS[3]),
    (DISPATCHES[2], FORMS[4]),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def one_device(checkpoint):
    return answer(checkpoint, "dp=1", "auto", "CC", "A_CC_ME")


def test_one_device_gives_the_logits_of_the_model_without_cache_or_mesh(one_device):
    config = ModelConfig.from_dict(TINY)
    tokens = np.array([prompts()[-1]["prompt_token_ids"]])
    reference = logits_of(config, hf_tensors(config, RandomWeights(7, bias_center=-0.2)), tokens)[0]
    assert np.abs(one_device.logits - reference).max() <= bound(reference)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("dispatch", "forms"), PAIRS, ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
def test_layout_gives_the_answer_of_one_device(checkpoint, one_device, layout, dispatch, forms):
    assert difference(answer(checkpoint, layout, dispatch, *forms), one_device) is None


def test_redundant_experts_change_nothing(checkpoint, one_device):
    found = answer(checkpoint, "dp=8", "padded", "CC", "A_CC_ME", redundant_experts=8)
    assert difference(found, one_device) is None


def test_experts_that_do_not_divide_are_filled_up_with_redundant_ones(checkpoint, one_device):
    found = answer(checkpoint, "dp=12", "padded", "CC", "A_CC_ME", redundant_experts=4)
    assert difference(found, one_device) is None


def test_bounded_dispatch_chunks_change_nothing(checkpoint, one_device):
    found = answer(checkpoint, "dp=4", "padded", "CC", "A_CC_ME", moe_chunk_tokens=5)
    assert difference(found, one_device) is None
