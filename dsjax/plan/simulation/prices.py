"""`StepPrices`: seconds of any step of a simulated instance, by the model that plans are made with (`StepModel.step`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dsjax.plan.step import RankWork, StepModel

_CONTEXTS = 64
"""Mean contexts of a rank's decodes that are told apart in an octave, so that their prices are kept: within 0.55 %."""


class StepPrices:
    """Middle estimates of steps by whichever model makes them shortest: an engine overlaps where that pays.

    paces: of each model, how much longer programs take than their operations, with prompts and of decodes alone (`Instance.pace`).
    through: `Instance.staged`, where the models are of one stage. The planner's allowances for uneven prompts and contexts are left out,
    because the simulation has the unevenness itself.
    """

    def __init__(
        self,
        models: Sequence[StepModel],
        drafts: int = 0,
        paces: Sequence[tuple[float, float]] | None = None,
        through: Callable[[float, float, bool], float] | None = None,
    ):
        self._models = list(zip(models, paces or [(1.0, 1.0)] * len(models), strict=True))
        self._drafts, self._through = drafts, through

    def seconds(self, ranks: Sequence[RankWork]) -> float:
        """Seconds of a step with this work on each DP rank (idle ones included); 0 where there is none.

        What prompts and decodes have in common is saved at the pace of the faster program.
        """
        ranks = [_rounded(rank) if rank.decodes else rank for rank in ranks]
        tokens = max(rank.decodes * (1 + self._drafts) + rank.prompts for rank in ranks)
        if not tokens:
            return 0.0
        step = min(self._paced(model, ranks, *paces) for model, paces in self._models)
        decode = not any(rank.prompts for rank in ranks)
        return step if self._through is None else self._through(step, tokens, decode)

    def _paced(self, model: StepModel, ranks: list[RankWork], prompts: float, decodes: float) -> float:
        together = model.seconds(model.step(ranks, drafts=self._drafts))
        if prompts == decodes == 1.0:
            return together
        parts = [RankWork(*rank[:2]) for rank in ranks], [rank._replace(decodes=0, context=0) for rank in ranks]
        alone = [model.seconds(model.step(part, drafts=self._drafts)) if any(map(any, part)) else 0.0 for part in parts]
        saved = sum(alone) - together
        return decodes * alone[0] + prompts * alone[1] - min(prompts, decodes) * saved


def _rounded(rank: RankWork) -> RankWork:
    each = rank.context / rank.decodes
    if each > 0:
        each = 2 ** (round(_CONTEXTS * math.log2(each)) / _CONTEXTS)
    return rank._replace(context=rank.decodes * each)
