"""A model's layer kinds, their order, and the stacks that hold their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LayerKind:
    """Layers that differ only in their weights.

    stack: name of the stack that holds only these layers' parameters. mlp: a dense MLP, or routed experts; "hash" layers route by token
    id. attention: MLA, or one of DeepSeek-V4's kinds (``deepseek_v4.KINDS``).
    """

    stack: str
    mlp: Literal["dense", "moe", "hash"]
    attention: Literal["mla", "window", "csa", "hca"] = "mla"

    @property
    def routed(self) -> bool:
        """Whether the layers have routed experts."""
        return self.mlp != "dense"


@dataclass(frozen=True)
class LayerRun:
    """Consecutive layers: the sequence ``kinds``, repeated ``count`` times."""

    kinds: tuple[LayerKind, ...]
    count: int

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.kinds) * self.count


def kinds_of(runs: Sequence[LayerRun]) -> tuple[tuple[LayerKind, int], ...]:
    """Return each kind of layer with its number of layers."""
    return tuple((kind, len(numbers)) for kind, numbers in stacks(runs).items())


def stacks(runs: Sequence[LayerRun]) -> dict[LayerKind, range]:
    """Return the layer numbers of each kind."""
    found, first = {}, 0
    for run in runs:
        for place, kind in enumerate(run.kinds):
            found[kind] = range(first + place, first + run.layers, len(run.kinds))
        first += run.layers
    return found


def moe_layers(runs: Sequence[LayerRun]) -> list[int]:
    """Return the numbers of the layers with routed experts, in order. Row i of a placement belongs to entry i."""
    return sorted(number for kind, numbers in stacks(runs).items() if kind.routed for number in numbers)


def in_runs(layers: Sequence[tuple[str, str]], number: int = 0) -> tuple[LayerRun, ...]:
    """Group layers, each given as (attention, MLP), into runs of one kind or of two alternating kinds, whichever is longer.

    number: of the first layer. A stack is named after its kind and first layer, so each run has a name of its own.
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
