"""`StepPrices`: seconds of any step of an instance, from tables that one `StepModel` filled."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from dsjax.plan.curves import Grid
from dsjax.plan.halves import further_rounds, more_launches
from dsjax.plan.instance import Instance
from dsjax.plan.step import StepModel

_FINEST = 2**0.25
"""Ratio of neighbouring sizes in a table; between them times are interpolated."""


@dataclass(frozen=True)
class RankWork:
    """What one DP rank computes in a step.

    decodes: requests that get one token; context: positions that all of them attend to. prompts: prompt tokens computed;
    pairs: of a prompt token and a position that it attends to; cached: positions of those prompts that were there before.
    """

    decodes: int = 0
    context: float = 0
    prompts: int = 0
    pairs: float = 0.0
    cached: int = 0

    @property
    def tokens(self) -> int:
        """All tokens computed."""
        return self.decodes + self.prompts


class _Table:
    """Seconds over tokens, linear between the sizes that were computed, and beyond them."""

    def __init__(self, sizes: list[float], seconds: list[float]):
        self._sizes, self._seconds = sizes, seconds

    def __call__(self, tokens: float) -> float:
        sizes, seconds = self._sizes, self._seconds
        at = min(max(bisect.bisect_right(sizes, tokens), 1), len(sizes) - 1)
        share = (tokens - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
        return max(0.0, seconds[at - 1] + share * (seconds[at] - seconds[at - 1]))


class Fastest:
    """Prices a step by whichever model makes it shortest: an engine overlaps two half batches where that pays.

    paces: of each model, how much longer programs take than their operations, with prompts and of decodes alone (`Instance.pace`).
    module: the MTP module goes over prompts.
    """

    def __init__(
        self,
        models: Sequence[StepModel],
        most_tokens: float,
        drafts: int = 0,
        paces: Sequence[tuple[float, float]] = (),
        module: bool = False,
    ):
        prices = [StepPrices(model, most_tokens, drafts, module) for model in models]
        self._prices = list(zip(prices, paces or [(1.0, 1.0)] * len(prices), strict=True))

    def seconds(self, ranks: Sequence[RankWork]) -> float:
        """As `StepPrices.seconds`. What prompts and decodes have in common is saved at the pace of the faster program."""
        return min(_paced(prices, paces, ranks) for prices, paces in self._prices)


class Staged:
    """Prices a step through all stages of an instance. prices: of the whole model on the devices of one of them."""

    def __init__(self, prices: Fastest, instance: Instance, drafts: int):
        self._prices, self._instance, self._verified = prices, instance, 1 + drafts

    def seconds(self, ranks: Sequence[RankWork]) -> float:
        """Seconds of a step of these ranks, which are those of all batches that take turns."""
        step = self._prices.seconds(ranks)
        tokens = max(work.decodes * self._verified + work.prompts for work in ranks)
        decode = not any(work.prompts for work in ranks)
        return self._instance.staged(step, tokens, decode) if step else 0.0


def _paced(prices: StepPrices, paces: tuple[float, float], ranks: Sequence[RankWork]) -> float:
    together, (prompts, decodes) = prices.seconds(ranks), paces
    if prompts == decodes == 1.0:
        return together
    of_decodes = prices.seconds([replace(work, prompts=0, pairs=0.0, cached=0) for work in ranks])
    of_prompts = prices.seconds([replace(work, decodes=0, context=0) for work in ranks])
    saved = of_decodes + of_prompts - together
    return decodes * of_decodes + prompts * of_prompts - min(paces) * saved


class StepPrices:
    """Middle estimates of steps in which ranks differ.

    All ranks wait for the busiest: its tokens bound products and exchanges, its contexts attention. Routed experts see the
    tokens of all ranks, whoever sent them: their mean. A step with prompts is one program: products are over prompt and decode
    tokens together, at prefill's efficiencies; attention is priced apart. The planner's allowances for unevenness
    (`uneven prompts`, `longest contexts`) are left out, because the simulation has the unevenness itself.
    """

    def __init__(self, model: StepModel, most_tokens: float, drafts: int = 0, module: bool = False):
        self._verified = 1 + drafts
        most_tokens *= self._verified
        self._overlap = model.overlap and model.config.is_moe
        sizes = [1.0]
        while sizes[-1] < max(most_tokens, 2.0):
            sizes.append(sizes[-1] * _FINEST)
        self._windows, self._further = self._overlap and model.in_windows, partial(further_rounds, model)
        self._more = [2 * launches for launches in more_launches(model, model.config.num_moe_layers)]
        self._local, self._experts, self._there, self._back = {}, {}, {}, {}
        tables = self._local, self._experts, self._there, self._back
        for decode in (True, False):
            rows = [_split(model, size, decode) for size in sizes]
            for table, column in zip(tables, zip(*rows, strict=True), strict=True):
                table[decode] = _Table(sizes, list(column))
        layers = model.config.num_hidden_layers
        lengths = [float(2**power) for power in range(5, 21)]
        self._decode_attention = _surface(
            sizes,
            lengths,
            lambda rows, each: model.attention(rows * self._verified, rows * each, each, True) * layers,
        )
        self._drafting = None
        if drafts:

            def drafting(rows: float, each: float) -> float:
                return sum(part for part in model.drafting(rows, each, drafts=drafts).values())

            self._drafting = _surface(sizes, lengths, drafting)
        self._prefill_attention = _surface(
            sizes, lengths, lambda tokens, each: model.attention(tokens, 0.0, each, False) * layers
        )
        self._module = None
        if module:

            def over_prompts(tokens: float, each: float) -> float:
                return model.drafting_prompts(tokens, prompt=max(1.0, 2 * each - 1))

            self._module = _surface(sizes, lengths, over_prompts)
        self._absorbs_below, self._absorbing = model.absorbs_below, None
        if self._absorbs_below:
            self._absorbing = _surface(sizes, lengths, lambda tokens, each: model.absorbing(tokens, each) * layers)
        # A cached position of a prompt is expanded anew: the difference that 4,096 of them make.
        both = (model.parts(4096, 4096, 0.0, False), model.parts(4096, 0.0, 0.0, False))
        self._expansion = (_projections(both[0]) - _projections(both[1])) / 4096
        share = model.beside_communication()
        self._beside = {True: 1.0, False: 1 / (1 - share) if share else 1.0}
        self._unhidden = 1 - model.hidden()
        copies = model.copying()
        self._copies = copies if copies else 0.0
        self._launches = model.launches
        self._host = {d: sum(part for part in model.beside(1, 1, d).values()) for d in (True, False)}
        self._head = _Table(sizes, [model.head(size) for size in sizes])

    def seconds(self, ranks: Sequence[RankWork]) -> float:
        """Seconds of a step with this work on each DP rank (idle ones included); 0 where there is none."""
        tokens = max(self._tokens(work) for work in ranks)
        if not tokens:
            return 0.0
        mean = sum(self._tokens(work) for work in ranks) / len(ranks)
        decode = not any(work.prompts for work in ranks)
        attention = max(self._attention(work) for work in ranks)
        first = self._halved(self._local, decode, tokens) + attention
        experts = self._halved(self._experts, decode, mean)
        there, back = (self._halved(table, decode, tokens) for table in (self._there, self._back))
        work, talk = first + experts, there + back
        if self._windows:
            first, experts = first + self._more[0], experts + self._more[1]
            pairs = itertools.product((first * self._beside[decode], experts * self._beside[decode]), (there, back))
            layers = sum(max(pair) / 2 for pair in pairs) + self._further(mean) * (
                experts * self._beside[decode] + talk
            )
        elif self._overlap:
            work = work * self._beside[decode] + (self._copies * talk if decode else 0.0)
            layers = max(work, talk) + min(work, talk) * self._unhidden
        else:
            layers = work + talk
        device = layers + self._head(max(one.decodes for one in ranks) * self._verified or 1)
        if self._drafting and any(one.decodes for one in ranks):
            busiest = max(ranks, key=lambda one: one.decodes)
            device += self._drafting(busiest.decodes, busiest.context / busiest.decodes)
        if self._module and not decode:
            busiest = max(ranks, key=lambda one: one.prompts)
            device += self._module(busiest.prompts, busiest.pairs / busiest.prompts)
        return (device if decode else max(device, self._launches(tokens))) + self._host[decode]

    def _tokens(self, work: RankWork) -> int:
        return work.decodes * self._verified + work.prompts

    def _attention(self, work: RankWork) -> float:
        """Seconds of one rank's attention: its decodes at their mean context, its prompts' tokens at what they attend to on average."""
        expanded = work.cached * self._expansion
        if work.decodes:
            expanded += self._decode_attention(work.decodes, work.context / work.decodes)
        if work.prompts:
            expanded += self._prefill_attention(work.prompts, work.pairs / work.prompts)
            if self._absorbing and 0 < work.cached < self._absorbs_below:
                expanded += self._absorbing(work.prompts, work.pairs / work.prompts)
        return expanded

    def _halved(self, table: dict[bool, _Table], decode: bool, tokens: float) -> float:
        return 2 * table[decode](tokens / 2) if self._overlap else table[decode](tokens)


def _surface(firsts: Sequence[float], seconds: Sequence[float], price: Callable[[float, float], float]) -> Grid:
    # Every fourth of the sizes: a factor of two apart.
    return Grid(firsts[::4], seconds, price)


def _projections(parts: dict[str, float]) -> float:
    """Seconds of expanding cached positions; included in a measured attention's own time."""
    return parts.get("projections", 0.0)


def _split(model: StepModel, tokens: float, decode: bool) -> tuple[float, float, float, float]:
    """(what the rank's own tokens cost, its experts, the way there and the way back) of all layers at no context."""
    parts = model.parts(tokens, 0.0, 0.0, decode)
    beside = ("experts", "shared experts") if model.overlap and model.in_windows else ("experts",)
    experts = sum(parts.pop(name, 0.0) for name in beside)
    there, back = (parts.pop(name, 0.0) for name in ("dispatch", "combine"))
    return sum(part for name, part in parts.items() if name != "attention"), experts, there, back
