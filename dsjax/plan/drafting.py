"""Tokens that a decode step with drafts yields: how many of the MTP module's drafts are accepted, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from dsjax.errors import UserError
from dsjax.plan.figure import assumed

FIRST = 0.85
"""Chance that a step's first draft is accepted: DeepSeek-V3's report has 0.85 to 0.90 (section 5.4.3)."""
FADING = (0.82, 0.76, 0.87)
"""Chance of a further draft ÷ the chance of the one before it, each where all before were accepted: value, low, high.

DeepSeek-V3 and R1 have one MTP module, trained to look one token further and used again on its own hidden state. A step of V3-0324 with
seven drafts yields 3.20 tokens at temperature 0 and 3.09 at 1 (nebius/MTP-DeepSeek-V3-0324, *Original MTP*), which a first chance of 0.85
to 0.90 has with a ratio of 0.78 to 0.86. The measured curve of another model with one module is of this form: DeepSeek-V4-Pro yields 1.79,
2.27, 2.49 and 2.58 tokens with 1, 2, 3 and 8 drafts (SemiAnalysisAI/InferenceX, golden_al_distribution/dsv4_mtp.yaml), and 0.76 gives
1.79, 2.26, 2.48 and 2.58."""
_UNSURE = 0.05


def tokens_a_step(acceptance: float | Sequence[float], drafts: int) -> float:
    """The next token, and drafts while all before were accepted.

    acceptance: of the first draft, or of each position the share of steps in which its draft was accepted, as vLLM logs it.
    """
    if not drafts:
        return 1.0
    if isinstance(acceptance, Sequence):
        seen = [1 + sum(min(1.0, max(0.0, share + d)) for share in acceptance[:drafts]) for d in (0, -_UNSURE, _UNSURE)]
        source = f"acceptance of each position as given, ± {_UNSURE:g}"
        return assumed(*seen, "tokens a step", source)
    ends = zip((acceptance + d for d in (0, -_UNSURE, _UNSURE)), FADING, strict=True)
    made = [_yield(min(1.0, max(0.0, first)), fading, drafts) for first, fading in ends]
    source = f"MTP acceptance of the first draft as given, ± {_UNSURE:g}; of each further one {FADING[0]} (0.76 – 0.87) of the one before"
    return assumed(*made, "tokens a step", source)


def _yield(first: float, fading: float, drafts: int) -> float:
    made, reached, chance = 1.0, 1.0, first
    for _ in range(drafts):
        reached *= chance
        made, chance = made + reached, chance * fading
    return made


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
    if not isinstance(acceptance, Sequence):
        if not 0 <= acceptance <= 1:
            raise UserError(f"--mtp-acceptance is {acceptance}, expected a share from 0 to 1")
    elif len(acceptance) != drafts:
        raise UserError(
            f"--mtp-acceptance has {len(acceptance)} positions and --mtp {drafts} drafts; give one share for each, or "
            "that of the first alone"
        )
