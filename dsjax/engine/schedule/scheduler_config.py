"""`SchedulerConfig`: sizes and policy of a scheduler, and the check that a request fits. Plain Python, no JAX."""

from dataclasses import dataclass
from typing import Any, Literal

from dsjax.engine.contract.executor import ExecutorLimits
from dsjax.engine.contract.speculative import SpeculativeConfig
from dsjax.errors import UserError


class AdmissionError(UserError):
    """A request that this engine could never finish."""


@dataclass(frozen=True)
class SchedulerConfig:
    """Sizes and policy; every number is per DP rank."""

    max_num_seqs: int  # maximum running requests
    max_num_batched_tokens: int  # maximum tokens in a step, without padding
    prefill_chunk: int  # maximum tokens of one prompt in a step
    max_prefill_rows: int  # maximum prompts in a step
    page_size: int
    pages_per_rank: int
    max_model_len: int
    host_pages_per_rank: int = 0  # this and the next three: see `ExecutorLimits`
    disk_pages: int = 0
    disk_page_bytes: int = 0
    disk_pages_per_window: int = 1
    # `fcfs`: by arrival; `priority`: lower `RequestOptions.priority` first, then by arrival
    policy: Literal["fcfs", "priority"] = "fcfs"
    prefix_caching: bool = True  # whether requests share the pages of a common prefix
    speculation: SpeculativeConfig | None = None
    # batches of running requests that decode in separate steps, one per pipeline stage. With more than 1, a request decodes in at most one
    # step in flight
    num_batches: int = 1
    windows_per_rank: int = 0  # see `ExecutorLimits`
    host_windows_per_rank: int = 0  # see `ExecutorLimits`

    @classmethod
    def from_limits(cls, limits: ExecutorLimits, *, prefix_caching: bool = True, **options: Any) -> "SchedulerConfig":
        """Return a config that uses an executor's full capacity. options: the fields that the limits do not determine."""
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
        """Maximum tokens of one request in a rank's cache."""
        return (self.pages_per_rank - 1) * self.page_size

    @property
    def max_request_len(self) -> int:
        """Maximum prompt + output, in tokens: one more than the cache holds, since the last token is never written to it."""
        return min(self.max_model_len, self.max_tokens_in_cache + 1)

    def check_fits(self, num_prompt_tokens: int, max_tokens: int, is_given: bool = True) -> None:
        """Raise an `AdmissionError` if the model or the rank's pages cannot hold prompt + max_tokens.

        is_given: whether the request sets `max_tokens`; otherwise `max_tokens` is the minimum that it generates.
        """
        total = num_prompt_tokens + max_tokens
        output = f"max_tokens is {max_tokens}" if is_given else f"at least {max_tokens} more must fit"
        asked_for = f"the prompt has {num_prompt_tokens} tokens and {output}, together {total}"
        remedies = ["shorten the prompt", *(["lower max_tokens"] if is_given else [])]
        if total > self.max_model_len:
            raise AdmissionError(
                f"{asked_for}, but the maximum context length of this model is {self.max_model_len} tokens; "
                f"{' or '.join(remedies)}"
            )
        if total > self.max_request_len:
            raise AdmissionError(
                f"{asked_for}, but the cache of a rank holds {self.max_tokens_in_cache} ({self.pages_per_rank - 1} pages "
                f"of {self.page_size} tokens); {', '.join(remedies)} or raise --cache-tokens"
            )
