"""`StepBasis`: inputs for pricing a step of an instance; prices of its routed experts, dispatch, combine and two-batch overlap.

As published, all of a step's computation overlaps all of its communication; dsjax's own program overlaps them window by window
(``dsjax/model/two_batch.py``).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from dsjax.config import ModelConfig
from dsjax.plan.chip import Chip
from dsjax.plan.cluster import Cluster
from dsjax.plan.engine import Engine
from dsjax.plan.figure import assumed, assumption
from dsjax.plan.layout import InstanceLayout
from dsjax.plan.network import all_reduce, deepep_exchange, exchanged_rows, own_exchange
from dsjax.plan.operations import H800_SMS
from dsjax.plan.operator_tables import OperatorTables
from dsjax.plan.precision import BF16
from dsjax.plan.skew import Slots
from dsjax.plan.workload import PlanOptions
from sharding.dispatch import choose_method


@dataclass(frozen=True)
class StepBasis:
    """Inputs for pricing a step of one instance. Sizes are per DP rank, times in seconds."""

    config: ModelConfig
    cluster: Cluster
    layout: InstanceLayout
    options: PlanOptions
    overlap: bool = False  # two-batch overlap
    balancing: bool = True  # redundant experts are placed by their load
    # a dict shared by all layouts on one cluster, with the prices they have in common in the current draw
    shared: dict = field(default_factory=dict, compare=False, repr=False)
    chip: Chip = field(init=False)
    engine: Engine = field(init=False)
    dispatch: str = field(init=False)  # `deepep`, or a method of dsjax

    def __post_init__(self):
        options = self.options
        engine = options.engine
        rate = engine.fp8_rate if self.cluster.hardware.is_blackwell else None
        tables = self.once(tables_of(options.operators), dict)
        about = self.cluster.hardware, options.precision, options.operators, tables, {}, engine.fp8_mla, rate
        key = ("chip", id(options.operators), engine.fp8_mla, rate)
        object.__setattr__(self, "chip", self.once(key, lambda: Chip(*about)))
        object.__setattr__(self, "engine", engine)
        object.__setattr__(self, "dispatch", options.dispatch)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the value of `make`, computed once per draw for all layouts with the same key."""
        value = self.shared.get(key)
        if value is None:
            value = self.shared[key] = make()
        return value

    @property
    def places_by_load(self) -> bool:
        """Whether experts are rebalanced by load while serving."""
        return self.balancing and self.layout.redundant > 0

    @property
    def in_windows(self) -> bool:
        """Whether half batches overlap window by window, as in dsjax's own step (`dsjax/model/two_batch.py`), instead of as published."""
        return self.dispatch != "deepep"

    @cached_property
    def expert_slots(self) -> Slots:
        """Slots for the experts. Hosts count only if each copy of the experts fills whole hosts, as in the engine (`hosts_of_experts`)."""
        ranks = self.layout.mesh.ep_size
        devices_per_host = self.cluster.devices_per_host
        is_whole = ranks == self.layout.mesh.num_devices and ranks % devices_per_host == 0
        hosts = ranks // devices_per_host if is_whole else 1
        return Slots(ranks, self.config.n_routed_experts + self.layout.redundant, self.config.n_group, max(hosts, 1))

    def slowest(self, rows: float) -> float:
        """Return the load of the busiest rank ÷ the mean, with `rows` rows on the average rank (`Skew.slowest`)."""
        return self.options.skew.slowest(self.expert_slots, self.config.n_routed_experts, rows, self.places_by_load)

    def own_method(self, tokens: float, halved: bool = False) -> str:
        """Return the method of dsjax's own dispatch for `tokens` tokens per device (or per half batch), as the engine resolves it."""
        mesh = self.layout.mesh
        whole_tokens = max(1, math.ceil(tokens))
        about = {"overlapped": halved, "on_host": self._ranks_on_host, "routed_groups": self.routed_groups}
        return choose_method(self.dispatch, whole_tokens, self.config.num_experts_per_tok, mesh.ep_size, "gpu", **about)

    @cached_property
    def _ranks_on_host(self) -> int:
        return self.layout.mesh.expert_ranks_on_host(self.cluster.domain)

    @property
    def routed_groups(self) -> tuple[int, int] | None:
        """(expert groups, groups chosen per token); None if copies may be on other hosts than their group."""
        return self.config.routed_groups if self.layout.redundant == 0 else None

    @cached_property
    def sums_experts(self) -> bool:
        """Whether published kernels skip the dispatch: if one DP rank is the whole EP group, each device has every token and computes
        its own experts, and the layer's second all-reduce adds up the results (vLLM's all-to-all is for data parallelism; SGLang's
        `--moe-a2a-backend none`)."""
        return self.dispatch == "deepep" and self.layout.unit.mesh.dp_size == 1


