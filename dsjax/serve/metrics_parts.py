"""Metrics of what not every engine has: experts and their balance, drafts, a mesh that changes, an engine beside that computes prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from dsjax.engine.contract.executor import ExpertCounts
from dsjax.engine.experts.eplb import BalanceStats
from dsjax.engine.stats import DraftCounts
from dsjax.serve.metrics_families import Counter, Gauge, Labels, Registry, Total
from sharding.balancing import balancedness_of_ranks

if TYPE_CHECKING:  # they bring JAX in
    from dsjax.engine.elastic.generations import Generations
    from dsjax.engine.prefill_engine import PrefillEngine

_Samples = Iterable[tuple[Labels, float]]

_OF = "of=sums: the layers' means over their maxima, each summed; of=layers: mean of the layers' ratios."
"""The meanings of balancedness, the same wherever it is shown."""


class ExpertMetrics:
    """Which experts the tokens went to, and what sending them cost, while recording is on.

    Shows the engine's own sums, read at the scrape; nothing before the first recorded step.

    The sums begin anew when recording does, which Prometheus takes for a restart and counts right. A sample a layer and expert
    would be 15,000 of V3's, so experts are summed over layers; `/dump_expert_distribution_record` has each layer.

    Args:
        experts_per_device: physical experts of one device. Expert `x` lives on place `x // experts_per_device` of each EP
            group; the label `ep_rank` says which.
    """

    def __init__(self, registry: Registry, model_name: str, experts_per_device: int):
        self._model, self._per_device = model_name, experts_per_device
        self._counts: ExpertCounts | None = None

        def total(name: str, documentation: str, read: Callable[[ExpertCounts], _Samples], *labels: str) -> None:
            Total(registry, name, documentation, ("model_name", *labels), lambda: self._read(read))

        def one(value: Callable[[ExpertCounts], float]) -> Callable[[ExpertCounts], _Samples]:
            return lambda counts: [((model_name,), value(counts))]

        total(
            "dsjax_expert_tokens",
            "Tokens that each physical expert computed, over all MoE layers.",
            self._expert_tokens,
            "expert",
            "ep_rank",
        )
        total("dsjax_dispatch_rows", "Rows of tokens that each device sent to others.", self._rows, "device")
        total("dsjax_dispatch_rounds", "Rounds of dispatch, of the layer with most.", one(lambda c: c.rounds))
        total("dsjax_dispatch_bytes", "Bytes that all devices sent to dispatch.", one(lambda c: c.dispatch_bytes))
        Gauge(
            registry,
            "dsjax_dispatch_padding_share",
            "Share of the exchange's rows that held no token, since recording began.",
            ("model_name",),
            lambda: self._read(one(lambda c: c.padding_share)),
        )
        Gauge(
            registry,
            "dsjax_expert_balancedness",
            f"Mean over max of the EP ranks' tokens since recording began; {_OF}",
            ("model_name", "of"),
            lambda: self._read(self._balancedness),
        )

    def begin(self, experts_per_device: int) -> None:
        """Go on with another mesh: what was recorded is of the one before."""
        self._per_device, self._counts = experts_per_device, None

    def enter(self, counts: ExpertCounts) -> None:
        """Take the engine's sums, which stay while nothing is recorded."""
        self._counts = counts

    def _read(self, read: Callable[[ExpertCounts], _Samples]) -> _Samples:
        return read(self._counts) if self._counts is not None else ()

    def _expert_tokens(self, counts: ExpertCounts) -> _Samples:
        for expert, tokens in enumerate(counts.tokens_per_expert.sum(axis=0).tolist()):
            yield (self._model, str(expert), str(expert // self._per_device)), tokens

    def _rows(self, counts: ExpertCounts) -> _Samples:
        for device, rows in enumerate(counts.rows_sent.tolist()):
            yield (self._model, str(device)), rows

    def _balancedness(self, counts: ExpertCounts) -> _Samples:
        layers = counts.tokens_per_expert.shape[0]
        load = counts.tokens_per_expert.reshape(layers, -1, self._per_device).sum(axis=2)
        found = balancedness_of_ranks(load)
        yield (self._model, "sums"), found.of_sums
        yield (self._model, "layers"), found.of_layers


class BalanceMetrics:
    """Experts that follow the load. Shows the engine's own totals, read at the scrape; nothing where experts stay where they are."""

    def __init__(self, registry: Registry, model_name: str):
        self._labels: Labels = (model_name,)
        self._stats: BalanceStats | None = None

        def samples(value: Callable[[BalanceStats], float]) -> Callable[[], _Samples]:
            return lambda: [(self._labels, value(self._stats))] if self._stats is not None else ()

        for name, documentation, value in (
            ("windows", "Windows of experts' loads that were read.", lambda stats: stats.windows),
            ("rebalances", "Rebalances that were carried out to their end.", lambda stats: stats.rebalances),
            ("failures", "Rebalances that were given up because an exchange failed.", lambda stats: stats.failures),
            ("layers_changed", "Layers that were placed anew.", lambda stats: stats.layers_changed),
            ("experts_moved", "Experts that were written to another slot.", lambda stats: stats.experts_moved),
            ("moved_bytes", "Bytes of those, over the devices of an EP group.", lambda stats: stats.bytes_moved),
            ("exchanges", "Commands between steps that moved experts.", lambda stats: stats.exchanges),
            ("exchange_seconds", "Time in those, in which no step computed.", lambda stats: stats.exchange_seconds),
            ("rebalance_seconds", "Time from decisions to the last layer.", lambda stats: stats.rebalance_seconds),
        ):
            Total(registry, f"dsjax_eplb_{name}", documentation, ("model_name",), samples(value))
        Gauge(
            registry,
            "dsjax_eplb_layers_left",
            "Layers that the rebalance under way has still to change.",
            ("model_name",),
            samples(lambda stats: stats.layers_left),
        )
        Gauge(
            registry,
            "dsjax_eplb_balancedness",
            f"Mean over max of the EP ranks' tokens in the last window; {_OF}",
            ("model_name", "of"),
            self._balancedness,
        )
        Gauge(
            registry,
            "dsjax_eplb_rank_tokens",
            "Tokens that each EP rank computed in the last window, over all MoE layers.",
            ("model_name", "ep_rank"),
            self._rank_tokens,
        )

    def enter(self, stats: BalanceStats) -> None:
        """Take the engine's totals."""
        self._stats = stats

    def _balancedness(self) -> _Samples:
        if self._stats is not None and self._stats.windows:
            yield (*self._labels, "sums"), self._stats.balancedness
            yield (*self._labels, "layers"), self._stats.layer_balancedness

    def _rank_tokens(self) -> _Samples:
        for rank, tokens in enumerate(self._stats.rank_tokens if self._stats else ()):
            yield (*self._labels, str(rank)), tokens


class DraftMetrics:
    """What came of the tokens that speculative decoding drafted, over all ranks.

    Args:
        most_drafts: positions of drafts that are shown from the start, with 0.
    """

    def __init__(self, registry: Registry, model_name: str, most_drafts: int):
        self._labels: Labels = (model_name,)
        name = "vllm:spec_decode_num"
        self._rows = Counter(registry, f"{name}_drafts", "Rows that had drafts to verify.", ("model_name",))
        self._drafted = Counter(registry, f"{name}_draft_tokens", "Drafted tokens that were verified.", ("model_name",))
        self._accepted = Counter(registry, f"{name}_accepted_tokens", "Those that were accepted.", ("model_name",))
        self._per_position = Counter(
            registry,
            f"{name}_accepted_tokens_per_pos",
            "Drafted tokens that were accepted, by their place in the row's drafts; 0 is the first.",
            ("model_name", "position"),
        )
        if most_drafts:
            self.enter(DraftCounts(0, 0, 0, (0,) * most_drafts))

    def enter(self, counts: DraftCounts) -> None:
        """Enter a step's drafts."""
        self._rows.add(self._labels, counts.num_drafts)
        self._drafted.add(self._labels, counts.num_draft_tokens)
        self._accepted.add(self._labels, counts.num_accepted_tokens)
        for position, accepted in enumerate(counts.accepted_per_position):
            self._per_position.add((*self._labels, str(position)), accepted)


REASONS = ("scale", "loss", "failure", "return")


def add_generation_metrics(registry: Registry, model_name: str, generations: Generations) -> None:
    """Add families that show which mesh there is, which one is wanted, and what changing it took; read at the scrape."""

    def gauge(name: str, documentation: str, value: Callable[[], float]) -> None:
        Gauge(registry, name, documentation, ("model_name",), lambda: [((model_name,), float(value()))])

    gauge("dsjax_generation", "Number of the mesh; it begins with 0.", lambda: generations.number)
    gauge("dsjax_generation_devices", "Devices of the mesh.", lambda: generations.spec.num_devices)
    gauge("dsjax_generation_devices_wanted", "Devices it was to have.", lambda: generations.wanted.num_devices)
    gauge("dsjax_generation_processes", "Processes with a part in it.", lambda: generations.facts.num_processes)
    ahead = generations.ahead
    for name, what, count in (
        ("done", "Programs of the meshes that may come next which process 0 has.", "done"),
        ("wanted", "Of those, how many it is to have.", "total"),
    ):
        read = lambda count=count: 0 if ahead is None else getattr(ahead, count)  # noqa: E731
        gauge(f"dsjax_compile_ahead_programs_{name}", what, read)
    gauge("dsjax_generation_changing", "1 while no step computes, as the mesh is changed.", lambda: generations.busy)
    Total(
        registry,
        "dsjax_generation_changes",
        "Changes of the mesh, by reason.",
        ("model_name", "reason"),
        lambda: [((model_name, reason), generations.counts.changes[reason]) for reason in REASONS],
    )
    Total(
        registry,
        "dsjax_generation_change_seconds",
        "Time in those, in which no step computed.",
        ("model_name",),
        lambda: [((model_name,), generations.counts.seconds)],
    )


def add_prefill_metrics(registry: Registry, model_name: str, engines: Sequence[PrefillEngine]) -> None:
    """Add families that show what each of these engines of this process has to do and has done; read at the scrape."""

    def each(value: Callable[[PrefillEngine], float]) -> Callable[[], Iterable[tuple[Labels, float]]]:
        return lambda: [((model_name, str(number)), float(value(engine))) for number, engine in enumerate(engines)]

    def prompts() -> Iterable[tuple[Labels, float]]:
        for number, engine in enumerate(engines):
            loads = engine.core.loads()
            for state in ("running", "waiting"):
                yield (model_name, str(number), state), float(sum(getattr(load, state) for load in loads))

    name, labels = "dsjax_prefill_engine", ("model_name", "prefill_engine")
    Gauge(
        registry,
        f"{name}_up",
        "1 while it computes prompts; 0 when it has failed, and decode engines compute them.",
        labels,
        each(lambda engine: engine.error is None),
    )
    Gauge(registry, f"{name}_prompts", "Prompts that it has.", (*labels, "state"), prompts)
    Gauge(
        registry,
        f"{name}_kept_pages",
        "Pages that it keeps for decode engines, which have not taken them yet.",
        labels,
        each(lambda engine: engine.buffers.num_pages_kept),
    )
    Total(
        registry,
        f"{name}_tokens",
        "Tokens of prompts that it computed.",
        labels,
        each(lambda engine: engine.counts.tokens),
    )
    Total(
        registry,
        f"{name}_step_seconds",
        "Time in which it computed: its rate is the share of time that the engine is busy.",
        labels,
        each(lambda engine: engine.counts.seconds),
    )
