"""What is asked of a server, and what came back: `BenchRequest` and `RequestRecord`."""

import itertools
from dataclasses import dataclass, field
from typing import Literal

TokenSource = Literal["usage", "tokenizer", "chunks"]


@dataclass(frozen=True)
class BenchRequest:
    """One request to send.

    prompt: text, or token ids (completions only). prompt_tokens: its length as the dataset meant it; what the server reports is preferred
    where it reports. output_tokens: most tokens to answer with. arrival: seconds after the first request's, where the dataset has times of
    its own.
    """

    prompt: str | list[int]
    prompt_tokens: int
    output_tokens: int
    arrival: float | None = None


@dataclass
class RequestRecord:
    """One request's course. Times are seconds of one clock, whose zero is the run's start.

    arrival: when it was due. start: when its sending began; later than `arrival` where `--max-concurrency` held it back. chunk_times: when
    each chunk that carried tokens was read from the socket. end: when the last chunk with a choice was read: the end of the answer, before
    the usage and `[DONE]`. prompt_tokens, output_tokens: as `token_source` counted them. meant_prompt_tokens: as the dataset meant it.
    cached_tokens: prompt tokens that the server found in its prefix cache; None where it does not tell. text: the answer, reasoning
    included. error: None when the answer is whole; else one line. A record with an error counts in no figure but `failed`.
    """

    arrival: float
    start: float
    prompt_tokens: int
    chunk_times: list[float] = field(default_factory=list)
    end: float = 0.0
    output_tokens: int = 0
    token_source: TokenSource = "chunks"
    cached_tokens: int | None = None
    finish_reason: str | None = None
    text: str = ""
    error: str | None = None
    meant_prompt_tokens: int = field(init=False)

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
