"""Which MLA forms go together, and what each layout of the cache keeps of a token."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from dsjax.config import load_config
from dsjax.errors import UserError
from dsjax.model.forms import FORMS, cache_arrays, common_layout, reads
from sharding import fp8

BF16 = np.dtype(ml_dtypes.bfloat16)

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


def test_an_fp8_cache_keeps_scales_for_128_latent_values_each_and_rotary_keys_in_bf16():
    found = cache_arrays("split", load_config("deepseek-v3"), fp8.E4M3)
    assert found == {"latent": ((512,), fp8.E4M3), "scale": ((4,), np.float32), "rope": ((64,), BF16)}


@pytest.mark.parametrize("form", FORMS)
def test_an_fp8_cache_is_read_by_the_forms_that_keep_the_latent_apart(form):
    layout = common_layout(form, form)
    assert reads(form, BF16)
    if reads(form, fp8.E4M3):
        assert layout == "split"
        return
    with pytest.raises(UserError, match=f"--kv-cache-dtype fp8 .* reads the cache {layout}; choose --mla-prefill"):
        cache_arrays(layout, load_config("deepseek-v3"), fp8.E4M3)
