"""What is asked of a server, and what came back: `BenchRequest` and `RequestRecord`."""

import itertools
from dataclasses import dataclass, field
from typing import Literal

TokenSource = Literal["usage", "tokenizer", "chunks"]


@dataclass(frozen=True)
class BenchRequest:
    """One request to send."""

    prompt: str | list[int]  # text, or token ids (completions only)
    prompt_tokens: int  # its length as the dataset meant it; what the server reports is preferred where it reports
    output_tokens: int  # most tokens to answer with
    arrival: float | None = None  # seconds after the first request's, where the dataset has times of its own


@dataclass
class RequestRecord:
    """One request's course. Times are seconds of one clock, whose zero is the run's start.

    chunk_times: when each chunk that carried tokens was read from the socket. prompt_tokens, output_tokens: as `token_source` counted them.
    cached_tokens: prompt tokens that the server found in its prefix cache; None where it does not tell. error: None when the answer is
    whole; else one line. A record with an error counts in no figure but `failed`.
    """

    arrival: float  # when it was due
    start: float  # when its sending began; later than `arrival` where `--max-concurrency` held it back
    prompt_tokens: int
    chunk_times: list[float] = field(default_factory=list)
    end: float = 0.0  # when the last chunk with a choice was read: the end of the answer, before the usage and `[DONE]`
    output_tokens: int = 0
    token_source: TokenSource = "chunks"
    cached_tokens: int | None = None
    finish_reason: str | None = None
    text: str = ""  # the answer, reasoning included
    error: str | None = None
    meant_prompt_tokens: int = field(init=False)  # as the dataset meant it

    def __post_init__(self):
        self.meant_prompt_tokens = self.prompt_tokens

    @property
    def succeeded(self) -> bool:
        """Whether the answer is whole."""
        return self.error is None

    @property
    def ttft(self) -> float:
        """Seconds from the start of sending to the first chunk that carried tokens."""
        return self.chunk_times[0] - self.start

    @property
    def latency(self) -> float:
        """Seconds from the start of sending to the end of the answer."""
        return self.end - self.start

    @property
    def tpot(self) -> float | None:
        """Mean seconds of an output token after the first; None for an answer of one token."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itls(self) -> list[float]:
        """Seconds between chunks that carried tokens, one value a gap, however many tokens the later chunk has."""
        return [later - earlier for earlier, later in itertools.pairwise(self.chunk_times)]
