"""Metrics of routed experts and speculative decoding: expert loads, dispatch, expert load balancing, drafts."""

from collections.abc import Callable

from dsjax.engine.contract.executor import ExpertCounts
from dsjax.engine.experts.eplb import BalanceStats
from dsjax.engine.stats import DraftCounts
from dsjax.serve.metrics_families import Reading, Registry, Samples, by_index, field_reader, unlabelled
from dsjax.serve.metrics_parts import LatestState
from sharding.balancing import balancedness_of_ranks

_BALANCEDNESS_LABELS = (
    "of=sums: the layers' means over their maxima, each summed; of=layers: mean of the layers' ratios."
)
"""Values of the label `of` of both balancedness metrics."""


def add_expert_metrics(registry: Registry, state: LatestState) -> None:
    """Add tokens by expert and the traffic of dispatch; no samples before the first recorded step.

    The sums restart with each recording, which Prometheus treats as a counter reset. Each expert is summed over layers, because
    DeepSeek-V3 would have 15,000 samples by layer and expert; `/dump_expert_distribution_record` has each layer.
    """

    def from_counts(value: Callable[[ExpertCounts], Reading]) -> Callable[[], Reading]:
        return lambda: None if state.experts is None else value(state.experts)

    def tokens_by_expert(counts: ExpertCounts) -> Samples:
        for expert, num_tokens in enumerate(counts.tokens_per_expert.sum(axis=0).tolist()):
            yield (str(expert), str(expert // state.experts_per_device)), num_tokens

    def balancedness(counts: ExpertCounts) -> Samples:
        layers = counts.tokens_per_expert.shape[0]
        load = counts.tokens_per_expert.reshape(layers, -1, state.experts_per_device).sum(axis=2)
        ratio = balancedness_of_ranks(load)
        return [(("sums",), ratio.of_sums), (("layers",), ratio.of_layers)]

    field = field_reader(lambda: unlabelled(state.experts))
    registry.total(
        "dsjax_expert_tokens",
        "Tokens that each physical expert computed, over all MoE layers.",
        from_counts(tokens_by_expert),
        "expert",
        "ep_rank",
    )
    registry.total(
        "dsjax_dispatch_rows",
        "Rows of tokens that each device sent to others.",
        from_counts(lambda counts: by_index(counts.rows_sent.tolist())),
        "device",
    )
    registry.total("dsjax_dispatch_rounds", "Rounds of dispatch in the layer with the most.", field("rounds"))
    registry.total("dsjax_dispatch_bytes", "Bytes that all devices sent in dispatch.", field("dispatch_bytes"))
    registry.gauge(
        "dsjax_dispatch_padding_share",
        "Share of dispatched rows that were padding, since recording began.",
        field("padding_share"),
    )
    registry.gauge(
        "dsjax_expert_balancedness",
        f"Mean over max of the EP ranks' tokens since recording began; {_BALANCEDNESS_LABELS}",
        from_counts(balancedness),
        "of",
    )


def add_balance_metrics(registry: Registry, state: LatestState) -> None:
    """Add the work of expert load balancing; no samples without `--enable-eplb`."""

    def from_stats(value: Callable[[BalanceStats], Reading]) -> Callable[[], Reading]:
        return lambda: None if (stats := state.parts.get("balance")) is None else value(stats)

    def balancedness(stats: BalanceStats) -> Reading:
        if not stats.windows:
            return None
        return [(("sums",), stats.balancedness), (("layers",), stats.layer_balancedness)]

    field = field_reader(lambda: unlabelled(state.parts.get("balance")))
    for name, documentation, field_name in (
        ("windows", "Load windows that were evaluated.", "windows"),
        ("rebalances", "Completed rebalances.", "rebalances"),
        ("failures", "Rebalances abandoned because an exchange failed.", "failures"),
        ("layers_changed", "Layers whose expert placement changed.", "layers_changed"),
        ("experts_moved", "Experts that were moved to another slot.", "experts_moved"),
        ("moved_bytes", "Bytes of moved experts, over the devices of an EP group.", "bytes_moved"),
        ("exchanges", "Commands between steps that moved experts.", "exchanges"),
        ("exchange_seconds", "Time of exchanges that moved experts; no step runs meanwhile.", "exchange_seconds"),
        ("rebalance_seconds", "Time from a rebalancing decision to its last layer.", "rebalance_seconds"),
    ):
        registry.total(f"dsjax_eplb_{name}", documentation, field(field_name))
    registry.gauge(
        "dsjax_eplb_layers_left", "Layers that the rebalance in progress has yet to change.", field("layers_left")
    )
    registry.gauge(
        "dsjax_eplb_balancedness",
        f"Mean over max of the EP ranks' tokens in the last window; {_BALANCEDNESS_LABELS}",
        from_stats(balancedness),
        "of",
    )
    registry.gauge(
        "dsjax_eplb_rank_tokens",
        "Tokens that each EP rank computed in the last window, over all MoE layers.",
        from_stats(lambda stats: by_index(stats.rank_tokens)),
        "ep_rank",
    )


class DraftMetrics:
    """Drafted and accepted tokens of speculative decoding, over all ranks.

    Args:
        max_drafts: number of draft positions to export from the start, with value 0.
    """

    def __init__(self, registry: Registry, state: LatestState, max_drafts: int):
        registry.gauge(
            "dsjax_draft_tokens_chosen",
            "Current number of draft tokens per row, if the engine adapts it.",
            lambda: state.parts.get("draft_choice"),
        )
        prefix = "vllm:spec_decode_num"
        self._rows = registry.counter(f"{prefix}_drafts", "Rows with drafts to verify.")
        self._drafted = registry.counter(f"{prefix}_draft_tokens", "Draft tokens that were verified.")
        self._accepted = registry.counter(f"{prefix}_accepted_tokens", "Draft tokens that were accepted.")
        self._per_position = registry.counter(
            f"{prefix}_accepted_tokens_per_pos",
            "Accepted draft tokens by position in the row's drafts, from 0.",
            "position",
        )
        if max_drafts:
            self.count(DraftCounts(0, 0, 0, accepted_per_position=(0,) * max_drafts))

    def count(self, counts: DraftCounts) -> None:
        """Count a step's drafts."""
        self._rows.add((), counts.num_drafts)
        self._drafted.add((), counts.num_draft_tokens)
        self._accepted.add((), counts.num_accepted_tokens)
        for labels, accepted in by_index(counts.accepted_per_position):
            self._per_position.add(labels, accepted)
