"""Workloads: the requests of a point, limited to those that the server accepts.

All draws have the same lengths, but different prompts if the workload generates them. Draw 0 is the warm-up, draw 1 the first point of
a sweep, and so on, so that no point hits the prefix cache with prompts of an earlier one.
"""

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dsjax.bench.serve.options import WorkloadOptions
from dsjax.bench.serve.prompts import PromptMaker, PromptSource, UnmakablePromptError, count_tokens
from dsjax.bench.serve.records import BenchRequest
from dsjax.errors import UserError, why_unreadable

_DEFAULT_COUNT, _WHOLE_FILE = 1000, 10**9
_SHAREGPT_MIN_TOKENS, _SHAREGPT_MAX_PROMPT, _SHAREGPT_MAX_TOTAL = 4, 1024, 2048
_MOONCAKE_BLOCK = 512
"""Tokens per Mooncake hash id."""


class DatasetError(UserError):
    """A workload that cannot be generated, because of its lengths or its file."""


@dataclass(frozen=True)
class Dataset:
    """The workload of the options."""

    options: WorkloadOptions
    prompts: PromptMaker  # generates prompts
    source: PromptSource  # has the tokenizer that counts the tokens of a file's prompts

    def requests(self, count: int, draw: int) -> list[BenchRequest]:
        """Return the first `count` requests of a draw; fewer if the file has fewer.

        Raises:
            DatasetError: the file cannot be read, or has another format.
        """
        return _DATASETS[self.options.dataset_name](self, count, draw)

    def fitting_requests(
        self, draw: int, max_model_len: int | None, count: int | None = None
    ) -> tuple[list[BenchRequest], int]:
        """Return the requests of a draw that the server accepts, and the number of requests that are too long for it.

        max_model_len: maximum tokens of prompt and answer; None: no limit. count: requests to draw; None: as many as the options say.

        Raises:
            DatasetError: none is left.
        """
        name = self.options.dataset_name
        count = count or self.options.num_prompts or (_WHOLE_FILE if name == "trace" else _DEFAULT_COUNT)
        requests = self.requests(count, draw)
        fitting = [r for r in requests if max_model_len is None or r.prompt_tokens + r.output_tokens <= max_model_len]
        if not requests:
            raise DatasetError(f"--dataset-name {name} has no request that can be used")
        if not fitting:
            shortest = min(r.prompt_tokens + r.output_tokens for r in requests)
            raise DatasetError(
                f"every request is longer than the server's {max_model_len:,} tokens: the shortest has {shortest:,} "
                f"(prompt and answer); choose shorter lengths{_HOW_TO_SHORTEN.get(name, '')}"
            )
        return fitting, len(requests) - len(fitting)

    def cached_share_bound(self, count: int) -> float | None:
        """Return the maximum share of prompt tokens that can hit a prefix cache; None for a workload without a bound.

        Each prefix of `prefix-repetition` is computed once, suffixes always.
        """
        o = self.options
        if o.dataset_name != "prefix-repetition":
            return None
        prefix, suffix = o.prefix_repetition_prefix_len, o.prefix_repetition_suffix_len
        computed = min(count, o.prefix_repetition_num_prefixes)  # prefixes
        return prefix * (count - computed) / ((prefix + suffix) * count)


_HOW_TO_SHORTEN = {
    "random": ": --random-input-len, --random-output-len",
    "prefix-repetition": ": --prefix-repetition-prefix-len, -suffix-len, -output-len",
    "trace": ": --trace-length-scale",
}


def _random_lengths(dataset: Dataset, count: int, draw: int) -> list[BenchRequest]:
    """Draw lengths uniformly from `length × (1 − ratio)` to `length × (1 + ratio)`, at least 1, like vLLM.

    Each prompt starts with the same `--random-prefix-len` tokens within a draw.
    """
    o, prompts = dataset.options, dataset.prompts
    rng = np.random.default_rng([o.seed, 0])
    tokens = np.random.default_rng([o.seed, 1, draw])

    def lengths(mean: int) -> list[int]:
        least = max(1, int(np.floor(mean * (1 - o.random_range_ratio))))
        most = max(least, int(np.ceil(mean * (1 + o.random_range_ratio))))
        return rng.integers(least, most + 1, count).tolist()

    inputs, outputs = lengths(o.random_input_len), lengths(o.random_output_len)
    prefix = prompts.draw(tokens, o.random_prefix_len)
    assembled = [prompts.assemble(prefix + prompts.draw(tokens, length)) for length in inputs]
    return [BenchRequest(*prompt, output_len) for prompt, output_len in zip(assembled, outputs, strict=True)]


def _prefix_repetition(dataset: Dataset, count: int, draw: int) -> list[BenchRequest]:
    """Combine one of a few prefixes with a unique suffix for each request; names and defaults are vLLM's.

    Prefixes alternate in a shuffled order. If `count` is not a multiple of their number, some have one request more (vLLM sends
    fewer requests than asked for instead).
    """
    o, prompts = dataset.options, dataset.prompts
    order = np.random.default_rng([o.seed, 0]).permutation(count) % o.prefix_repetition_num_prefixes
    tokens = np.random.default_rng([o.seed, 1, draw])
    prefixes = [prompts.draw(tokens, o.prefix_repetition_prefix_len) for _ in range(o.prefix_repetition_num_prefixes)]
    suffix_len, output_len = o.prefix_repetition_suffix_len, o.prefix_repetition_output_len
    assembled = (prompts.assemble(prefixes[index] + prompts.draw(tokens, suffix_len)) for index in order.tolist())
    return [BenchRequest(prompt, length, output_len) for prompt, length in assembled]


