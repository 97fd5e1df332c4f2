"""Which kinds of layers a model has, in what order, and in which stacks their parameters lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LayerKind:
    """Layers that are alike but for their weights.

    stack: name of the stack that holds their parameters, and no others'. mlp: what follows attention: a dense MLP, or routed experts, which
    a token's id decides on in "hash" layers. attention: MLA, or a kind of DeepSeek-V4's (``deepseek_v4.KINDS``).
    """

    stack: str
    mlp: Literal["dense", "moe", "hash"]
    attention: Literal["mla", "window", "csa", "hca"] = "mla"

    @property
    def routed(self) -> bool:
        """Whether it has routed experts."""
        return self.mlp != "dense"


@dataclass(frozen=True)
class LayerRun:
    """Layers that follow one another: ``kinds``, one after the other, ``count`` times."""

    kinds: tuple[LayerKind, ...]
    count: int

    @property
    def layers(self) -> int:
        """How many they are."""
        return len(self.kinds) * self.count


def kinds_of(runs: Sequence[LayerRun]) -> tuple[tuple[LayerKind, int], ...]:
    """Each kind of layer, and how many layers are of it."""
    return tuple((kind, len(numbers)) for kind, numbers in stacks(runs).items())


def stacks(runs: Sequence[LayerRun]) -> dict[LayerKind, range]:
    """The numbers, in the model, of the layers of each kind."""
    found, first = {}, 0
    for run in runs:
        for place, kind in enumerate(run.kinds):
            found[kind] = range(first + place, first + run.layers, len(run.kinds))
        first += run.layers
    return found


def moe_layers(runs: Sequence[LayerRun]) -> list[int]:
    """The numbers of the layers with routed experts, in order: one has the row of a placement that is its place here."""
    return sorted(number for kind, numbers in stacks(runs).items() if kind.routed for number in numbers)


def in_runs(layers: Sequence[tuple[str, str]], number: int = 0) -> tuple[LayerRun, ...]:
    """Runs of layers of which each is given by its attention and MLP: of one kind, or of two that take turns, whichever is longer.

    number: the number of the first of these layers. A stack is named after its kind and its first layer, so its name occurs in one run.
    """
    runs, first = [], 0
    while first < len(layers):
        counts = {}
        for period in (1, 2):
            same = (layers[at] == layers[at - period] for at in range(first + period, len(layers)))
            length = period + next(
                (number for number, equal in enumerate(same) if not equal), len(layers) - first - period
            )
            counts[period] = length // period
        period = 2 if counts[2] > 1 and 2 * counts[2] > counts[1] else 1
        kinds = layers[first : first + period]
        made = (
            LayerKind(f"{attention}_{mlp}_{number + first + at}", mlp, attention)
            for at, (attention, mlp) in enumerate(kinds)
        )
        runs.append(LayerRun(tuple(made), counts[period]))
        first += runs[-1].layers
    return tuple(runs)
