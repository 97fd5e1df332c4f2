"""`Metrics`: the server's metrics, with vLLM's names and dsjax's own. docs/observability.md lists them.

`CompletionMetrics` counts tokens and latencies of completions from the updates that the event loop receives. `History` keeps the sums of
the last minutes, for a page that is opened later.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dsjax.engine.afd.messages import ExpertLinks
from dsjax.engine.contract.executor import ErrorKind
from dsjax.engine.schedule.parked import ParkedRequests
from dsjax.engine.schedule.rank import RankLoad
from dsjax.engine.schedule.request import FinishReason, Request
from dsjax.engine.schedule.scheduler import Update
from dsjax.engine.stats import StepStats
from dsjax.engine.text.output_processor import error_kind
from dsjax.engine.text.outputs import RequestOutput
from dsjax.hosts.interfaces import Interface, read_interfaces
from dsjax.serve import metrics_parts
from dsjax.serve.metrics_families import Counter, Family, Histogram, Labels, Registry, exposition, one_two_five
from dsjax.serve.metrics_links import Links, add_expert_link_metrics, add_link_metrics
from dsjax.serve.schemas import HistoryBody

if TYPE_CHECKING:  # imports JAX
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
FETCH_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

HISTORY_INTERVAL, HISTORY_SECONDS, LATENCY_SECONDS = 2.0, 300.0, 60.0
"""In seconds: interval between two points of the history, length of the history, window of the page's quantiles."""
LATENCIES = ("vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds")


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
        most_drafts: most draft tokens of a row; 0: no speculative decoding, and no samples of its metrics.
        page_bytes: bytes of a KV cache page on all devices of a DP rank.
        generations: mesh epochs; None if the mesh never changes. parked: requests that wait for a larger mesh; None without epochs.
        prefills: this process's prefill engines.
        expert_links: returns the links to processes with experts; None without such processes.
        links: returns the links to the group's other processes; None without a group. interfaces: returns the host's network cards.
        clock: the clock of `Request.arrival_time`, in seconds.
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
        metrics_parts.add_tier_metrics(registry, state)
        metrics_parts.add_transfer_metrics(registry, state)
        self._page_waits = registry.histogram(
            "dsjax_cache_fetch_seconds", "Time that a request waited for pages of a tier.", FETCH_SECONDS, "tier"
        )
        self._preemptions = registry.counter(
            "vllm:num_preemptions", "Requests that had to give back their pages, on all ranks."
        )
        self._preemptions.add((), 0)
        self._iteration_tokens = registry.histogram(
            "vllm:iteration_tokens_total", "Tokens computed in a step, over all ranks.", STEP_TOKENS
        )
        self._step_seconds = registry.histogram(
            "dsjax_step_seconds", "Time of a step: plan, launch, device, enter.", STEP_SECONDS
        )
        self._step_tokens = registry.counter("dsjax_step_tokens", "Rows of tokens that steps computed.", "kind")
        self._host_seconds = registry.counter(
            "dsjax_host_seconds", "The engine's thread's time in each part of a step.", "part"
        )
        registry.total(
            "dsjax_compilations_after_warm_up",
            "Programs compiled while serving; must stay 0.",
            lambda: state.compilations,
        )
        self._rejections = registry.counter(
            "dsjax_requests_rejected", "Requests refused before the engine saw them.", "reason"
        )
        self._responses = Counter(
            registry, "http_requests", "Answers, by route and class of status.", ("handler", "method", "status"), {}
        )
        metrics_parts.add_background_metrics(registry)
        metrics_parts.add_memory_metrics(registry, device_memory)
        if links is not None:
            add_link_metrics(registry, links, interfaces)
        if expert_links is not None:
            add_expert_link_metrics(registry, expert_links)
        registry.gauge(
            "dsjax_exchange_time_share",
            "Share of the devices' time in operations that exchanges between them took, in the last profile.",
            lambda: state.exchange_share,
        )
        metrics_parts.add_expert_metrics(registry, state)
        metrics_parts.add_balance_metrics(registry, state)
        self._drafts = metrics_parts.DraftMetrics(registry, state, most_drafts)
        if generations is not None and parked is not None:
            metrics_parts.add_generation_metrics(registry, generations, parked)
        if prefills:
            metrics_parts.add_prefill_metrics(registry, prefills)
        self.elsewhere: Callable[[Sequence[Family]], Sequence[Family]] | None = None
        self.history = History(self.families, lambda: state.loads, clock)

    # Called by the engine.

    def on_step(self, stats: StepStats) -> None:
        """Count a step."""
        self.history.note()
        self.show(stats.ranks, stats.parts)
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

    def show(self, loads: Sequence[RankLoad], parts: Mapping[str, Any]) -> None:
        """Set the ranks' loads and the counts of the core's plugins (`StepStats.parts`)."""
        self._state.loads = loads
        self._state.parts.update(parts)

    def show_exchange_share(self, share: float | None) -> None:
        """Set the share of device time in collectives in the last profile; None: the profile has no operations."""
        self._state.exchange_share = share

    def on_change(self, num_ranks: int, experts_per_device: int) -> None:
        """Switch to another mesh. Removed ranks keep their counts and have no load; recorded expert counts are dropped."""
        state = self._state
        self._completions.begin(num_ranks)
        state.num_ranks = max(state.num_ranks, num_ranks)
        state.loads, state.experts, state.experts_per_device = (), None, experts_per_device

    def on_updates(self, updates: Sequence[Update]) -> None:
        """Count the tokens of a step."""
        self._completions.count(updates)

    def on_ended(self, requests: Sequence[Request], reason: FinishReason) -> None:
        """Count completions that ended outside a step, by a stop string or because their client left."""
        self._completions.end(requests, reason)

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
        """Return all families, with the counts of other processes added."""
        families = self.registry.families
        return families if self.elsewhere is None else self.elsewhere(families)