def _sharegpt(dataset: Dataset, count: int, draw: int) -> list[BenchRequest]:
    """Take the first two turns of each conversation, shuffled: the first is the prompt, the second gives the output length.

    Like vLLM, leave out conversations of one turn, prompts or outputs of fewer than 4 tokens, prompts of more than 1,024 tokens and
    pairs of more than 2,048 tokens. All draws have the same prompts, those of the file.
    """
    o = dataset.options
    tokenizer = dataset.source.tokenizer
    if tokenizer is None:
        raise UnmakablePromptError("--dataset-name sharegpt counts tokens with a tokenizer; name one with --tokenizer")
    turns = _read_turns(Path(o.dataset_path))
    requests: list[BenchRequest] = []
    for index in np.random.default_rng([o.seed, 0]).permutation(len(turns)).tolist():
        if len(requests) == count:
            break
        prompt, answer = turns[index]
        prompt_len = count_tokens(tokenizer, prompt)
        output_len = o.sharegpt_output_len or count_tokens(tokenizer, answer)
        if prompt_len < _SHAREGPT_MIN_TOKENS or (o.sharegpt_output_len is None and output_len < _SHAREGPT_MIN_TOKENS):
            continue
        if prompt_len <= _SHAREGPT_MAX_PROMPT and prompt_len + output_len <= _SHAREGPT_MAX_TOTAL:
            requests.append(BenchRequest(prompt, prompt_len, output_len))
    return requests


def _read_turns(path: Path) -> list[tuple[str, str]]:
    """Read the first two turns of each conversation that has them from a JSON list of `{"conversations": [{"value": text}, …]}`."""
    try:
        entries: list[Any] = json.loads(path.read_text(encoding="utf-8"))
        talks = [entry.get("conversations") or () for entry in entries]
        return [(str(talk[0]["value"]), str(talk[1]["value"])) for talk in talks if len(talk) >= 2]
    except OSError as error:
        raise DatasetError(f"cannot read --dataset-path {path}: {why_unreadable(error)}") from error
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise DatasetError(
            f'{path} is no ShareGPT file: expected a JSON list of {{"conversations": [{{"value": …}}, …]}}; '
            f"{type(error).__name__}: {error}"
        ) from error


class TraceRow(NamedTuple):
    """One request of a trace: seconds, tokens, and the hash ids of its prompt's blocks (empty: no shared blocks)."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def _trace(dataset: Dataset, count: int, draw: int) -> list[BenchRequest]:
    """Return the requests of a trace by arrival time, the first at 0, with generated prompts: equal hash ids give equal blocks of tokens.

    Lengths, and Mooncake's blocks, are multiplied by `--trace-length-scale` (at least 1 token).
    """
    o, prompts = dataset.options, dataset.prompts
    tokens = np.random.default_rng([o.seed, 1, draw])

    def scaled(length: int) -> int:
        return max(1, round(length * o.trace_length_scale))

    def block(hash_id: int) -> list[int]:
        return prompts.draw(np.random.default_rng([o.seed, 2, draw, hash_id]), scaled(_MOONCAKE_BLOCK))

    rows = read_trace(Path(o.dataset_path))[:count]
    requests = []
    for row in rows:
        length = scaled(row.input_length)
        ids = [token for hash_id in row.hash_ids for token in block(hash_id)][:length]
        prompt, counted = prompts.assemble(ids + prompts.draw(tokens, length - len(ids)))
        arrival = (row.timestamp - rows[0].timestamp) / o.trace_speed
        requests.append(BenchRequest(prompt, counted, scaled(row.output_length), arrival))
    return requests


def read_trace(path: Path) -> list[TraceRow]:
    """Return all requests of a trace that have output tokens, by arrival time.

    path: Mooncake's `.jsonl` (timestamp in milliseconds, input_length, output_length, hash_ids of 512 tokens each), or BurstGPT's
    `.csv` (Timestamp in seconds, Request tokens, Response tokens).

    Raises:
        DatasetError: no such file, a line in another format, or no request with output tokens.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"cannot read --dataset-path {path}: {why_unreadable(error)}") from error
    try:
        rows = _burstgpt(text) if path.suffix == ".csv" else _mooncake(text)
    except (ValueError, KeyError, TypeError) as error:
        raise DatasetError(
            f"{path} is no trace: expected Mooncake's lines of JSON (timestamp, input_length, output_length, hash_ids) or, "
            f"in a .csv, BurstGPT's columns (Timestamp, Request tokens, Response tokens); {type(error).__name__}: {error}"
        ) from error
    rows = sorted((row for row in rows if row.output_length > 0), key=lambda row: row.timestamp)
    if not rows:
        raise DatasetError(f"{path} has no request that answers anything")
    return rows


def _mooncake(text: str) -> list[TraceRow]:
    rows = []
    for line in filter(str.strip, text.splitlines()):
        entry = json.loads(line)
        hash_ids = tuple(map(int, entry.get("hash_ids") or ()))
        lengths = int(entry["input_length"]), int(entry["output_length"])
        rows.append(TraceRow(entry["timestamp"] / 1000, *lengths, hash_ids))
    return rows


def _burstgpt(text: str) -> list[TraceRow]:
    rows = csv.DictReader(text.splitlines())
    return [TraceRow(float(r["Timestamp"]), int(r["Request tokens"]), int(r["Response tokens"])) for r in rows]


_DATASETS: dict[str, Callable[[Dataset, int, int], list[BenchRequest]]] = {
    "random": _random_lengths,
    "prefix-repetition": _prefix_repetition,
    "sharegpt": _sharegpt,
    "trace": _trace,
}
