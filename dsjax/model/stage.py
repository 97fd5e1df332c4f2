"""``Stage``: consecutive layers of a model on their own devices, and the division of layers among stages (``docs/pipeline.md``)."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from dsjax.config import ModelConfig
from dsjax.config.layers import moe_layers, stacks
from dsjax.errors import UserError
from dsjax.model.parameter_counts import expert_parameters, layer_parameters, parameter_counts
from dsjax.model.window import ParameterWindow

if TYPE_CHECKING:  # imports JAX, which the planner does without
    from sharding.layer_placement import LayerPlacements


@dataclass(frozen=True)
class Stage:
    """One of ``count`` stages: ``layers`` layers from ``first`` on."""

    number: int
    count: int
    first: int
    layers: int

    @property
    def is_first(self) -> bool:
        """Whether tokens enter at this stage (the first)."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage produces tokens (the last)."""
        return self.number == self.count - 1

    def __str__(self) -> str:
        return f"stage {self.number}"

    def config(self, whole: ModelConfig) -> ModelConfig:
        """Return the configuration of a model with only this stage's layers; the last stage has the MTP modules."""
        dense = self.layers - len(self._moe_rows(whole))
        modules = whole.num_nextn_predict_layers if self.is_last else 0
        routed = whole.n_routed_experts if dense < self.layers or modules else 0
        return dataclasses.replace(
            whole.part(self.first, self.layers),
            first_k_dense_replace=dense,
            num_nextn_predict_layers=modules,
            n_routed_experts=routed,
            n_shared_experts=whole.n_shared_experts if routed else 0,
        )

    def in_whole(self, whole: ModelConfig) -> ModelConfig:
        """Return the whole model's configuration, with stacks split at this stage's borders, so that they have the stage's names."""
        return whole.split_at(self.first, self.first + self.layers)

    def _moe_rows(self, whole: ModelConfig) -> range:
        """Return the rows of a placement for this stage's layers: their indices among the MoE layers."""
        first, end = (
            bisect_left(moe_layers(whole.layer_runs), layer) for layer in (self.first, self.first + self.layers)
        )
        return range(first, end)

    def first_row(self, whole: ModelConfig) -> int:
        """Return this stage's first row of a placement: the number of MoE layers before it."""
        return self._moe_rows(whole).start

    def placement(self, whole: LayerPlacements, config: ModelConfig) -> LayerPlacements:
        """Return the rows of a placement for this stage's layers; rows of MTP modules come last. config: of the whole model."""
        own, rows = self._moe_rows(config), whole.physical_to_logical
        return dataclasses.replace(whole, physical_to_logical=rows[own.start : None if self.is_last else own.stop])

    def window(self, whole: ModelConfig) -> ParameterWindow:
        """Return the window on this stage's layers of ``in_whole``'s parameters; parameters outside layer stacks are whole."""
        borders = self.first, self.first + self.layers
        return ParameterWindow(
            {
                kind.stack: range(*(bisect_left(numbers, border) for border in borders))
                for kind, numbers in stacks(self.in_whole(whole).layer_runs).items()
            }
        )


def stages_of(config: ModelConfig, count: int, *, given: str | None = None, mtp: bool = False) -> list[Stage]:
    """Divide a model's layers among stages.

    given: value of ``--pp-layer-partition``, such as ``31,30``. None: minimise the work of the busiest stage; among equal
    divisions, prefer more layers in earlier stages. mtp: whether the last stage drafts.

    Raises:
        UserError: there are fewer layers than stages, or ``given`` is not ``count`` numbers that add up to the layers.
    """
    layers = config.num_hidden_layers
    if count > layers:
        raise UserError(f"pp={count} has more stages than the model has layers ({layers}); lower pp")
    numbers = _balance(config, count, mtp) if given is None else _parse_partition(given, count, layers)
    firsts = [sum(numbers[:number]) for number in range(count)]
    return [Stage(number, count, first, numbers[number]) for number, first in enumerate(firsts)]


def _parse_partition(given: str, count: int, layers: int) -> Sequence[int]:
    parts = given.replace(" ", "").split(",")
    numbers = [int(part) for part in parts if part.isdecimal()]
    if len(numbers) < len(parts) or len(numbers) != count or sum(numbers) != layers or 0 in numbers:
        raise UserError(
            f"--pp-layer-partition is {given!r}, expected {count} positive layer counts, one for each stage of pp={count}, with "
            f"the sum {layers}"
        )
    return numbers


def layer_work(config: ModelConfig, mtp: bool = False) -> tuple[list[int], int]:
    """Return the active parameters per token of each layer, and those after the last layer: head, and the MTP module if it drafts."""
    kinds = [kind for run in config.layer_runs for kind in run.kinds * run.count]
    work = [layer_parameters(config, kind, active=True) for kind in kinds]
    head_work = config.vocab_size * config.hidden_size
    if mtp and config.num_nextn_predict_layers:
        idle = (config.n_routed_experts - config.num_experts_per_tok) * expert_parameters(config)
        # A draft runs the LM head once more.
        head_work += parameter_counts(config)["mtp_module"] - idle + head_work
    return work, head_work


def _balance(config: ModelConfig, count: int, mtp: bool) -> Sequence[int]:
    work, head_work = layer_work(config, mtp)

    @cache
    def best(first: int, stages: int) -> tuple[int, tuple[int, ...]]:
        """Return the least work of the busiest stage, for layers from ``first`` on; and the stages' numbers of layers, negated."""
        if stages == 1:
            return sum(work[first:]) + head_work, (first - len(work),)
        divisions = []
        for end in range(first + 1, len(work) - stages + 2):
            rest, numbers = best(end, stages - 1)
            divisions.append((max(sum(work[first:end]), rest), (first - end, *numbers)))
        return min(divisions)

    return [-number for number in best(0, count)[1]]
