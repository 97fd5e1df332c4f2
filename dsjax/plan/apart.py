"""Steps of a layout whose attention and routed experts are on devices of their own (``docs/attention-ffn-disaggregation.md``).

Attention's parts are those of any step. The experts' are those of a step of the devices that have them, whose tokens are all attention
devices' together. Layers are played micro-batch after micro-batch (`turns.py`): with dsjax's own moves, the host between the two sides, or
with those that MegaScale-Infer, StepFun and Baidu publish, rows straight from device to device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dsjax.config import ModelConfig
from dsjax.plan.balancing import Slots
from dsjax.plan.cluster import Cluster
from dsjax.plan.host_time import step_message
from dsjax.plan.layout import InstanceLayout
from dsjax.plan.moves import Moves, moves, processes_of, published_moves
from dsjax.plan.precision import BF16, Precision
from dsjax.plan.skew import Skew
from dsjax.plan.step import StepModel
from dsjax.plan.turns import Turn, play_turns
from sharding.dispatch import default_capacity

IN_TURN = "layers, attention and experts in turn"
"""The part of a step that says that it was priced so."""
_AHEAD = 3, 6
"""Layers after which turns repeat, and so many are played: the rest is as long as between the two."""


class ExpertStep(StepModel):
    """What a step of the devices with experts costs."""

    @cached_property
    def expert_slots(self) -> Slots:
        """Where the experts may lie: on any of the devices, as in the engine. Rows come from others, to which none is nearer."""
        return super().expert_slots._replace(hosts=1)


@dataclass(frozen=True)
class ApartStep(StepModel):
    """What a step costs. `layout` and `cluster` are of the attention side, but for `layout.experts` and `cluster.experts`.

    micro_batches: of a step, in turn. published: with moves as they are published, and not dsjax's own. expert_side: what the experts'
    devices alone would make of a step.
    """

    micro_batches: int = 1
    published: bool = False
    expert_side: StepModel = field(init=False)

    def __post_init__(self):
        super().__post_init__()
        there = self.expert_cluster
        alike = there.hardware is self.cluster.hardware
        known = (
            self.shared if alike else self.shared.setdefault(("experts on", there.hardware.key, id(there.hardware)), {})
        )
        others = {
            one.name: getattr(self, one.name)
            for one in dataclasses.fields(StepModel)
            if one.init and one.name not in ("config", "cluster", "layout", "shared", "overlap", "dry_runs")
        }
        layout = InstanceLayout(self.layout.expert_mesh, self.layout.redundant)
        object.__setattr__(self, "expert_side", ExpertStep(self.config, there, layout, shared=known, **others))

    @property
    def expert_cluster(self) -> Cluster:
        """Hosts of the experts."""
        return self.cluster.experts or self.cluster

    def beside(self, tokens: float, rows: float, decode: bool) -> dict[str, float]:
        """What a step takes beside layers and head: where attention has several processes of dsjax, its command on its way to them too."""
        parts = super().beside(tokens, rows, decode)
        if not self.published and processes_of(self.cluster, self.layout.mesh.num_devices) > 1:
            parts["command to the other processes"] = self._known("step message", step_message)
        return parts

    def moving(self) -> dict[str, float]:
        """Experts move between the devices that have them."""
        return self.expert_side.moving()

    def parts(self, tokens: float, read: float, context: float, decode: bool) -> dict[str, float]:
        """What all layers cost by name, computed one after the other."""
        return self._parts(tokens, read, context, decode, self.config.num_hidden_layers, 1.0, None)

    def _routed(self, tokens: float, decode: bool, layers: int, busy: float, halved: bool) -> dict[str, float]:
        """The experts' products, of the tokens of all attention devices."""
        each = tokens * self.layout.mesh.dp_size / self.layout.experts
        return {"experts": self.expert_side._routed(each, decode, layers, busy, False)["experts"]}

    def _layers(
        self,
        tokens: float,
        read: float,
        context: float,
        decode: bool,
        layers: int,
        wait: float,
        dense: int | None = None,
        busy: float = 1.0,
    ) -> dict[str, float]:
        """Price a step: layers without experts as a whole, those with experts in turn."""
        dense = self.config.num_dense_layers if dense is None else dense
        moe = layers - dense
        parts = self._parts(tokens, read, context, decode, dense, wait, dense, busy) if dense else {}
        if moe:
            parts[IN_TURN] = self._in_turn(tokens, read, context, decode, moe, wait, busy)
        return parts

    def _in_turn(
        self, tokens: float, read: float, context: float, decode: bool, layers: int, wait: float, busy: float
    ) -> float:
        batches = self.micro_batches if layers > 1 else 1  # the MTP module's layer has the whole step
        tokens, read = tokens / batches, read / batches
        each = self._parts(tokens, read, context, decode, layers, wait, 0, busy)
        shared, computed = each.pop("shared experts", None), each.pop("experts")
        attention = sum(each.values()) / layers
        way = self._moves(tokens, busy)
        turn = Turn(
            attend=attention,
            share=shared / layers if shared else 0.0,
            receive=self._answers(tokens),
            compute=computed / layers,
            there=way.there,
            back=way.back,
            launch=way.launch,
            begin_there=way.begin_there,
            begin_back=way.begin_back,
        )
        return _seconds(turn, batches, layers, way.one_call)

    def _answers(self, tokens: float) -> float:
        """Seconds in which an attention device adds the answers to its rows."""
        rows, width = tokens / self.layout.mesh.tp_size, self.config.hidden_size * BF16
        answers = 1.0 if self.published else self._room(rows) * self.layout.experts / max(1.0, rows)
        return self.chip.stream((answers + 2) * rows * width)

    def _room(self, rows: float) -> int:
        """Rows of an attention device that there is room for to one expert device, as `sharding.dispatch.between` has it."""
        return default_capacity(max(1, math.ceil(rows)), self.config.num_experts_per_tok, self.layout.experts, True)

    def _moves(self, tokens: float, busy: float) -> Moves:
        """One exchange of a layer with so many tokens of a DP rank."""
        config, mesh, E, side = self.config, self.layout.mesh, self.layout.experts, self.expert_side
        top_k, width = config.num_experts_per_tok, config.hidden_size
        sizes = width * self.precision.wire + 6 * top_k + 4, width * BF16
        key = ("moves", mesh, E, self.layout.redundant, tokens, busy, self.published, self.places_by_load)
        if key in self.shared:
            return self.shared[key]
        rows, senders = tokens / mesh.tp_size, mesh.num_devices
        arriving = rows * senders * busy * top_k / E
        slowest = side.skew.slowest(side.expert_slots, config.n_routed_experts, arriving, side.places_by_load)
        if self.published:
            made = published_moves(self.cluster, self.expert_cluster, senders, E, rows, top_k, sizes, slowest)
        else:
            needed, room = rows * (1 - (1 - 1 / E) ** top_k), self._room(rows)
            made = moves(self.cluster, self.expert_cluster, senders, E, room, needed * slowest, sizes)
            further = math.ceil(needed * slowest / room) - 1 if room < rows else 0
            if further > 0:  # in which both sides wait for each other
                again = made
                if made.one_call:  # the rows are those that are needed, in however many rounds
                    again = moves(self.cluster, self.expert_cluster, senders, E, room, 0.0, sizes)
                once = again.there + again.back + again.begin_there + again.begin_back + again.launch * 3
                made = dataclasses.replace(made, back=made.back + once * further)
        self.shared[key] = made
        return made


def _seconds(turn: Turn, batches: int, layers: int, one_call: bool) -> float:
    """Seconds of so many layers: of a few, and of the rest as each of the last of them takes."""
    few, more = _AHEAD
    if layers <= more:
        return play_turns([turn] * batches, layers, one_call=one_call).seconds
    first, then = (play_turns([turn] * batches, n, one_call=one_call).seconds for n in (few, more))
    return then + (then - first) / (more - few) * (layers - more)


def apart_models(
    config: ModelConfig,
    cluster: Cluster,
    layout: InstanceLayout,
    precision: Precision,
    skew: Skew,
    counts: Sequence[int],
    *,
    published: bool,
    **others: Any,
) -> list[ApartStep]:
    """A step in each of these numbers of micro-batches; 1: as a whole."""
    others["shared_beside"] = False  # they are computed while the rows are away
    return [
        ApartStep(
            config,
            cluster,
            layout,
            precision,
            skew,
            overlap=count > 1,
            micro_batches=count,
            published=published,
            **others,
        )
        for count in counts
    ]
