"""`Metrics`: the server's metrics, with vLLM's names and dsjax's own. docs/observability.md lists them."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dsjax.engine.afd.messages import ExpertLinks
from dsjax.engine.schedule.parked import ParkedRequests
from dsjax.engine.schedule.rank import RankLoad
from dsjax.engine.schedule.request import FinishReason, Request
from dsjax.engine.schedule.scheduler import Update
from dsjax.engine.stats import StepStats
from dsjax.engine.text.outputs import RequestOutput
from dsjax.hosts.interfaces import Interface, read_interfaces
from dsjax.serve import metrics_parts
from dsjax.serve.completion_metrics import CompletionMetrics
from dsjax.serve.metrics_cache import add_tier_metrics, add_transfer_metrics
from dsjax.serve.metrics_experts import DraftMetrics, add_balance_metrics, add_expert_metrics
from dsjax.serve.metrics_families import Counter, Family, Registry, exposition
from dsjax.serve.metrics_history import History
from dsjax.serve.metrics_links import Links, add_expert_link_metrics, add_link_metrics

if TYPE_CHECKING:  # imports JAX
    from dsjax.engine.elastic.generations import Generations
    from dsjax.engine.prefill_engine import PrefillEngine

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
FETCH_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Metrics:
    """An `EngineObserver` with its own metrics registry.

    All methods run in the event loop's thread, except `render`, which may run in another. `render` copies each number: two families may
    differ by one step, but no sample is lost or counted twice.

    Args:
        model_name: value of the label `model_name`.
        num_ranks: number of DP ranks. The label `engine` is the rank's index.
        device_memory: returns (device, bytes in use, bytes of memory) at each scrape.
        max_model_len: upper bound of the histograms of token counts.
        experts_per_device: physical experts of one device; 0 for a model without experts.
        max_drafts: maximum draft tokens of a row; 0: no speculative decoding, and no samples of its metrics.
        page_bytes: bytes of a KV cache page on all devices of a DP rank.
        generations: mesh epochs; None if the mesh never changes.
        parked: requests that wait for a larger mesh; None without epochs.
        prefills: this process's prefill engines.
        expert_links: returns the links to processes with experts; None without such processes.
        links: returns the links to the group's other processes; None without a group.
        interfaces: returns the host's network cards.
        clock: the clock of `Request.arrival_time`, in seconds.
    """

    def __init__(
        self,
        model_name: str,
        num_ranks: int,
        max_model_len: int,
        *,
        experts_per_device: int = 0,
        max_drafts: int = 0,
        page_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
        device_memory: Callable[[], Iterable[tuple[str, int, int]]] = lambda: (),
        generations: "Generations | None" = None,
        parked: ParkedRequests | None = None,
        prefills: "Sequence[PrefillEngine]" = (),
        links: Links | None = None,
        expert_links: Callable[[], ExpertLinks] | None = None,
        interfaces: Callable[[], Iterable[Interface]] = read_interfaces,
    ):
        self.registry = registry = Registry(model_name=model_name)
        self._state = state = metrics_parts.LatestState(num_ranks, experts_per_device, page_bytes)
        self._completions = CompletionMetrics(registry, num_ranks, max_model_len, clock)
        metrics_parts.add_load_metrics(registry, state)
        add_tier_metrics(registry, state)
        add_transfer_metrics(registry, state)
        self._page_waits = registry.histogram(
            "dsjax_cache_fetch_seconds", "Time that a request waited for pages of a tier.", FETCH_SECONDS, "tier"
        )
        self._preemptions = registry.counter("vllm:num_preemptions", "Preemptions of requests, over all ranks.")
        self._preemptions.add((), 0)
        self._iteration_tokens = registry.histogram(
            "vllm:iteration_tokens_total", "Tokens computed in a step, over all ranks.", STEP_TOKENS
        )
        self._step_seconds = registry.histogram(
            "dsjax_step_seconds", "Time of a step, from scheduling to its results.", STEP_SECONDS
        )
        self._step_tokens = registry.counter("dsjax_step_tokens", "Token rows computed by steps, by kind.", "kind")
        self._host_seconds = registry.counter(
            "dsjax_host_seconds", "Time of the engine's thread, by part of a step.", "part"
        )
        registry.total(
            "dsjax_compilations_after_warm_up",
            "Programs compiled while serving; must stay 0.",
            lambda: state.compilations,
        )
        self._rejections = registry.counter(
            "dsjax_requests_rejected", "Requests rejected before they reached the engine.", "reason"
        )
        self._responses = Counter(
            registry, "http_requests", "HTTP responses, by route and status class.", ("handler", "method", "status"), {}
        )
        metrics_parts.add_background_metrics(registry)
        metrics_parts.add_memory_metrics(registry, device_memory)
        if links is not None:
            add_link_metrics(registry, links, interfaces)
        if expert_links is not None:
            add_expert_link_metrics(registry, expert_links)
        registry.gauge(
            "dsjax_exchange_time_share",
            "Share of device time spent in collectives in the last profile.",
            lambda: state.exchange_share,
        )
        add_expert_metrics(registry, state)
        add_balance_metrics(registry, state)
        self._drafts = DraftMetrics(registry, state, max_drafts)
        if generations is not None and parked is not None:
            metrics_parts.add_generation_metrics(registry, generations, parked)
        if prefills:
            metrics_parts.add_prefill_metrics(registry, prefills)
        self.add_front_ends: Callable[[Sequence[Family]], Sequence[Family]] | None = None
        self.history = History(self.families, lambda: state.loads, clock)

    # Called by the engine.

    def on_step(self, stats: StepStats) -> None:
        """Count a step."""
        self.history.add_point()
        self.set_loads(stats.ranks, stats.parts)
        self._preemptions.add((), stats.num_preemptions)
        self._iteration_tokens.observe((), stats.num_decode_tokens + stats.num_prompt_tokens)
        self._step_seconds.observe((), stats.duration)
        self._step_tokens.add(("decode",), stats.num_decode_tokens)
        self._step_tokens.add(("prompt",), stats.num_prompt_tokens)
        self._step_tokens.add(("padding",), stats.num_padding_tokens)
        for part, seconds in stats.host_seconds.items():
            self._host_seconds.add((part,), seconds)
        for tier, seconds in stats.page_waits:
            self._page_waits.observe((tier,), seconds)
        self._state.compilations = stats.compilations_after_warm_up
        self._state.experts = stats.experts or self._state.experts
        if stats.drafts is not None:
            self._drafts.count(stats.drafts)

    def set_loads(self, loads: Sequence[RankLoad], parts: Mapping[str, Any]) -> None:
        """Set the ranks' loads and the counts of the core's plugins (`StepStats.parts`)."""
        self._state.loads = loads
        self._state.parts.update(parts)

    def set_exchange_share(self, share: float | None) -> None:
        """Set the share of device time in collectives in the last profile; None: the profile has no operations."""
        self._state.exchange_share = share

    def on_change(self, num_ranks: int, experts_per_device: int) -> None:
        """Switch to another mesh. Removed ranks keep their counts and have no load; recorded expert counts are dropped."""
        state = self._state
        self._completions.export_ranks(num_ranks)
        state.num_ranks = max(state.num_ranks, num_ranks)
        state.loads = ()
        state.experts = None
        state.experts_per_device = experts_per_device

    def on_updates(self, updates: Sequence[Update]) -> None:
        """Count the tokens of a step."""
        self._completions.count(updates)

    def on_ended(self, requests: Sequence[Request], reason: FinishReason) -> None:
        """Count completions that ended outside a step, by a stop string or because their client left."""
        self._completions.finish(requests, reason)

    def on_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        """Do nothing: outputs do not show latencies, because an answer that is not streamed has only one output."""

    def on_rejected(self, reason: str) -> None:
        """Count a refused request."""
        self._rejections.add((reason,))

    def on_response(self, handler: str, method: str, status: int) -> None:
        """Count an answer. handler: the route's path rather than the requested path, which bounds the number of labels."""
        self._responses.add((handler, method, f"{status // 100}xx"))

    # Called by a scrape.

    def render(self, names: Iterable[str] = (), *, openmetrics: bool = False) -> bytes:
        """Return the exposition of all samples, or only of the samples in `names`; unknown names are ignored."""
        return exposition(self.families(), frozenset(names), openmetrics=openmetrics)

    def families(self) -> Sequence[Family]:
        """Return all families, with the counts of front end processes added."""
        families = self.registry.families
        return families if self.add_front_ends is None else self.add_front_ends(families)
