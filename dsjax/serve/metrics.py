"""`Metrics`: what the engine does, counted under vLLM's names and ours. docs/observability.md lists them all.

`CompletionMetrics` has tokens and latencies of each completion, from the updates that the event loop receives.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from dsjax.engine.contract.executor import ErrorKind
from dsjax.engine.experts.eplb import BalanceStats
from dsjax.engine.schedule.rank import RankLoad
from dsjax.engine.schedule.request import FinishReason, Request
from dsjax.engine.schedule.scheduler import Update
from dsjax.engine.stats import StepStats
from dsjax.engine.text.output_processor import error_kind
from dsjax.engine.text.outputs import RequestOutput
from dsjax.engine.tiers.disk_tier import DiskCounts
from dsjax.serve.history import History
from dsjax.serve.metrics_families import (
    Counter,
    Family,
    Gauge,
    Histogram,
    Labels,
    Registry,
    Total,
    exposition,
    one_two_five,
)
from dsjax.serve.metrics_parts import (
    BalanceMetrics,
    DraftMetrics,
    ExpertMetrics,
    add_generation_metrics,
    add_prefill_metrics,
)
from dsjax.serve.metrics_tiers import TierMetrics, add_load_metrics

if TYPE_CHECKING:  # it brings JAX in
    from dsjax.engine.elastic.generations import Generations
    from dsjax.engine.prefill_engine import PrefillEngine

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
# vLLM's bounds, in seconds.
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


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
        self._requests = CompletionMetrics(self.registry, self._ranks, max_model_len, clock)
        add_load_metrics(self.registry, self._ranks, lambda: self._loads)
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


class _Track:
    """What is known of a completion that goes on. Times are when the event loop got the token."""

    __slots__ = ("first", "last", "tokens")

    def __init__(self, now: float):
        self.first = self.last = now
        self.tokens = 0


class CompletionMetrics:
    """Follows completions by the core's id. Each of the `n` completions of a request counts, as in vLLM.

    With t_1 … t_n the times at which the event loop received a completion's tokens:

    - time to first token: t_1 − arrival; inter-token latency: each t_i − t_{i−1}; time per output token: (t_n − t_1) / (n − 1),
      for n > 1 alone (vLLM enters 0 for n = 1);
    - queue: first scheduled − arrival; prefill: t_1 − first scheduled; decode: t_n − t_1; inference: prefill + decode; end to end:
      end − arrival. So queue + prefill + decode = end to end, but for a stop string found later.

    What ended by an abort or an error is counted under its reason, and enters none of the histograms of whole requests.
    """

    def __init__(
        self,
        registry: Registry,
        ranks: Sequence[Labels],
        max_model_len: int,
        clock: Callable[[], float],
    ):
        self._ranks, self._clock = ranks, clock
        self._tracks: dict[str, _Track] = {}
        labels = ("model_name", "engine")

        def counter(name: str, documentation: str, *more: str) -> Counter:
            return Counter(registry, name, documentation, (*labels, *more))

        def histogram(name: str, documentation: str, bounds: Sequence[float]) -> Histogram:
            return Histogram(registry, name, documentation, labels, bounds)

        self._prompt_tokens = counter("vllm:prompt_tokens", "Tokens of prompts whose first token was made.")
        self._prompt_cached = counter("vllm:prompt_tokens_cached", "Those of them that the prefix cache held.")
        self._queries = counter("vllm:prefix_cache_queries", "Tokens of prompts looked up in the prefix cache.")
        self._hits = counter("vllm:prefix_cache_hits", "Tokens of prompts found in the prefix cache.")
        self._generation_tokens = counter("vllm:generation_tokens", "Tokens made.")
        self._success = counter("vllm:request_success", "Completions that ended, by reason.", "finished_reason")
        self._corrupted = counter("vllm:corrupted_requests", "Completions failed because logits were not finite.")
        self._failed = counter("dsjax_requests_failed", "Completions that ended with an error, by its kind.", "error")
        self._first_token = histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN_SECONDS
        )
        self._between_tokens = histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of a completion.", BETWEEN_TOKENS_SECONDS
        )
        self._per_token = histogram(
            "vllm:request_time_per_output_token_seconds",
            "A completion's mean time of a token after its first.",
            BETWEEN_TOKENS_SECONDS,
        )
        self._end_to_end = histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", REQUEST_SECONDS)
        self._queue = histogram(
            "vllm:request_queue_time_seconds", "From arrival to the first step with it.", REQUEST_SECONDS
        )
        self._prefill = histogram(
            "vllm:request_prefill_time_seconds", "From its first step to its first token.", REQUEST_SECONDS
        )
        self._decode = histogram(
            "vllm:request_decode_time_seconds", "From the first token to the last.", REQUEST_SECONDS
        )
        self._inference = histogram(
            "vllm:request_inference_time_seconds", "From its first step to its last token.", REQUEST_SECONDS
        )
        counts = one_two_five(max_model_len)
        self._prompt_length = histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", counts)
        self._computed_length = histogram(
            "vllm:request_prefill_kv_computed_tokens", "Tokens of a prompt that the prefix cache did not hold.", counts
        )
        self._output_length = histogram("vllm:request_generation_tokens", "Tokens made for a completion.", counts)
        self._max_tokens = histogram("vllm:request_params_max_tokens", "The most tokens it could have made.", counts)
        self.begin(ranks)

    def begin(self, ranks: Sequence[Labels]) -> None:
        """Show these ranks, with 0."""
        for rank in ranks:
            for each in (self._prompt_tokens, self._prompt_cached, self._queries, self._hits):
                each.add(rank, 0)
            for each in (self._generation_tokens, self._corrupted):
                each.add(rank, 0)
            for reason in FinishReason:
                self._success.add((*rank, reason.value), 0)
            for kind in ErrorKind:
                self._failed.add((*rank, kind.value), 0)

    def enter(self, updates: Sequence[Update]) -> None:
        """Enter what a step did to each completion."""
        now = self._clock()
        tracks = self._tracks
        gaps: dict[tuple[int, float], int] = {}
        made: dict[int, int] = {}
        for request, result, reason in updates:
            if result is not None and not result.finite:
                self._corrupted.add(self._of(request))
            if result is not None and result.token_ids:
                track = tracks.get(request.request_id)
                rank = min(max(request.rank, 0), len(self._ranks) - 1)
                if track is None:
                    track = tracks[request.request_id] = _Track(now)
                    self._enter_first(request, now)
                else:
                    # All that decoded in the step before waited equally long: one entry for them together.
                    gap = (rank, track.last)
                    gaps[gap] = gaps.get(gap, 0) + 1
                track.last = now
                track.tokens += len(result.token_ids)
                made[rank] = made.get(rank, 0) + len(result.token_ids)
            if reason is FinishReason.ERROR:
                self._failed.add((*self._of(request), error_kind(request.params, result).value))
            if reason is not None:
                self._end(request, tracks.pop(request.request_id, None), reason, now)
        for (rank, before), count in gaps.items():
            self._between_tokens.observe(self._ranks[rank], now - before, count)
        for rank, count in made.items():
            self._generation_tokens.add(self._ranks[rank], count)

    def end(self, requests: Sequence[Request], reason: FinishReason) -> None:
        """Enter completions that ended without an update."""
        now = self._clock()
        for request in requests:
            self._end(request, self._tracks.pop(request.request_id, None), reason, now)

    def _of(self, request: Request) -> Labels:
        """Its rank: the first where it left before the engine gave it one, the last that is known where the mesh has just grown."""
        return self._ranks[min(max(request.rank, 0), len(self._ranks) - 1)]

    def _enter_first(self, request: Request, now: float) -> None:
        rank = self._of(request)
        self._first_token.observe(rank, now - request.arrival_time)
        for counter in (self._prompt_tokens, self._queries):
            counter.add(rank, request.num_prompt_tokens)
        for counter in (self._prompt_cached, self._hits):
            counter.add(rank, request.num_cached_tokens or 0)

    def _end(self, request: Request, track: _Track | None, reason: FinishReason, now: float) -> None:
        rank = self._of(request)
        self._success.add((*rank, reason.value))
        scheduled = request.first_scheduled_time
        if reason not in (FinishReason.STOP, FinishReason.LENGTH) or track is None or scheduled is None:
            return
        self._end_to_end.observe(rank, now - request.arrival_time)
        self._queue.observe(rank, scheduled - request.arrival_time)
        self._prompt_length.observe(rank, request.num_prompt_tokens)
        self._max_tokens.observe(rank, request.max_tokens)
        self._output_length.observe(rank, track.tokens)
        self._computed_length.observe(rank, request.num_prompt_tokens - (request.num_cached_tokens or 0))
        self._prefill.observe(rank, track.first - scheduled)
        self._decode.observe(rank, track.last - track.first)
        self._inference.observe(rank, track.last - scheduled)
        if track.tokens > 1:
            self._per_token.observe(rank, (track.last - track.first) / (track.tokens - 1))
