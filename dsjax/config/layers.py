"""Which kinds of layers a model has, in what order, and in which stacks their parameters lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LayerKind:
    """Layers that are alike but for their weights.

    stack: name of the stack that holds their parameters, and no others'. mlp: what follows attention: a dense MLP, or routed experts.
    """

    stack: str
    mlp: Literal["dense", "moe"]


@dataclass(frozen=True)
class LayerRun:
    """Layers that follow one another: ``kinds``, one after the other, ``count`` times."""

    kinds: tuple[LayerKind, ...]
    count: int

    @property
    def layers(self) -> int:
        """How many they are."""
        return len(self.kinds) * self.count


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
    return sorted(number for kind, numbers in stacks(runs).items() if kind.mlp == "moe" for number in numbers)
