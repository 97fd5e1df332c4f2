"""`prefix-repetition`: a few long prefixes, each shared by many requests; what a prefix cache is for."""

from dataclasses import dataclass

import numpy as np

from dsjax.bench.serve.datasets import DatasetError
from dsjax.bench.serve.prompts import PromptMaker
from dsjax.bench.serve.records import BenchRequest


@dataclass(frozen=True)
class PrefixRepetition:
    """Each request is one of `num_prefixes` prefixes and a suffix of its own; names and defaults are vLLM's.

    Prefixes take turns in a shuffled order. If `count` is no multiple of `num_prefixes`, some prefixes have one request
    more (vLLM sends fewer requests than asked for instead).
    """

    prompts: PromptMaker
    prefix_len: int = 256
    suffix_len: int = 256
    num_prefixes: int = 10
    output_len: int = 128
    seed: int = 0

    def __post_init__(self):
        if self.prefix_len + self.suffix_len < 1:
            raise DatasetError(
                "--prefix-repetition-prefix-len and -suffix-len are both 0, expected a prompt of 1 token"
            )

    def requests(self, count: int, draw: int) -> list[BenchRequest]:
        """`count` requests."""
        order = np.random.default_rng([self.seed, 0]).permutation(count) % self.num_prefixes
        tokens = np.random.default_rng([self.seed, 1, draw])
        prefixes = [self.prompts.draw(tokens, self.prefix_len) for _ in range(self.num_prefixes)]
        requests = []
        for which in order.tolist():
            prompt, length = self.prompts.assemble(prefixes[which] + self.prompts.draw(tokens, self.suffix_len))
            requests.append(BenchRequest(prompt, length, self.output_len))
        return requests

    def cached_share_bound(self, count: int) -> float:
        """The largest share of prompt tokens that a cache can have: each prefix is computed once, suffixes always."""
        first = min(count, self.num_prefixes)
        return self.prefix_len * (count - first) / ((self.prefix_len + self.suffix_len) * count)
