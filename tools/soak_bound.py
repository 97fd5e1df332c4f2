"""How long a running request may wait for its next token, from the chunk budget, measured on the server itself.

In a step, a DP rank computes at most `--max-num-batched-tokens` tokens: a token for each running request first, the rest for
prompts. So two tokens of a request are at most one step apart, and no step has more work than

    a full budget of prompt tokens on every rank  +  a decode of all running requests.

Both are measured before the load begins, on the idle server. Prefill: prompts that fill every rank's budget for one step (for
several, where a prompt cannot be that long), sent together, one token each; the time until the last answer divided by the
steps, least of three. Decode: as many requests as there are sessions, with short prompts; the median gap. A preempted
request waits longer: preemptions are reported beside the bound.
"""

import asyncio
import math
import time

import numpy as np

from dsjax.bench.serve.client import Client
from dsjax.bench.serve.records import BenchRequest

_REPEATS = 3
_DECODE_TOKENS = 32


async def step_seconds(
    client: Client, ranks: int, budget: int, sessions: int, max_model_len: int, vocab_size: int
) -> tuple[float, float]:
    """Seconds of a step that prefills the whole budget on every rank, and of one that decodes for all sessions."""
    rng = np.random.default_rng(0)
    length = min(budget, max_model_len - 1)
    a_rank = math.ceil(budget / length)
    steps = math.ceil(a_rank * length / budget)
    prefill = min([await _seconds(client, rng, ranks * a_rank, length, vocab_size) for _ in range(_REPEATS)]) / steps
    prompts = [BenchRequest(rng.integers(16, vocab_size, 16).tolist(), 16, _DECODE_TOKENS) for _ in range(sessions)]
    records = await asyncio.gather(*[client.send(each) for each in prompts])
    _check(records)
    return prefill, float(np.median([gap for record in records for gap in record.itls]))


async def _seconds(client: Client, rng: np.random.Generator, count: int, length: int, vocab_size: int) -> float:
    prompts = [BenchRequest(rng.integers(16, vocab_size, length).tolist(), length, 1) for _ in range(count)]
    begin = time.perf_counter()
    _check(await asyncio.gather(*[client.send(each) for each in prompts]))
    return time.perf_counter() - begin


def _check(records) -> None:
    failed = [record.error for record in records if record.error is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed before the load began: {failed[0]}")
