"""The five ways to compute MLA, by name, and which layout of the cache each one reads.

``CD`` caches keys and values decompressed, per head. ``CC`` caches the latent and expands it to keys and values for
all context tokens, anew each step. ``A_CC`` absorbs ``W^UK`` into the query and ``W^UV`` into the output, and so
attends in latent space, on one array ``[latent ‖ rotary key]``. ``A_CC_ME`` does the same with the two parts kept and
multiplied apart, so that nothing is concatenated or moved. ``AM_CC_ME`` has the products ``W^UQ·W^UK`` and ``W^UV·W^O``
computed ahead. All five give the same result.
"""

from __future__ import annotations

from typing import Literal, get_args

from dsjax.errors import UserError
from dsjax.model.cache_groups import Layout

Form = Literal["CD", "CC", "A_CC", "A_CC_ME", "AM_CC_ME"]
FORMS: tuple[Form, ...] = get_args(Form)

_READS: dict[Form, tuple[Layout, ...]] = {
    "CD": ("decompressed",),
    "CC": ("split", "joined"),
    "A_CC": ("joined",),
    "A_CC_ME": ("split",),
    "AM_CC_ME": ("split",),
}


def common_layout(prefill: Form, decode: Form) -> Layout:
    """The cache layout that both phases' forms can read.

    Raises:
        UserError: an unknown form, or two that have no layout in common.
    """
    for form in (prefill, decode):
        if form not in _READS:
            raise UserError(f"MLA form {form!r}: expected one of {', '.join(FORMS)}")
    for layout in _READS[prefill]:
        if layout in _READS[decode]:
            return layout
    partners = [form for form in FORMS if set(_READS[form]) & set(_READS[decode])]
    raise UserError(
        f"--mla-prefill {prefill} reads a cache that is {' or '.join(_READS[prefill])}, --mla-decode {decode} one that is "
        f"{' or '.join(_READS[decode])}; with --mla-decode {decode} choose --mla-prefill from {', '.join(partners)}"
    )
