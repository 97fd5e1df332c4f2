"""A model's layer kinds, their order, and the stacks that hold their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LayerKind:
    """Layers that differ only in their weights."""

    stack: str  # name of the stack that holds only these layers' parameters
    mlp: Literal["dense", "moe", "hash"]  # a dense MLP, or routed experts; "hash" layers route by token id
    attention: Literal["mla", "window", "csa", "hca"] = "mla"  # MLA, or one of DeepSeek-V4's (docs/deepseek-v4.md)

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
    """Return the layer numbers of each kind. A kind belongs to one run only, since its stack does."""
    layers_by_kind = {}
    first = 0
    for run in runs:
        for offset, kind in enumerate(run.kinds):
            layers_by_kind[kind] = range(first + offset, first + run.layers, len(run.kinds))
        first += run.layers
    return layers_by_kind


def moe_layers(runs: Sequence[LayerRun]) -> list[int]:
    """Return the numbers of the layers with routed experts, in order, which is also the order of an expert placement's rows."""
    return sorted(number for kind, numbers in stacks(runs).items() if kind.routed for number in numbers)


def in_runs(layers: Sequence[tuple[str, str]], first_number: int = 0) -> tuple[LayerRun, ...]:
    """Group layers, each given as (attention, MLP), into runs of one kind, or of two alternating kinds if that covers more layers.

    first_number: number of the first layer. A stack is named after its kind and first layer, so each run has a name of its own.
    """
    runs = []
    first = 0
    while first < len(layers):
        single, pairs = (_repeats(layers, first, period) for period in (1, 2))
        period, count = (2, pairs) if pairs > 1 and 2 * pairs > single else (1, single)
        kinds = tuple(
            LayerKind(f"{attention}_{mlp}_{first_number + layer}", mlp, attention)
            for layer, (attention, mlp) in enumerate(layers[first : first + period], first)
        )
        runs.append(LayerRun(kinds, count))
        first += runs[-1].layers
    return tuple(runs)


def _repeats(layers: Sequence[tuple[str, str]], first: int, period: int) -> int:
    """Return how often the ``period`` layers from ``first`` occur in a row."""
    end = first + period
    while end < len(layers) and layers[end] == layers[end - period]:
        end += 1
    return (end - first) // period