class _Track:
    """An unfinished completion: when the event loop received its first and last tokens, and the number of tokens."""

    __slots__ = ("first", "last", "tokens")

    def __init__(self, now: float):
        self.first = self.last = now
        self.tokens = 0


class CompletionMetrics:
    """Counts completions by the core's completion id. Each of a request's `n` completions counts, as in vLLM.

    With t_1 … t_n the times at which the event loop receives a completion's tokens, the metrics are:

    - time to first token: t_1 − arrival; inter-token latency: each t_i − t_{i−1}; time per output token: (t_n − t_1) / (n − 1),
      only for n > 1 (vLLM records 0 for n = 1);
    - queue: first scheduled − arrival; prefill: t_1 − first scheduled; decode: t_n − t_1; inference: prefill + decode; end to end:
      end − arrival. So queue + prefill + decode = end to end, unless a stop string is found later.

    An aborted or failed completion is counted under that reason; histograms of whole requests do not include it.
    """

    def __init__(self, registry: Registry, num_ranks: int, max_model_len: int, clock: Callable[[], float]):
        self._clock = clock
        self._ranks: list[Labels] = []
        self._tracks: dict[str, _Track] = {}

        def counter(name: str, documentation: str, *more: str) -> Counter:
            return registry.counter(name, documentation, "engine", *more)

        def histogram(name: str, documentation: str, bounds: Sequence[float] = REQUEST_SECONDS) -> Histogram:
            return registry.histogram(f"vllm:{name}", documentation, bounds, "engine")

        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of requests that have their first token.")
        self._prompt_cached = counter(
            "vllm:prompt_tokens_cached",
            "Prompt tokens found in the prefix cache, of requests that have their first token.",
        )
        self._queries = counter("vllm:prefix_cache_queries", "Tokens of prompts looked up in the prefix cache.")
        self._hits = counter("vllm:prefix_cache_hits", "Tokens of prompts found in the prefix cache.")
        self._generation_tokens = counter("vllm:generation_tokens", "Generated tokens.")
        self._success = counter("vllm:request_success", "Completions that ended, by reason.", "finished_reason")
        self._corrupted = counter("vllm:corrupted_requests", "Completions that failed because logits were not finite.")
        self._failed = counter("dsjax_requests_failed", "Completions that ended with an error, by its kind.", "error")
        self._first_token = histogram(
            "time_to_first_token_seconds", "Time from arrival to the first token.", FIRST_TOKEN_SECONDS
        )
        self._between_tokens = histogram(
            "inter_token_latency_seconds", "Time between two tokens of a completion.", BETWEEN_TOKENS_SECONDS
        )
        self._per_token = histogram(
            "request_time_per_output_token_seconds",
            "A completion's mean time of a token after its first.",
            BETWEEN_TOKENS_SECONDS,
        )
        self._end_to_end = histogram("e2e_request_latency_seconds", "Time from arrival to the end.")
        self._queue = histogram("request_queue_time_seconds", "Time from arrival to the request's first step.")
        self._prefill = histogram(
            "request_prefill_time_seconds", "Time from the request's first step to its first token."
        )
        self._decode = histogram("request_decode_time_seconds", "Time from the first token to the last.")
        self._inference = histogram(
            "request_inference_time_seconds", "Time from the request's first step to its last token."
        )
        counts = one_two_five(max_model_len)
        self._prompt_length = histogram("request_prompt_tokens", "Tokens of a prompt.", counts)
        self._computed_length = histogram(
            "request_prefill_kv_computed_tokens", "Tokens of a prompt that the prefix cache did not hold.", counts
        )
        self._output_length = histogram("request_generation_tokens", "Tokens made for a completion.", counts)
        self._max_tokens = histogram(
            "request_params_max_tokens", "Largest number of tokens a completion may have (max_tokens).", counts
        )
        self.begin(num_ranks)

    def begin(self, num_ranks: int) -> None:
        """Export at least this many ranks; new ranks start at 0."""
        for number in range(len(self._ranks), num_ranks):
            rank = (str(number),)
            self._ranks.append(rank)
            prompts = (self._prompt_tokens, self._prompt_cached, self._queries, self._hits)
            for counter in (*prompts, self._generation_tokens, self._corrupted):
                counter.add(rank, 0)
            for reason in FinishReason:
                self._success.add((*rank, reason.value), 0)
            for kind in ErrorKind:
                self._failed.add((*rank, kind.value), 0)

    def count(self, updates: Sequence[Update]) -> None:
        """Count a step's updates."""
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
                    self._count_first(request, now)
                else:
                    # All rows of the previous step waited equally long: observe them together.
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
        """Count completions that ended without an update."""
        now = self._clock()
        for request in requests:
            self._end(request, self._tracks.pop(request.request_id, None), reason, now)

    def _of(self, request: Request) -> Labels:
        """Return a request's rank label: 0 if it ended before it got a rank, the last known rank if the mesh has just grown."""
        return self._ranks[min(max(request.rank, 0), len(self._ranks) - 1)]

    def _count_first(self, request: Request, now: float) -> None:
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


