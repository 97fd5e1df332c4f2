"""Metrics of engines that compute prompts for others (docs/disaggregation.md). What decode received from them is in `metrics_tiers.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from dsjax.serve.metrics_families import Gauge, Labels, Registry, Total

if TYPE_CHECKING:  # a server without prefill engines does not load it
    from dsjax.engine.prefill_engine import PrefillEngine


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
