"""`sharegpt`: real first turns of conversations, from a ShareGPT file."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from dsjax.bench.serve.datasets import DatasetError
from dsjax.bench.serve.prompts import count_tokens
from dsjax.bench.serve.records import BenchRequest
from dsjax.errors import why_unreadable

_LEAST, _LONGEST_PROMPT, _LONGEST = 4, 1024, 2048


@dataclass(frozen=True)
class ShareGpt:
    """The first two turns of each conversation: the first is the prompt, the second's length the output's.

    As vLLM: conversations of one turn are left out, and so are prompts or outputs of fewer than 4 tokens, prompts of more
    than 1,024 and pairs of more than 2,048 tokens. `draw` changes nothing: the file has what it has.

    Attributes:
        path: a JSON list of `{"conversations": [{"value": text}, …]}`.
        tokenizer: counts tokens.
        output_len: for every request, instead of the second turn's.
        seed: of the order.
    """

    path: Path
    tokenizer: tokenizers.Tokenizer
    output_len: int | None = None
    seed: int = 0

    def requests(self, count: int, draw: int) -> list[BenchRequest]:
        """The first `count` of the shuffled conversations that fit."""
        turns = self._turns()
        requests: list[BenchRequest] = []
        for index in np.random.default_rng([self.seed, 0]).permutation(len(turns)).tolist():
            if len(requests) == count:
                break
            prompt, answer = turns[index]
            prompt_len = count_tokens(self.tokenizer, prompt)
            output_len = self.output_len or count_tokens(self.tokenizer, answer)
            short = prompt_len < _LEAST or (self.output_len is None and output_len < _LEAST)
            if not short and prompt_len <= _LONGEST_PROMPT and prompt_len + output_len <= _LONGEST:
                requests.append(BenchRequest(prompt, prompt_len, output_len))
        return requests

    def _turns(self) -> list[tuple[str, str]]:
        try:
            entries: list[Any] = json.loads(self.path.read_text(encoding="utf-8"))
            talks = [entry.get("conversations") or () for entry in entries]
            return [(str(talk[0]["value"]), str(talk[1]["value"])) for talk in talks if len(talk) >= 2]
        except OSError as error:
            raise DatasetError(f"cannot read --dataset-path {self.path}: {why_unreadable(error)}") from error
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise DatasetError(
                f'{self.path} is no ShareGPT file: expected a JSON list of {{"conversations": [{{"value": …}}, …]}}; '
                f"{type(error).__name__}: {error}"
            ) from error
