"""`random`: prompts of random tokens with lengths around a mean."""

from dataclasses import dataclass

import numpy as np

from dsjax.bench.serve.datasets import DatasetError
from dsjax.bench.serve.prompts import PromptMaker
from dsjax.bench.serve.records import BenchRequest


@dataclass(frozen=True)
class RandomLengths:
    """Lengths are uniform integers between `length × (1 − ratio)` and `length × (1 + ratio)`, at least 1, as vLLM's.

    Attributes:
        prompts: makes the prompts.
        input_len, output_len: means; `prefix_len` tokens, the same for all requests of a draw, come before the input.
        range_ratio: 0 (all alike) up to, but not including, 1.
        seed: same seed, same requests.
    """

    prompts: PromptMaker
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    seed: int = 0

    def __post_init__(self):
        if not 0 <= self.range_ratio < 1:
            raise DatasetError(f"--random-range-ratio is {self.range_ratio}, expected at least 0 and less than 1")

    def requests(self, count: int, draw: int) -> list[BenchRequest]:
        """`count` requests."""
        lengths = np.random.default_rng([self.seed, 0])
        tokens = np.random.default_rng([self.seed, 1, draw])
        inputs, outputs = self._lengths(lengths, self.input_len, count), self._lengths(lengths, self.output_len, count)
        prefix = self.prompts.draw(tokens, self.prefix_len)
        requests = []
        for input_len, output_len in zip(inputs, outputs, strict=True):
            prompt, length = self.prompts.assemble(prefix + self.prompts.draw(tokens, input_len))
            requests.append(BenchRequest(prompt, length, output_len))
        return requests

    def _lengths(self, rng: np.random.Generator, mean: int, count: int) -> list[int]:
        least = max(1, int(np.floor(mean * (1 - self.range_ratio))))
        most = max(least, int(np.ceil(mean * (1 + self.range_ratio))))
        return rng.integers(least, most + 1, count).tolist()
