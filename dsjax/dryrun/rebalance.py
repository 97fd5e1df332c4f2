"""`ExpertMoves`: cost of moving experts while serving: bytes, exchanges, steps, predicted seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from dsjax.dryrun.compilation import CompiledStep
from dsjax.dryrun.prices import Assumed, FigureEnd, TargetPrices
from dsjax.dryrun.program import Program, program_collectives
from dsjax.engine.device import expert_programs
from dsjax.engine.experts.eplb import EplbConfig
from dsjax.plan.cluster import Cluster
from dsjax.plan.figure import Figure, Kind
from dsjax.plan.skew import DEFAULT_SKEW, DRIFT, Slots, drawn
from sharding.balancing import by_host, experts_moved, keep_in_place, rebalance
from sharding.layer_placement import exchange_rounds
from sharding.placement import Placement


class Exchange(NamedTuple):
    """One `StageExperts`: experts that the busiest rank sends or receives, inside its scale-up domain and between domains."""

    inside: int
    between: int


@dataclass(frozen=True)
class Moves:
    """Moves of a rebalance of all layers. Numbers are means over the drawn layers."""

    experts: float  # slots of a layer, over all ranks, that get another expert
    received: float  # most experts that one rank receives in a layer
    exchanges: float  # commands that send a layer's experts
    # of a layer's exchanges and of writing its experts into their slots; None without a target's figures
    seconds: Figure | None


@dataclass(frozen=True)
class ExpertMoves:
    """Cost of moving experts with `--enable-eplb`. Bytes are per device."""

    policy: str
    max_bytes_per_step: int
    expert_bytes: int  # of one expert, or of the device's part if experts are split along their width
    staging_bytes: int  # of the buffer, which holds one layer's slots
    experts_per_exchange: int  # maximum that a rank receives between two steps, limited by `max_bytes_per_step`
    sent_bytes: int  # input of the compiled exchange per rank
    exchange_temporaries: int  # of the larger of the two programs
    layers: int  # number of layers with experts
    first: Moves  # from the initial placement, which knows no load
    next: Moves  # from one window to the next, whose load has drifted

    def steps(self, moves: Moves) -> int:
        """Return the steps that a rebalance of all layers takes, with one exchange or one layer's write between two steps."""
        return round(self.layers * (moves.exchanges + 1))

    def to_json(self) -> dict[str, Any]:
        """The fields of `ExpertMoves`; `first` and `next` have the fields of `Moves`.

        Each also has `received_bytes` of the rank that receives most in a layer, `layer_seconds`, and `steps` for all layers.
        """
        body = {name: value for name, value in vars(self).items() if not isinstance(value, Moves)}
        for name in ("first", "next"):
            moves: Moves = getattr(self, name)
            body[name] = {
                "experts": moves.experts,
                "received": moves.received,
                "received_bytes": moves.received * self.expert_bytes,
                "exchanges": moves.exchanges,
                "layer_seconds": moves.seconds and moves.seconds.to_json(),
                "steps": self.steps(moves),
            }
        return body


