"""`Metrics`: what the engine does, counted under vLLM's names and ours. docs/observability.md lists them all."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from dsjax.engine.experts.eplb import BalanceStats
from dsjax.engine.schedule.rank import RankLoad
from dsjax.engine.schedule.request import FinishReason, Request
from dsjax.engine.schedule.scheduler import Update
from dsjax.engine.stats import DraftCounts, StepStats
from dsjax.engine.text.outputs import RequestOutput
from dsjax.engine.tiers.disk_tier import DiskCounts
from dsjax.serve.history import History
from dsjax.serve.metrics_experts import BalanceMetrics, ExpertMetrics
from dsjax.serve.metrics_families import Counter, Family, Gauge, Histogram, Labels, Registry, Total, exposition
from dsjax.serve.metrics_generations import add_generation_metrics
from dsjax.serve.metrics_prefill import add_prefill_metrics
from dsjax.serve.metrics_requests import RequestMetrics
from dsjax.serve.metrics_tiers import TierMetrics

if TYPE_CHECKING:  # it brings JAX in
    from dsjax.engine.elastic.generations import Generations
    from dsjax.engine.prefill_engine import PrefillEngine

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class Metrics:
    """An `EngineObserver` with a registry of its own.

    Everything is called in the event loop's thread. `render` may run in another: it copies each number as it is, so two
    families can differ by one step, and no sample is ever lost or counted twice.

    Args:
        model_name: the label `model_name`, as clients know it.
        num_ranks: DP ranks; the label `engine` counts them, as vLLM's does its engines.
        device_memory: gives (device, bytes in use, bytes there are) at each scrape.
        max_model_len: bound of the histograms of numbers of tokens.
        experts_per_device: physical experts of one device; 0 for a model without experts.
        most_drafts: tokens that are drafted for a row at most; 0: speculative decoding is off, and its metrics have no sample.
        page_bytes: of a page of the cache, on all devices of a DP rank.
        generations: of the mesh; None where it never changes.
        prefills: engines of this process that compute prompts for those whose ranks these are.
        clock: seconds, of the same clock as `Request.arrival_time`.
    """

    def __init__(
        self,
        model_name: str,
        num_ranks: int,
        max_model_len: int,
        *,
        experts_per_device: int = 0,
        most_drafts: int = 0,
        page_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
        device_memory: Callable[[], Iterable[tuple[str, int, int]]] = lambda: (),
        generations: "Generations | None" = None,
        prefills: "Sequence[PrefillEngine]" = (),
    ):
        self.registry = Registry()
        self._model = model_name
        self._ranks: list[Labels] = [(model_name, str(rank)) for rank in range(num_ranks)]
        self._loads: Sequence[RankLoad] = ()
        self._compilations = 0
        labels = ("model_name", "engine")
        self._requests = RequestMetrics(self.registry, self._ranks, max_model_len, clock)
        self._add_loads(labels)
        self._tiers = TierMetrics(self.registry, self._ranks, lambda: self._loads, page_bytes)
        registry = self.registry
        self._preemptions = Counter(
            registry, "vllm:num_preemptions", "Requests that had to give back their pages, on all ranks.", labels[:1]
        )
        self._iteration_tokens = Histogram(
            registry,
            "vllm:iteration_tokens_total",
            "Tokens computed in a step, over all ranks.",
            labels[:1],
            STEP_TOKENS,
        )
        self._step_seconds = Histogram(
            registry, "dsjax_step_seconds", "Time of a step: plan, launch, device, enter.", labels[:1], STEP_SECONDS
        )
        self._step_tokens = Counter(
            registry, "dsjax_step_tokens", "Rows of tokens that steps computed.", ("model_name", "kind")
        )
        self._host_seconds = Counter(
            registry, "dsjax_host_seconds", "The engine's thread's time in each part of a step.", ("model_name", "part")
        )
        Total(
            registry,
            "dsjax_compilations_after_warm_up",
            "Programs compiled while serving; must stay 0.",
            labels[:1],
            lambda: [((model_name,), self._compilations)],
        )
        self._rejections = Counter(
            registry,
            "dsjax_requests_rejected",
            "Requests refused before the engine saw them.",
            ("model_name", "reason"),
        )
        self._responses = Counter(
            registry, "http_requests", "Answers, by route and class of status.", ("handler", "method", "status")
        )
        for name, what, index in (
            ("used", "Bytes of a device's memory in use.", 1),
            ("limit", "Bytes that a device has.", 2),
        ):
            Gauge(
                registry,
                f"dsjax_device_memory_{name}_bytes",
                what,
                ("model_name", "device"),
                lambda index=index: [((model_name, found[0]), float(found[index])) for found in device_memory()],
            )
        self._exchange_share: float | None = None
        Gauge(
            registry,
            "dsjax_exchange_time_share",
            "Share of the devices' time in operations that exchanges between them took, in the last profile.",
            labels[:1],
            lambda: [] if self._exchange_share is None else [((model_name,), self._exchange_share)],
        )
        self._experts = ExpertMetrics(registry, model_name, experts_per_device)
        self._balance = BalanceMetrics(registry, model_name)
        self._drafts = DraftMetrics(registry, model_name, most_drafts)
        if generations is not None:
            add_generation_metrics(registry, model_name, generations)
        if prefills:
            add_prefill_metrics(registry, model_name, prefills)
        self._preemptions.add((model_name,), 0)
        self.elsewhere: Callable[[Sequence[Family]], Sequence[Family]] | None = None
        self.history = History(self.families, lambda: self._loads, clock)

    # What the engine tells.

    def on_step(self, stats: StepStats) -> None:
        """Count what a step did."""
        model = self._model
        self.history.note()
        self.show_loads(stats.ranks)
        self._preemptions.add((model,), stats.num_preemptions)
        self._iteration_tokens.observe((model,), stats.num_decode_tokens + stats.num_prompt_tokens)
        self._step_seconds.observe((model,), stats.duration)
        self._step_tokens.add((model, "decode"), stats.num_decode_tokens)
        self._step_tokens.add((model, "prompt"), stats.num_prompt_tokens)
        self._step_tokens.add((model, "padding"), stats.num_padding_tokens)
        for part, seconds in stats.host_seconds.items():
            self._host_seconds.add((model, part), seconds)
        self._compilations = stats.compilations_after_warm_up
        if stats.experts is not None:
            self._experts.enter(stats.experts)
        self.show_balance(stats.parts.get("balance"))
        disk = stats.parts.get("disk")
        if disk is not None or stats.page_waits:
            self._tiers.enter(disk, stats.page_waits, stats.parts.get("transfers"))
        if stats.drafts is not None:
            self._drafts.enter(stats.drafts)

    def show_loads(self, loads: Sequence[RankLoad]) -> None:
        """Replace the ranks' loads that the gauges show."""
        self._loads = loads

    def on_change(self, num_ranks: int, experts_per_device: int) -> None:
        """Go on with another mesh. Ranks that are gone keep their counts, and have no load."""
        known = len(self._ranks)
        self._ranks += [(self._model, str(rank)) for rank in range(known, num_ranks)]
        self._requests.begin(self._ranks[known:])
        self._loads = ()
        self._experts.begin(experts_per_device)

    def show_disk(self, counts: DiskCounts | None) -> None:
        """Replace what the disk below the cache has done, and holds."""
        self._tiers.enter(counts)

    def show_exchange_share(self, share: float | None) -> None:
        """Show what the last profile said, until the next one; None: it saw no operation."""
        self._exchange_share = share

    def show_balance(self, stats: BalanceStats | None) -> None:
        """Replace what the metrics of experts that follow the load show; None changes nothing."""
        if stats is not None:
            self._balance.enter(stats)

    def on_updates(self, updates: Sequence[Update]) -> None:
        """Enter a step's tokens."""
        self._requests.enter(updates)

    def on_ended(self, requests: Sequence[Request], reason: FinishReason) -> None:
        """Enter completions that ended outside a step: by a stop string, or because nobody waits for them."""
        self._requests.end(requests, reason)

    def on_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        """Do nothing: an answer that is not streamed has one output, at its end, which tells nothing of latencies."""

    def on_rejected(self, reason: str) -> None:
        """Enter a request that was refused."""
        self._rejections.add((self._model, reason))

    def on_response(self, handler: str, method: str, status: int) -> None:
        """Enter an answer; `handler` is the route's path, never the client's, so that there are only so many."""
        self._responses.add((handler, method, f"{status // 100}xx"))

    # What is shown.

    def render(self, names: Iterable[str] = (), *, openmetrics: bool = False) -> bytes:
        """The exposition, of everything or of the samples with these names; unknown names give nothing."""
        return exposition(self.families(), frozenset(names), openmetrics=openmetrics)

    def families(self) -> Sequence[Family]:
        """All families; what other processes have counted is in them where there are any."""
        own = self.registry.families
        return own if self.elsewhere is None else self.elsewhere(own)

    def _add_loads(self, labels: tuple[str, str]) -> None:
        def gauge(name: str, documentation: str, value: Callable[[RankLoad], float]) -> None:
            def read() -> Iterable[tuple[Labels, float]]:
                loads = {load.rank: load for load in self._loads}
                for rank, rank_labels in enumerate(self._ranks):
                    yield rank_labels, value(loads[rank]) if rank in loads else 0.0

            Gauge(self.registry, name, documentation, labels, read)

        gauge("vllm:num_requests_running", "Requests that hold a slot and pages.", lambda load: load.running)
        gauge("vllm:num_requests_waiting", "Requests in the queue of a rank.", lambda load: load.waiting)
        gauge(
            "vllm:kv_cache_usage_perc",
            "Share of the latent cache's pages that requests hold; 1 is all.",
            lambda load: load.used_pages / load.usable_pages if load.usable_pages else 0.0,
        )
        gauge("dsjax_rank_waiting_tokens", "Tokens of the requests in the queue.", lambda load: load.waiting_tokens)
        gauge("dsjax_rank_cost", "What the next request would find: routing takes the lowest.", lambda load: load.cost)
        gauge("dsjax_rank_pages", "Pages of the latent cache.", lambda load: load.usable_pages)
        gauge("dsjax_rank_pages_used", "Pages that requests hold.", lambda load: load.used_pages)
        gauge(
            "dsjax_rank_pages_cached", "Pages kept for their prefix alone; evictable.", lambda load: load.cached_pages
        )


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
