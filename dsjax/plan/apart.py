"""Steps of attention–FFN disaggregation (``docs/attention-ffn-disaggregation.md``): micro-batches take turns layer by layer (`turns.py`),
and the host moves rows between the two sides."""

import dataclasses
import math
from dataclasses import dataclass, field
from functools import cached_property

from dsjax.plan.figure import assumption
from dsjax.plan.layout import InstanceLayout
from dsjax.plan.moves import Moves, moves, processes_of
from dsjax.plan.precision import BF16
from dsjax.plan.skew import Slots
from dsjax.plan.step import LayersWork, StepModel
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
    """What a step costs. `layout` is of the attention side, but for `layout.experts`."""

    micro_batches: int = 1
    expert_side: StepModel = field(init=False)  # what the experts' devices alone would make of a step

    def __post_init__(self):
        super().__post_init__()
        layout = InstanceLayout(self.layout.expert_mesh, self.layout.redundant)
        about = {"balancing": self.balancing, "shared": self.shared}
        side = ExpertStep(self.config, self.cluster, layout, self.options, **about)
        object.__setattr__(self, "expert_side", side)

    def beside(self, tokens: float, rows: float, decode: bool) -> dict[str, float]:
        """What a step takes beside layers and head: where attention has several processes of dsjax, its command on its way to them too."""
        parts = super().beside(tokens, rows, decode)
        if processes_of(self.cluster, self.layout.mesh.num_devices) > 1:
            parts["command to the other processes"] = assumption("a step's command to the other processes")
        return parts

    def routed(self, tokens: float, decode: bool, busy: float, halved: bool) -> dict[str, float]:
        """The experts' products in one layer, of the tokens of all attention devices."""
        each = tokens * self.layout.mesh.dp_size / self.layout.experts
        return {"experts": self.expert_side.routed(each, decode, busy, False)["experts"]}

    def layers(self, work: LayersWork) -> dict[str, float]:
        """Price layers without experts as a whole, and those with experts in turn."""
        parts = self.parts(work.share(1, routed=False)) if work.dense else {}
        if moe := work.layers - work.dense:
            # The MTP module's layer has the whole step.
            parts[IN_TURN] = self._in_turn(work.share(self.micro_batches if moe > 1 else 1, routed=True))
        return parts

    def _in_turn(self, work: LayersWork) -> float:
        """Seconds of layers with experts. work: of one micro-batch."""
        each = {name: seconds / work.layers for name, seconds in self.parts(work).items()}
        shared = each.pop("shared experts", 0.0)
        computed = each.pop("experts")
        way = self._moves(work.tokens, work.busy)
        moved = way.there, way.back, way.launch, way.begin_there, way.begin_back
        turn = Turn(sum(each.values()), shared, self._answers(work.tokens), computed, *moved)
        return _seconds(turn, self.micro_batches if work.layers > 1 else 1, work.layers, way.one_call)

    def _answers(self, tokens: float) -> float:
        """Seconds in which an attention device adds the answers to its rows."""
        rows = tokens / self.layout.mesh.tp_size
        answers = self._room(rows) * self.layout.experts / max(1.0, rows)
        return self.chip.stream((answers + 2) * rows * self.config.hidden_size * BF16)

    def _room(self, rows: float) -> int:
        """Rows of an attention device that there is room for to one expert device, as `sharding.dispatch.between` has it."""
        return default_capacity(max(1, math.ceil(rows)), self.config.num_experts_per_tok, self.layout.experts, True)

    def _moves(self, tokens: float, busy: float) -> Moves:
        """One exchange of a layer with so many tokens of a DP rank."""
        config, mesh, receivers, side = self.config, self.layout.mesh, self.layout.experts, self.expert_side
        top_k, sides = config.num_experts_per_tok, (self.cluster, self.cluster, mesh.num_devices, receivers)
        sizes = config.hidden_size * self.options.precision.wire + 6 * top_k + 4, config.hidden_size * BF16
        rows = tokens / mesh.tp_size
        arriving = rows * mesh.num_devices * busy * top_k / receivers
        needed, room = rows * (1 - (1 - 1 / receivers) ** top_k) * side.slowest(arriving), self._room(rows)
        made = moves(*sides, room, needed, sizes)
        further = math.ceil(needed / room) - 1 if room < rows else 0
        if further <= 0:
            return made
        # Further rounds, in which both sides wait for each other; in one call the rows are those that are needed, in however many rounds.
        again = moves(*sides, room, 0.0, sizes) if made.one_call else made
        once = again.there + again.back + again.begin_there + again.begin_back + again.launch * 3
        return dataclasses.replace(made, back=made.back + once * further)


def _seconds(turn: Turn, batches: int, layers: int, one_call: bool) -> float:
    """Seconds of so many layers: of a few, and of the rest as each of the last of them takes."""
    few, more = _AHEAD
    if layers <= more:
        return play_turns([turn] * batches, layers, one_call=one_call).seconds
    first, then = (play_turns([turn] * batches, n, one_call=one_call).seconds for n in (few, more))
    return then + (then - first) / (more - few) * (layers - more)
