"""`trace`: arrival times and lengths of real traffic, from a Mooncake or BurstGPT file."""

import csv
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dsjax.bench.serve.datasets import DatasetError
from dsjax.bench.serve.prompts import PromptMaker
from dsjax.bench.serve.records import BenchRequest
from dsjax.errors import why_unreadable

_MOONCAKE_BLOCK = 512
"""Tokens that one of Mooncake's hash ids stands for."""


@dataclass(frozen=True)
class TraceRow:
    """One request of a trace: seconds, tokens, and the ids of its prompt's blocks (empty: nothing is shared)."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Trace:
    """The requests of a trace in order of time, with prompts made up: equal hash ids give equal blocks of tokens.

    Attributes:
        path: `.jsonl` as Mooncake's (timestamp in milliseconds, input_length, output_length, hash_ids of 512 tokens each),
            or `.csv` as BurstGPT's (Timestamp in seconds, Request tokens, Response tokens).
        prompts: makes the prompts.
        speed: arrivals come this many times as fast.
        length_scale: lengths, and Mooncake's blocks, are multiplied by this (at least 1 token), for small models.
        seed: of the prompts' tokens.
    """

    path: Path
    prompts: PromptMaker
    speed: float = 1.0
    length_scale: float = 1.0
    seed: int = 0

    def requests(self, count: int, draw: int) -> list[BenchRequest]:
        """The first `count` requests; the first arrives at 0."""
        rows = read_trace(self.path)[:count]
        own = np.random.default_rng([self.seed, 1, draw])
        requests = []
        for row in rows:
            length = self._scaled(row.input_length)
            ids = [token for block in row.hash_ids for token in self._block(block, draw)][:length]
            prompt, counted = self.prompts.assemble(ids + self.prompts.draw(own, length - len(ids)))
            arrival = (row.timestamp - rows[0].timestamp) / self.speed
            requests.append(BenchRequest(prompt, counted, self._scaled(row.output_length), arrival))
        return requests

    def _block(self, hash_id: int, draw: int) -> list[int]:
        return self.prompts.draw(np.random.default_rng([self.seed, 2, draw, hash_id]), self._scaled(_MOONCAKE_BLOCK))

    def _scaled(self, length: int) -> int:
        return max(1, round(length * self.length_scale))


def read_trace(path: Path) -> list[TraceRow]:
    """All requests of a trace that answer something, in order of time.

    Raises:
        DatasetError: no such file, or a line that is not as the format has it.
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
        hash_ids = tuple(int(i) for i in entry.get("hash_ids") or ())
        rows.append(
            TraceRow(entry["timestamp"] / 1000, int(entry["input_length"]), int(entry["output_length"]), hash_ids)
        )
    return rows


def _burstgpt(text: str) -> list[TraceRow]:
    return [
        TraceRow(float(row["Timestamp"]), int(row["Request tokens"]), int(row["Response tokens"]))
        for row in csv.DictReader(text.splitlines())
    ]
