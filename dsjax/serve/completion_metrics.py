"""`CompletionMetrics`: tokens and latencies of completions, counted from the updates that the event loop receives."""

from collections import defaultdict
from collections.abc import Callable, Sequence

from dsjax.engine.contract.executor import ErrorKind
from dsjax.engine.schedule.request import FinishReason, Request
from dsjax.engine.schedule.scheduler import Update
from dsjax.engine.text.output_processor import error_kind
from dsjax.serve.metrics_families import Counter, Histogram, Labels, Registry, one_two_five

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


class _TokenTimes:
    """An unfinished completion: when the event loop received its first and last tokens, and the number of tokens."""

    __slots__ = ("first", "last", "num_tokens")

    def __init__(self, now: float):
        self.first = self.last = now
        self.num_tokens = 0


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
        self._rank_labels: list[Labels] = []
        self._unfinished: dict[str, _TokenTimes] = {}

        def counter(name: str, documentation: str, *labelnames: str) -> Counter:
            return registry.counter(name, documentation, "engine", *labelnames)

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
            "Mean time per token of a completion, after its first token.",
            BETWEEN_TOKENS_SECONDS,
        )
        self._end_to_end = histogram("e2e_request_latency_seconds", "Time from arrival to the end of a completion.")
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
            "request_prefill_kv_computed_tokens", "Prompt tokens that were not in the prefix cache.", counts
        )
        self._output_length = histogram("request_generation_tokens", "Generated tokens of a completion.", counts)
        self._max_tokens = histogram(
            "request_params_max_tokens", "Maximum number of tokens of a completion (max_tokens).", counts
        )
        self.export_ranks(num_ranks)

    def export_ranks(self, num_ranks: int) -> None:
        """Export at least this many ranks; new ranks start at 0."""
        for index in range(len(self._rank_labels), num_ranks):
            rank = (str(index),)
            self._rank_labels.append(rank)
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
        gaps: dict[tuple[int, float], int] = defaultdict(int)
        num_generated: dict[int, int] = defaultdict(int)
        for request, result, finish_reason in updates:
            if result is not None:
                if not result.finite:
                    self._corrupted.add(self._rank_label(request.rank))
                if num_tokens := len(result.token_ids):
                    times = self._unfinished.get(request.request_id)
                    if times is None:
                        times = self._unfinished[request.request_id] = _TokenTimes(now)
                        self._count_first_token(request, now)
                    else:
                        # All rows of the previous step waited equally long: observe them together.
                        gaps[request.rank, times.last] += 1
                    times.last = now
                    times.num_tokens += num_tokens
                    num_generated[request.rank] += num_tokens
            if finish_reason is FinishReason.ERROR:
                self._failed.add((*self._rank_label(request.rank), error_kind(request.params, result).value))
            if finish_reason is not None:
                self._finish(request, finish_reason, now)
        for (rank, last), count in gaps.items():
            self._between_tokens.observe(self._rank_label(rank), now - last, count)
        for rank, count in num_generated.items():
            self._generation_tokens.add(self._rank_label(rank), count)

    def finish(self, requests: Sequence[Request], reason: FinishReason) -> None:
        """Count completions that ended without an update."""
        now = self._clock()
        for request in requests:
            self._finish(request, reason, now)

    def _rank_label(self, rank: int) -> Labels:
        """Return a rank's label: 0 for a request that ended before it got a rank, the last known rank if the mesh has just grown."""
        return self._rank_labels[min(max(rank, 0), len(self._rank_labels) - 1)]

    def _count_first_token(self, request: Request, now: float) -> None:
        rank = self._rank_label(request.rank)
        self._first_token.observe(rank, now - request.arrival_time)
        for counter in (self._prompt_tokens, self._queries):
            counter.add(rank, request.num_prompt_tokens)
        for counter in (self._prompt_cached, self._hits):
            counter.add(rank, request.num_cached_tokens or 0)

    def _finish(self, request: Request, reason: FinishReason, now: float) -> None:
        rank = self._rank_label(request.rank)
        times = self._unfinished.pop(request.request_id, None)
        scheduled = request.first_scheduled_time
        self._success.add((*rank, reason.value))
        if reason not in (FinishReason.STOP, FinishReason.LENGTH) or times is None or scheduled is None:
            return
        self._end_to_end.observe(rank, now - request.arrival_time)
        self._queue.observe(rank, scheduled - request.arrival_time)
        self._prompt_length.observe(rank, request.num_prompt_tokens)
        self._max_tokens.observe(rank, request.max_tokens)
        self._output_length.observe(rank, times.num_tokens)
        self._computed_length.observe(rank, request.num_prompt_tokens - (request.num_cached_tokens or 0))
        self._prefill.observe(rank, times.first - scheduled)
        self._decode.observe(rank, times.last - times.first)
        self._inference.observe(rank, times.last - scheduled)
        if times.num_tokens > 1:
            self._per_token.observe(rank, (times.last - times.first) / (times.num_tokens - 1))
