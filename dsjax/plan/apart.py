"""Steps of attention–FFN disaggregation (``docs/attention-ffn-disaggregation.md``): micro-batches take turns layer by layer (`turns.py`),
and the host moves rows between the two sides."""

import dataclasses
import math
from dataclasses import dataclass, field
from functools import cached_property

from dsjax.plan.figure import assumption
from dsjax.plan.layout import InstanceLayout
from dsjax.plan.moves import AfdExchange, afd_exchange, processes_of
from dsjax.plan.precision import BF16
from dsjax.plan.skew import Slots
from dsjax.plan.step import LayersWork, StepModel
from dsjax.plan.turns import LayerTimes, simulate_layers
from sharding.dispatch import default_capacity

IN_TURN = "layers, attention and experts in turn"
"""Name of the part of a step for MoE layers that are priced as micro-batches in turn."""
_FEWER_LAYERS, _MORE_LAYERS = 3, 6
"""Numbers of layers that are simulated. The schedule is periodic, so each further layer takes as long as those between the two."""


class ExpertStep(StepModel):
    """Cost of a step on the expert devices."""

    @cached_property
    def expert_slots(self) -> Slots:
        """Slots of the experts: any of the devices, as in the engine. Rows come from the attention devices, equally far from all."""
        return super().expert_slots._replace(hosts=1)


@dataclass(frozen=True)
class ApartStep(StepModel):
    """Cost of a step with AFD. `layout` describes the attention side, except for `layout.experts`."""

    micro_batches: int = 1
    expert_side: StepModel = field(init=False)  # cost model of the expert devices

    def __post_init__(self):
        super().__post_init__()
        layout = InstanceLayout(self.layout.expert_mesh, self.layout.redundant)
        about = {"balancing": self.balancing, "shared": self.shared}
        side = ExpertStep(self.config, self.cluster, layout, self.options, **about)
        object.__setattr__(self, "expert_side", side)

    def overhead(self, tokens: float, rows: float, decode: bool) -> dict[str, float]:
        """Return the costs besides layers and head, including the command to the other processes if attention has several."""
        parts = super().overhead(tokens, rows, decode)
        if processes_of(self.cluster, self.layout.mesh.num_devices) > 1:
            parts["command to the other processes"] = assumption("a step's command to the other processes")
        return parts

    def routed(self, tokens: float, decode: bool, busy: float, halved: bool) -> dict[str, float]:
        """Return the seconds of the experts' products in one layer, for the tokens of all attention devices."""
        rows_per_device = tokens * self.layout.mesh.dp_size / self.layout.experts
        return {"experts": self.expert_side.routed(rows_per_device, decode, busy, False)["experts"]}

    def layers(self, work: LayersWork) -> dict[str, float]:
        """Price dense layers as a whole, and MoE layers as micro-batches in turn."""
        parts = self.parts(work.share(1, routed=False)) if work.dense else {}
        if moe := work.layers - work.dense:
            # The MTP module's one layer is not split into micro-batches.
            parts[IN_TURN] = self._in_turn(work.share(self.micro_batches if moe > 1 else 1, routed=True))
        return parts

    def _in_turn(self, work: LayersWork) -> float:
        """Return the seconds of the MoE layers. work: of one micro-batch."""
        parts = {name: seconds / work.layers for name, seconds in self.parts(work).items()}
        shared = parts.pop("shared experts", 0.0)
        experts = parts.pop("experts")
        exchange = self._exchange(work.tokens, work.busy)
        combine = self._combine(work.tokens)
        times = LayerTimes(sum(parts.values()), shared, combine, experts, exchange)
        return _layers_seconds(times, self.micro_batches if work.layers > 1 else 1, work.layers)

    def _combine(self, tokens: float) -> float:
        """Return the seconds in which an attention device adds the experts' results to its rows."""
        rows = tokens / self.layout.mesh.tp_size
        answers = self._capacity(rows) * self.layout.experts / max(1.0, rows)
        return self.chip.stream((answers + 2) * rows * self.config.hidden_size * BF16)

    def _capacity(self, rows: float) -> int:
        """Return the row capacity from an attention device to one expert device, as in `sharding.dispatch.between`."""
        return default_capacity(max(1, math.ceil(rows)), self.config.num_experts_per_tok, self.layout.experts, True)

    def _exchange(self, tokens: float, busy: float) -> AfdExchange:
        """Price one exchange of a layer for `tokens` tokens of a DP rank."""
        config, mesh, receivers = self.config, self.layout.mesh, self.layout.experts
        top_k = config.num_experts_per_tok
        sides = (self.cluster, self.cluster, mesh.num_devices, receivers)
        sizes = config.hidden_size * self.options.precision.wire + 6 * top_k + 4, config.hidden_size * BF16
        rows = tokens / mesh.tp_size
        arriving = rows * mesh.num_devices * busy * top_k / receivers
        needed = rows * (1 - (1 - 1 / receivers) ** top_k) * self.expert_side.slowest(arriving)
        capacity = self._capacity(rows)
        exchange = afd_exchange(*sides, capacity, needed, sizes)
        more_rounds = math.ceil(needed / capacity) - 1 if capacity < rows else 0
        if more_rounds <= 0:
            return exchange
        # In further rounds both sides wait for each other. With one call, only the needed rows move, however many rounds there are.
        again = afd_exchange(*sides, capacity, 0.0, sizes) if exchange.one_call else exchange
        round_seconds = again.there + again.back + again.begin_there + again.begin_back + again.launch * 3
        return dataclasses.replace(exchange, back=exchange.back + round_seconds * more_rounds)


def _layers_seconds(times: LayerTimes, micro_batches: int, layers: int) -> float:
    """Return the seconds of `layers` layers: simulate a few, and extrapolate from the last of them."""

    def simulated(count: int) -> float:
        return simulate_layers([times] * micro_batches, count).seconds

    if layers <= _MORE_LAYERS:
        return simulated(layers)
    fewer, more = simulated(_FEWER_LAYERS), simulated(_MORE_LAYERS)
    return more + (more - fewer) / (_MORE_LAYERS - _FEWER_LAYERS) * (layers - _MORE_LAYERS)