def read_rebalance(compiled: CompiledStep, config: EplbConfig, machines: Cluster | None) -> ExpertMoves:
    """Read the programs that move experts, and run the policy on the planner's assumed loads. machines: None on the CPU target."""
    step, exchange = compiled.step, compiled.exchange
    ranks, physical = step.spec.ep_size, step.placement.n_physical
    per_host = machines.devices_per_host if machines else ranks
    has_whole_groups = ranks * step.spec.expert_copies == step.spec.num_devices and ranks % per_host == 0
    hosts = max(ranks // per_host, 1) if has_whole_groups else 1
    slots = Slots(ranks, physical, step.config.n_group, hosts)
    domain = min(machines.domain, ranks) if machines else ranks
    loads = drawn(DEFAULT_SKEW.variation, step.config.n_routed_experts, DRIFT[0])
    seen, served = (_placed(load, slots, config.policy) for load in (loads.seen, loads.served))
    start = np.tile(
        Placement.with_redundancy(step.config.n_routed_experts, physical, ranks=ranks).physical_to_logical,
        (len(seen), 1),
    )
    size = expert_programs.expert_bytes(step)
    prices = Assumed.of(machines) if machines else None

    def moves(old: np.ndarray, new: np.ndarray) -> Moves:
        kept = keep_in_place(old, new, ranks, hosts if by_host(config.policy, slots.groups, hosts) else 1)
        return _moves(old, kept, slots, exchange.experts, domain, size, prices)

    program = Program.parse(exchange.stage.text())
    sent = program_collectives(program, dict(step.mesh.shape), host_devices=domain, trip_count=lambda *_: 1)
    return ExpertMoves(
        policy=config.policy,
        max_bytes_per_step=config.max_bytes_per_step,
        expert_bytes=size,
        staging_bytes=expert_programs.staging_bytes(step),
        experts_per_exchange=exchange.experts,
        sent_bytes=sum(collective.operand_bytes for collective in sent),
        exchange_temporaries=exchange.temporaries,
        layers=step.num_moe_layers_with_mtp,
        first=moves(start, seen),
        next=moves(seen, served),
    )


def _placed(load: np.ndarray, slots: Slots, policy: str) -> Int[np.ndarray, "L P"]:
    return rebalance(
        load, n_physical=slots.physical, ranks=slots.ranks, groups=slots.groups, hosts=slots.hosts, policy=policy
    )


def _moves(
    old: np.ndarray, kept: np.ndarray, slots: Slots, per_exchange: int, domain: int, size: int, assumed: Assumed | None
) -> Moves:
    layers = [
        list(exchange_rounds(*pair, ranks=slots.ranks, experts=per_exchange)) for pair in zip(old, kept, strict=True)
    ]
    slots_per_rank = slots.physical // slots.ranks
    received = [
        np.bincount([slot // slots_per_rank for moves in rounds for _, slot in moves], minlength=slots.ranks).max()
        for rounds in layers
    ]
    seconds = None
    if assumed:
        busiest = [[_busiest(moves, slots_per_rank, slots.ranks, domain) for moves in rounds] for rounds in layers]

        def mean(end: FigureEnd) -> float:
            prices = TargetPrices(assumed, end)
            pairs = zip(busiest, received, strict=True)
            return float(np.mean([_seconds(prices, exchanges, int(most), size) for exchanges, most in pairs]))

        ends = (mean("value"), mean("low"), mean("high"))
        seconds = Figure(*ends, Kind.ASSUMPTION, name="moving a layer's experts", unit="s")
    return Moves(
        float(experts_moved(old, kept).mean()),
        float(np.mean(received)),
        float(np.mean([len(rounds) for rounds in layers])),
        seconds,
    )


def _busiest(moves: Iterable[tuple[int, int]], slots_per_rank: int, ranks: int, domain: int) -> Exchange:
    """Return the experts of one exchange on the busiest rank, for each kind of link separately."""
    counts = np.zeros((2, 2, ranks), int)  # inside or between domains; sent or received
    for source, slot in moves:
        start, end = source // slots_per_rank, slot // slots_per_rank
        if start != end:
            away = int(start // domain != end // domain)
            counts[away, 0, start] += 1
            counts[away, 1, end] += 1
    return Exchange(int(counts[0].max()), int(counts[1].max()))


def _seconds(prices: TargetPrices, exchanges: Iterable[Exchange], received: int, size: int) -> float:
    """Return a layer's seconds: gather and send the experts, write them to the staging buffer, and copy them into their slots."""
    seconds = prices.copied(received * size)
    for exchange in exchanges:
        links = prices.links(exchange.inside * size, exchange.between * size, 1 if exchange.between else 0)
        seconds += prices.copied(max(exchange) * size) + max((work.seconds for work in links.values()), default=0.0)
    return seconds