def tables_of(operators: OperatorTables) -> tuple:
    """Return the key of `StepBasis.shared` for values read from operator tables for one device."""
    return ("tables", id(operators))


_TIMED = 7168, 2048, 8
"""V3's hidden size, expert width and experts per token. Kernels of whole layers were timed only with these."""


def routed_experts(
    step: StepBasis, tokens: float, decode: bool, busy: float = 1.0, halved: bool = False
) -> dict[str, float]:
    """Return the seconds of the routed experts, dispatch and combine in one layer.

    tokens: tokens of the fullest DP rank; busy: mean of all ranks ÷ `tokens`; halved: `tokens` are one of two half batches. The times
    depend on tokens per device and the EP group size: with whole experts, `dp=32` costs as much as `dp=16,tp=2` with twice the batch.
    """
    mesh = step.layout.mesh
    split = mesh.expert_width_shards
    alike = mesh.tp_size if split > 1 or step.dispatch != "deepep" else 1
    group = mesh.num_devices // mesh.expert_copies, step.expert_slots, split, step.places_by_load, alike
    how = step.layout.fused, step.sums_experts
    make = partial(_routed, step, tokens / mesh.tp_size, decode, busy, halved)
    return step.once(("experts", tokens / mesh.tp_size, decode, busy, halved, *group, *how), make)


def _routed(step: StepBasis, rank_tokens: float, decode: bool, busy: float, halved: bool) -> dict[str, float]:
    rows = rank_tokens * busy * step.config.num_experts_per_tok * step.layout.mesh.expert_width_shards
    slowest = step.slowest(rows)
    products = _products(step, rank_tokens * busy, rows * slowest, slowest, decode)
    there, back = _exchanges(step, rank_tokens, decode, slowest, halved)
    return {"experts": products, "dispatch": there, "combine": back}


