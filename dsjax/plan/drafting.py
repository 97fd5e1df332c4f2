"""Tokens that a decode step with drafts yields: how many of the MTP module's drafts are accepted, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from dsjax.errors import UserError
from dsjax.plan.assumptions import ends
from dsjax.plan.figure import assumed

FIRST, _, _ = ends("acceptance of the first draft")
FADING = ends("acceptance of a further draft")
"""Chance of a further draft ÷ the chance of the one before it, each where all before were accepted: value, low, high."""
_UNSURE = 0.05


def tokens_a_step(acceptance: float | Sequence[float], drafts: int) -> float:
    """The next token, and drafts while all before were accepted.

    acceptance: of the first draft, or of each position the share of steps in which its draft was accepted, as vLLM logs it.
    """
    if not drafts:
        return 1.0
    off = (0.0, -_UNSURE, _UNSURE)
    if isinstance(acceptance, Sequence):
        made = [1 + float(np.clip(np.add(acceptance[:drafts], d), 0, 1).sum()) for d in off]
        source = f"acceptance of each position as given, ± {_UNSURE:g}"
    else:
        each = zip(np.clip(np.add(acceptance, off), 0, 1), FADING, strict=True)
        made = [1 + float(np.cumprod(first * fading ** np.arange(drafts)).sum()) for first, fading in each]
        further = f"of each further one {FADING[0]} (0.76 – 0.87) of the one before"
        source = f"MTP acceptance of the first draft as given, ± {_UNSURE:g}; {further}"
    return assumed(*made, "tokens a step", source)


def read_acceptance(text: str) -> float | tuple[float, ...]:
    """`0.85`: of the first draft; `0.74,0.48,0.26`: of each position.

    Raises:
        UserError: neither.
    """
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        shares = ()
    if not shares or not all(0 <= share <= 1 for share in shares) or any(b > a for a, b in pairwise(shares)):
        raise UserError(
            f"--mtp-acceptance is {text!r}, expected a share from 0 to 1, such as 0.85, or one for each position, none above the one "
            "before, such as 0.74,0.48,0.26"
        )
    return shares[0] if len(shares) == 1 else shares


def check_acceptance(acceptance: float | Sequence[float], drafts: int) -> None:
    """Raise `UserError` where it is no share, or has not one for each draft."""
    if isinstance(acceptance, Sequence):
        if len(acceptance) != drafts:
            raise UserError(
                f"--mtp-acceptance has {len(acceptance)} positions and --mtp {drafts} drafts; give one share for each, or "
                "that of the first alone"
            )
    elif not 0 <= acceptance <= 1:
        raise UserError(f"--mtp-acceptance is {acceptance}, expected a share from 0 to 1")