class _Point(NamedTuple):
    time: float
    sums: dict[str, float]
    buckets: dict[str, dict[str, float]]


class History:
    """Time series of sums since the start, with at most one point every two seconds.

    A point is added before a step is counted, and when the history is read, so an idle server does no work. The sums before and
    after an idle period are equal.

    Args:
        families: returns the families of `Metrics`.
        loads: returns the ranks' last known loads.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        families: Callable[[], Sequence[Family]],
        loads: Callable[[], Sequence[RankLoad]],
        clock: Callable[[], float],
    ):
        self._families, self._loads, self._clock = families, loads, clock
        self._points: deque[_Point] = deque()

    def note(self) -> None:
        """Add a point unless the last one is younger than the interval."""
        now = self._clock()
        if not self._points or now - self._points[-1].time >= HISTORY_INTERVAL:
            self._points.append(self._read(now))
            while now - self._points[0].time > HISTORY_SECONDS:
                self._points.popleft()

    def to_json(self) -> HistoryBody:
        """Return all points, oldest first; the last is the current one.

        The current point replaces one that is almost as recent, because the rate between the two would be meaningless.
        """
        self.note()
        now = self._clock()
        points = [*self._points]
        if len(points) > 1 and now - points[-1].time < HISTORY_INTERVAL / 2:
            points.pop()
        if now > points[-1].time:
            points.append(self._read(now))
        points = [point for point in points if now - point.time <= HISTORY_SECONDS]
        before = [point for point in points if now - point.time >= LATENCY_SECONDS]
        return {
            "kept_seconds": HISTORY_SECONDS,
            "points": [{"age": now - point.time, **point.sums} for point in points],
            "buckets_a_minute_ago": (before[-1] if before else points[0]).buckets,
        }

    def _read(self, now: float) -> _Point:
        families = {family.name: family for family in self._families()}

        def total(name: str) -> float:
            return sum(value for _, _, value in families[name].samples())

        loads = self._loads()
        sums = {
            "prompt_tokens": total("vllm:prompt_tokens"),
            "generation_tokens": total("vllm:generation_tokens"),
            "running": sum(load.running for load in loads),
            "waiting": sum(load.waiting for load in loads),
        }
        return _Point(now, sums, {name: _buckets(families[name]) for name in LATENCIES})


def _buckets(histogram: Family) -> dict[str, float]:
    """Return a histogram's cumulative counts by upper bound, summed over the ranks."""
    counts: dict[str, float] = {}
    for suffix, labels, value in histogram.samples():
        if suffix == "_bucket":
            counts[labels[-1]] = counts.get(labels[-1], 0) + value
    return counts
