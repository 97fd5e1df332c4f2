"""`SchedulerConfig`: limits and policy of a scheduler, and the check that a request fits. Plain Python, no JAX."""

from dataclasses import dataclass
from typing import Any, Literal

from dsjax.engine.contract.executor import ExecutorLimits
from dsjax.engine.contract.speculative import SpeculativeConfig
from dsjax.errors import UserError


class AdmissionError(UserError):
    """Raised for a request that this engine could never finish."""


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits and policy of a scheduler. Limits are per DP rank, except `disk_pages`. Fields without a comment: see `ExecutorLimits`."""

    max_num_seqs: int  # maximum running requests
    max_num_batched_tokens: int  # maximum tokens in a step, not counting padding
    prefill_chunk: int  # maximum tokens of one prompt in a step
    max_prefill_rows: int  # maximum prompts in a step
    page_size: int
    pages_per_rank: int
    max_model_len: int
    host_pages_per_rank: int = 0
    disk_pages: int = 0
    disk_page_bytes: int = 0
    disk_pages_per_window: int = 1
    # `fcfs`: by arrival; `priority`: lower `RequestOptions.priority` first, then by arrival
    policy: Literal["fcfs", "priority"] = "fcfs"
    prefix_caching: bool = True  # whether requests share the pages of a common prefix
    speculation: SpeculativeConfig | None = None
    # micro-batches of running requests, one per pipeline stage. Each decodes in steps of its own; with more than one micro-batch, a request
    # is in at most one decode step in flight
    num_batches: int = 1
    windows_per_rank: int = 0
    host_windows_per_rank: int = 0

    @classmethod
    def from_limits(cls, limits: ExecutorLimits, *, prefix_caching: bool = True, **options: Any) -> "SchedulerConfig":
        """Return a config that uses an executor's full capacity. options: values of the other fields."""
        return cls(
            max_num_seqs=limits.max_rows_decode,
            prefill_chunk=limits.max_chunk,
            max_prefill_rows=limits.max_rows_prefill,
            page_size=limits.page_size,
            pages_per_rank=limits.pages_per_rank,
            max_model_len=limits.max_model_len,
            host_pages_per_rank=limits.host_pages_per_rank if prefix_caching else 0,
            disk_pages=limits.disk_pages if prefix_caching else 0,
            disk_page_bytes=limits.disk_page_bytes,
            disk_pages_per_window=limits.disk_pages_per_window,
            prefix_caching=prefix_caching,
            windows_per_rank=limits.windows_per_rank,
            host_windows_per_rank=limits.host_windows_per_rank if prefix_caching else 0,
            **options,
        )

    @property
    def max_tokens_in_cache(self) -> int:
        """Maximum tokens of one request in a rank's cache. The first page is never allocated."""
        return (self.pages_per_rank - 1) * self.page_size

    @property
    def max_request_len(self) -> int:
        """Maximum tokens of prompt + output: up to one more than the cache holds, because the last token is never written to it."""
        return min(self.max_model_len, self.max_tokens_in_cache + 1)

    def check_fits(self, num_prompt_tokens: int, max_tokens: int, is_explicit: bool = True) -> None:
        """Raise an `AdmissionError` if the model or the rank's pages cannot hold prompt + max_tokens.

        is_explicit: whether the request sets `max_tokens`. If not, pass the minimum number of tokens that it generates.
        """
        total = num_prompt_tokens + max_tokens
        output = f"max_tokens is {max_tokens}" if is_explicit else f"at least {max_tokens} more must fit"
        request = f"the prompt has {num_prompt_tokens} tokens and {output}, together {total}"
        remedies = ["shorten the prompt", *(["lower max_tokens"] if is_explicit else [])]
        if total > self.max_model_len:
            raise AdmissionError(
                f"{request}, but the maximum context length of this model is {self.max_model_len} tokens; "
                f"{' or '.join(remedies)}"
            )
        if total > self.max_request_len:
            raise AdmissionError(
                f"{request}, but the cache of a rank holds {self.max_tokens_in_cache} ({self.pages_per_rank - 1} pages "
                f"of {self.page_size} tokens); {', '.join(remedies)} or raise --cache-tokens"
            )
