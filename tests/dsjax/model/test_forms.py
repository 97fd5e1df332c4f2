"""Which MLA forms go together, and what each layout of the cache keeps of a token."""

import itertools
import math

import pytest

from dsjax.config import load_config
from dsjax.errors import UserError
from dsjax.model.forms import FORMS, cache_widths, common_layout

# As in docs/architecture.md.
TOGETHER = {
    ("CD", "CD"): "decompressed",
    ("CC", "CC"): "split",
    ("CC", "A_CC"): "joined",
    ("CC", "A_CC_ME"): "split",
    ("CC", "AM_CC_ME"): "split",
    ("A_CC", "A_CC"): "joined",
    ("A_CC_ME", "A_CC_ME"): "split",
    ("A_CC_ME", "AM_CC_ME"): "split",
    ("AM_CC_ME", "AM_CC_ME"): "split",
}


@pytest.mark.parametrize(("prefill", "decode"), list(itertools.product(FORMS, FORMS)))
def test_two_forms_share_a_layout_exactly_where_the_table_says(prefill, decode):
    expected = TOGETHER.get((prefill, decode)) or TOGETHER.get((decode, prefill))
    if expected:
        assert common_layout(prefill, decode) == expected
        return
    with pytest.raises(UserError) as error:
        common_layout(prefill, decode)
    message = str(error.value)
    assert f"MLA form {prefill} for prefill" in message
    assert f"{decode} for decode" in message
    named = message.rsplit("choose prefill from ", 1)[1].split(", ")
    assert named == [form for form in FORMS if (form, decode) in TOGETHER or (decode, form) in TOGETHER]


@pytest.mark.parametrize("pair", [("cc", "CC"), ("CC", "MHA"), ("", "CC")])
def test_an_unknown_form_is_answered_with_those_there_are(pair):
    unknown = next(form for form in pair if form not in FORMS)
    with pytest.raises(UserError, match=f"MLA form '{unknown}': expected one of CD, CC, A_CC, A_CC_ME, AM_CC_ME"):
        common_layout(*pair)


@pytest.mark.parametrize(("layout", "bf16_bytes"), [("decompressed", 81_920), ("joined", 1_152), ("split", 1_152)])
def test_v3_keeps_the_documented_bytes_of_a_token_and_layer(layout, bf16_bytes):
    widths = cache_widths(layout, load_config("deepseek-v3"))
    assert 2 * sum(math.prod(shape) for shape in widths.values()) == bf16_bytes


def test_the_arrays_of_each_layout_have_the_widths_of_the_paper():
    config = load_config("deepseek-v3")
    assert cache_widths("split", config) == {"latent": (512,), "rope": (64,)}
    assert cache_widths("joined", config) == {"joined": (576,)}
    assert cache_widths("decompressed", config) == {"key": (128, 192), "value": (128, 128)}
