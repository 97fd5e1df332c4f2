"""`ExpertMetrics`: which experts the tokens went to, and what sending them cost, while recording is on."""

from collections.abc import Callable, Iterable

import numpy as np

from dsjax.engine.stats import ExpertCounts
from dsjax.serve.metrics_families import Gauge, Labels, Registry, Total

_Samples = Iterable[tuple[Labels, float]]


class ExpertMetrics:
    """Shows the engine's own sums, read at the scrape; nothing before the first recorded step.

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
            "Mean over max of the EP ranks' tokens since recording began; of=sums: of the layers' sums, of=layers: mean of "
            "the layers' ratios.",
            ("model_name", "of"),
            lambda: self._read(self._balancedness),
        )

    def enter(self, counts: ExpertCounts | None) -> None:
        """Take the engine's sums; None while recording is off keeps the last."""
        self._counts = counts or self._counts

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
        yield (self._model, "sums"), _mean_over_max(load.sum(axis=0))
        yield (self._model, "layers"), float(np.mean([_mean_over_max(layer) for layer in load]))


def _mean_over_max(load: np.ndarray) -> float:
    return float(load.mean() / load.max()) if load.max() else 1.0
