"""`RequestMetrics`: tokens and latencies of each completion, from the updates that the event loop receives."""

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


class _Track:
    """What is known of a completion that goes on. Times are when the event loop got the token."""

    __slots__ = ("first", "last", "tokens")

    def __init__(self, now: float):
        self.first = self.last = now
        self.tokens = 0


class RequestMetrics:
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
