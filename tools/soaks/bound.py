"""How long a running request may wait for its next token, from the chunk budget, measured on the server itself.

In a step, a DP rank computes at most B = `--max-num-batched-tokens` tokens: a token for each running request first, the rest for
prompts, C = `--prefill-chunk` of one prompt at most. Two tokens of a request are therefore at most one step apart. Prompts are
laid into launches of C token slots, rows × chunk: 1 × C, 2 × C/2, … until the chunk is 32 or the rows are S = `--max-num-seqs`,
K widths in all (`dsjax/engine/device/buckets.py`). Prompts come longest first, so of each width but the narrowest only the last launch
can be less than half full; the narrowest takes at most S rows, R a launch. A step has at most L = 2 B/C + K − 1 + S/R prompt
launches, and one decode (launches of a single narrow row stand in for others where they cost less together):

    bound = slack × (L × prompt launch + decode of all sessions)

Both times are measured on the idle server before the load. Prompt launch: on every rank prompts that fill B with whole chunks,
sent together, one token each; the time until the last answer divided by their B/C launches, least of three. Decode: as many
requests as there will be sessions; the median gap. `slack` is for the client and others on the same cores. It is a bound for
ranks with a like mix of widths (another rank's prompt can widen a launch), and without preemptions, which are reported beside it.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsjax.bench.serve.client import Client
from dsjax.bench.serve.records import BenchRequest, RequestRecord
from dsjax.engine.device.buckets import Buckets

_REPEATS = 3
_DECODE_TOKENS = 32
_DECODE_PROMPT = 512


@dataclass(frozen=True)
class ChunkBudget:
    """The server's options, and the seconds of its two launches."""

    max_num_batched_tokens: int
    prefill_chunk: int
    max_num_seqs: int
    prompt_launch: float
    decode_launch: float

    @property
    def most_prompt_launches(self) -> int:
        """How many launches a step with prompts has at most."""
        rectangles = Buckets.covering(self.max_num_seqs, self.prefill_chunk, mixed=False).prefill
        narrow = math.ceil(self.max_num_seqs / rectangles[-1].rows)
        return math.ceil(2 * self.max_num_batched_tokens / self.prefill_chunk) + len(rectangles) - 1 + narrow

    @property
    def seconds(self) -> float:
        """The longest step that the budget allows."""
        return self.most_prompt_launches * self.prompt_launch + self.decode_launch


async def measure_budget(
    client: Client,
    ranks: int,
    budget: int,
    chunk: int,
    max_num_seqs: int,
    sessions: int,
    max_model_len: int,
    vocab_size: int,
) -> ChunkBudget:
    """Measure both launches on an idle server.

    Raises:
        RuntimeError: a request failed.
    """
    rng = np.random.default_rng(0)
    length = min(budget, max_model_len - 1) // chunk * chunk or min(budget, max_model_len - 1)
    a_rank = max(1, budget // length)
    launches = a_rank * math.ceil(length / chunk)
    prompt = min(
        [await _seconds(client, _prompts(rng, ranks * a_rank, length, 1, vocab_size)) for _ in range(_REPEATS)]
    )
    context = min(_DECODE_PROMPT, max_model_len // 2)
    requests = _prompts(rng, sessions, context, min(_DECODE_TOKENS, max_model_len - context), vocab_size)
    records = await asyncio.gather(*[client.send(each) for each in requests])
    _check(records)
    decode = float(np.median([gap for record in records for gap in record.itls]))
    return ChunkBudget(budget, chunk, max_num_seqs, prompt / launches, decode)


def _prompts(rng: np.random.Generator, count: int, length: int, output: int, vocab_size: int) -> list[BenchRequest]:
    return [BenchRequest(rng.integers(16, vocab_size, length).tolist(), length, output) for _ in range(count)]


async def _seconds(client: Client, requests: Sequence[BenchRequest]) -> float:
    begin = time.perf_counter()
    _check(await asyncio.gather(*[client.send(each) for each in requests]))
    return time.perf_counter() - begin


def _check(records: Sequence[RequestRecord]) -> None:
    failed = [record.error for record in records if record.error is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed before the load began: {failed[0]}")