def _products(step: StepBasis, rank_tokens: float, arriving: float, slowest: float, decode: bool) -> float:
    """Return the seconds of the busiest rank's expert GEMMs. rank_tokens: mean tokens per device; arriving: rows of the busiest rank."""
    config, mesh, chip = step.config, step.layout.mesh, step.chip
    places = step.expert_slots
    experts, top_k = config.n_routed_experts, config.num_experts_per_tok
    slots = places.physical // mesh.ep_size
    everyone = rank_tokens * (mesh.num_devices // mesh.expert_copies)
    skew = step.options.skew
    touched = partial(skew.touched, top_k=top_k, experts=experts)
    most_touched = partial(skew.most_touched, top_k=top_k, experts=experts, slots=slots, ranks=mesh.ep_size)
    used = most_touched(everyone)
    is_timed = False
    least = None
    if (config.hidden_size, config.moe_intermediate_size, top_k) != _TIMED:
        pass
    elif mesh.splits_expert_width:
        least = chip.fused_experts(everyone, touched, skew, mesh.expert_width_shards, mesh.ep_size)
        is_timed = not (decode and chip.hardware.is_blackwell)
        of_rank = touched(everyone)
    elif step.dispatch == "deepep" and mesh.ep_size > 1 and slots * mesh.ep_size == 256:

        def imbalance(tokens: float) -> float:
            return step.slowest(tokens * top_k / mesh.ep_size)

        about = (skew, places.physical), mesh.ep_size, None if decode else imbalance
        least, is_timed = chip.spread_experts(everyone, most_touched, *about) or (None, False)
        of_rank = used
    if least is not None and step.layout.fused:
        least = least * assumed(
            1 + 1 / of_rank, 1.0, 1 + max(1 / of_rank, 1 / top_k), "the shared expert in the same product",
            "one expert's weights more, or where rows take the time one in top-k of them",
        )  # fmt: skip
    if least is not None and is_timed:
        return least
    # With few tokens, the B200's table is faster than its memory can read the weights: decode takes the slower of both. With more tokens
    # than were timed, the time of the largest timed number is the lower bound.
    received = everyone * (1 - (1 - mesh.ep_size**-1) ** top_k) if mesh.ep_size > 1 else everyone
    if step.layout.fused:  # one more expert in the same GEMM, with all tokens of the ranks that share its width
        used += 1
        arriving += rank_tokens * mesh.expert_width_shards
        slots += 1
    inner = config.moe_intermediate_size // mesh.expert_width_shards
    return max(chip.experts(used, arriving, received * slowest, slots, config.hidden_size, inner, decode), least or 0.0)


def _exchanges(step: StepBasis, rank_tokens: float, decode: bool, slowest: float, halved: bool) -> tuple[float, float]:
    config, cluster, mesh = step.config, step.cluster, step.layout.mesh
    width, top_k, split = config.hidden_size, config.num_experts_per_tok, mesh.expert_width_shards
    rows = width * step.options.precision.wire, width * BF16
    if step.dispatch != "deepep":
        return _own_exchange(step, rank_tokens, slowest, halved)
    if step.sums_experts:
        there = back = 0.0
    elif "etp" in mesh.axes:
        return _both_exchanges(step, "even", rank_tokens, slowest, halved, split)
    else:
        # With one EP rank, the all-reduce over tp is the exchange.
        ranks = mesh.num_devices // mesh.expert_copies if mesh.ep_size > 1 else 1
        ways = tuple(zip(rows, (False, True), strict=True))
        normal, low_latency = (
            [
                deepep_exchange(
                    cluster, config, ranks, rank_tokens, row, slowest, combine, low, step.options.operators, step.shared
                )
                for row, combine in ways
            ]
            for low in (False, True)
        )
        # Decode takes the faster of DeepEP's two kinds of kernels. Capturing the normal ones in a CUDA graph is not priced.
        there, back = low_latency if decode and sum(low_latency) <= sum(normal) else normal
    if mesh.splits_expert_width and mesh.ep_size > 1 and "etp" not in mesh.axes:
        back = back + all_reduce(cluster, split, rank_tokens * split * top_k * width * BF16)
    return there, back


def _own_exchange(step: StepBasis, rank_tokens: float, slowest: float, halved: bool) -> tuple[float, float]:
    """Return dispatch and combine of dsjax's own dispatch. Combine includes gathering a replica's tokens from its ``tp`` ranks."""
    mesh = step.layout.mesh
    method = step.own_method(rank_tokens, halved)
    if mesh.ep_size == 1 and mesh.num_devices // mesh.expert_copies == mesh.tp_size > 1:
        there, back = (_half_all_reduce(step, rank_tokens * row) for row in _wire_rows(step))
    else:
        sharing = 1 if method == "gather" else mesh.expert_width_shards
        there, back = _both_exchanges(step, method, rank_tokens, slowest, halved, sharing)
    if mesh.tp_size > 1:
        back = back + _half_all_reduce(step, rank_tokens * step.config.hidden_size * BF16)
    return there, back


def _both_exchanges(
    step: StepBasis, method: str, rank_tokens: float, slowest: float, halved: bool, sharing: int
) -> tuple[float, float]:
    """Return the seconds of dispatch and combine by a method of dsjax's own dispatch. sharing: ranks that share an expert's width."""
    mesh, top_k = step.layout.mesh, step.config.num_experts_per_tok
    about = step.cluster, method, mesh.num_devices // mesh.expert_copies // sharing, rank_tokens, top_k
    how = slowest, halved, step.routed_groups, sharing
    pooled = zip(_wire_rows(step), ("all_gather", "reduce_scatter"), strict=True)
    return tuple(own_exchange(*about, row, *how, kind) for row, kind in pooled)


def _wire_rows(step: StepBasis) -> tuple[float, float]:
    """Return a token's bytes in dispatch (with float32 weights, 16-bit ids and a spare word: sharding/dispatch/wire.py) and in combine."""
    width = step.config.hidden_size
    return width * step.options.precision.wire + 6 * step.config.num_experts_per_tok + 4, width * BF16


def _half_all_reduce(step: StepBasis, rank_bytes: float) -> float:
    """Return the seconds of an all-gather or reduce-scatter over ``tp``: those of an all-reduce that sends as many bytes."""
    tp = step.layout.mesh.tp_size
    return all_reduce(step.cluster, tp, rank_bytes * tp / 2)


HALVES = "layers, two halves overlapped"
"""Name of the part of a step that was priced with two-batch overlap."""
_LAUNCHES = 32, 7
"""Extra small operations per layer and half batch: in attention and routing (beside `small kernels`), and in the experts' part."""


def overlapped_layers(step: StepBasis, decode: bool, half: dict[str, float]) -> float:
    """Return the seconds of layers that overlap as published: the longer of work and exchanges, plus the exposed part of the shorter."""
    talk = 2 * (half["dispatch"] + half["combine"])
    work = 2 * sum(half.values()) - talk
    if not decode:
        work = work / (1 - _communicating(step))
    elif (
        step.cluster.hardware.platform == "cuda"
    ):  # low-latency kernels leave the multiprocessors free only while rows travel
        work = work + talk * assumption("share of an exchange that is copies")
    return max(work, talk) + min(work, talk) * (1 - assumption("share of the shorter that is hidden"))


def windowed_layers(step: StepBasis, tokens: float, decode: bool, layers: int, half: dict[str, float]) -> float:
    """Return the seconds of `layers` MoE layers. Each of a layer's four windows takes the longer of communication and computation.

    tokens: tokens of the whole step; half: seconds of the layers' parts for one half batch.
    """
    there, back = half["dispatch"], half["combine"]
    experts = half["experts"] + half.get("shared experts", 0.0)
    first = sum(half.values()) - there - back - experts
    if step.cluster.hardware.platform == "cuda":
        launch = assumption("a launch more of a half") * layers
        first, experts = (time + launch * more for time, more in zip((first, experts), _LAUNCHES, strict=True))
    if not decode:
        experts, first = (time / (1 - _communicating(step)) for time in (experts, first))
    windows = sum(max(*pair) for pair in ((back, first), (there, first), (there, experts), (back, experts)))
    return windows + (there + back + experts) * (2 * further_rounds(step, tokens))  # nothing overlaps these


def further_rounds(step: StepBasis, tokens: float) -> int:
    """Return how many more rounds to the busiest rank half batches need than the whole batch, whose own extra rounds are not priced."""
    mesh, top_k = step.layout.mesh, step.config.num_experts_per_tok
    needed = []
    for rank_tokens, halved in ((tokens / mesh.tp_size / 2, True), (tokens / mesh.tp_size, False)):
        if step.own_method(rank_tokens, halved) not in ("padded", "hierarchical"):
            needed.append(1)
            continue
        rows = rank_tokens * top_k * mesh.expert_width_shards
        load = step.slowest(rows)
        room = exchanged_rows("padded", rank_tokens, top_k, mesh.ep_size, halved)
        needed.append(math.ceil(load * exchanged_rows("ragged", rank_tokens, top_k, mesh.ep_size) / room))
    return max(0, needed[0] - needed[1])


def _communicating(step: StepBasis) -> float:
    """Return the share of a GPU that communicates in prefill instead of computing."""
    if step.cluster.hardware.platform != "cuda":
        return 0.0
    who = "multiprocessors that NCCL takes" if step.in_windows else "multiprocessors that communicate"
    return assumption(who) / H800_SMS
