"""Which MLA forms go together, by the layout of the cache that both read."""

import itertools

import pytest

from dsjax.errors import UserError
from dsjax.model.forms import FORMS, common_layout

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
    assert f"--mla-prefill {prefill} reads" in message
    assert f"--mla-decode {decode} one that is" in message
    named = message.rsplit("choose --mla-prefill from ", 1)[1].split(", ")
    assert named == [form for form in FORMS if (form, decode) in TOGETHER or (decode, form) in TOGETHER]


@pytest.mark.parametrize("unknown", ["cc", "MHA", ""])
def test_an_unknown_form_is_answered_with_those_there_are(unknown):
    with pytest.raises(UserError, match=f"MLA form '{unknown}': expected one of CD, CC, A_CC, A_CC_ME, AM_CC_ME"):
        common_layout("CC", unknown)
