"""The sessions of `tools/soak.py`: each sends one request after the other, and ends some of them on purpose."""

import asyncio
import itertools
import time
from collections import Counter
from dataclasses import dataclass, field

import aiohttp
import numpy as np

from dsjax.bench.serve.client import Client
from dsjax.bench.serve.records import BenchRequest, RequestRecord


@dataclass(frozen=True)
class Mix:
    """What sessions ask for; lengths are log-uniform between their bounds.

    Attributes:
        disconnect_share, abort_share: of the requests that are ended on purpose, by closing the socket or by `/abort_request`.
    """

    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    max_model_len: int
    vocab_size: int
    disconnect_share: float
    abort_share: float

    def draw(self, rng: np.random.Generator) -> BenchRequest:
        """A request; its prompt is cut to what the answer leaves of the model's length."""
        output = min(_log_uniform(rng, *self.output_tokens), self.max_model_len - 1)
        prompt = max(1, min(_log_uniform(rng, *self.prompt_tokens), self.max_model_len - output))
        return BenchRequest(rng.integers(16, self.vocab_size, prompt).tolist(), prompt, output)


@dataclass
class Outcome:
    """What came of all sessions. `errors` are those that nobody asked for."""

    completed: int = 0
    disconnected: int = 0
    aborted: int = 0
    output_tokens: int = 0
    errors: Counter = field(default_factory=Counter)
    itls: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)


async def run_sessions(
    client: Client, mix: Mix, count: int, seconds: float, seed: int, admin: "Admin | None"
) -> Outcome:
    """Run `count` sessions for a time; requests under way at its end are finished."""
    outcome = Outcome()
    deadline = time.monotonic() + seconds
    ids = itertools.count()
    sessions = [
        _session(client, mix, np.random.default_rng([seed, n]), deadline, ids, admin, outcome) for n in range(count)
    ]
    await asyncio.gather(*sessions)
    return outcome


class Admin:
    """Aborts requests by their id."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str):
        self._session, self._url, self._headers = session, f"{url}/abort_request", {"Authorization": f"Bearer {key}"}

    async def abort(self, request_id: str) -> int:
        """How many requests were ended: 0 when it was over already."""
        async with self._session.post(self._url, json={"request_id": request_id}, headers=self._headers) as response:
            response.raise_for_status()
            return (await response.json())["aborted"]


async def _session(client, mix, rng, deadline, ids, admin, outcome: Outcome) -> None:
    while time.monotonic() < deadline:
        request, request_id = mix.draw(rng), f"soak-{next(ids)}"
        sending = asyncio.ensure_future(client.send(request, headers={"X-Request-ID": request_id}))
        fate = rng.random()
        # Some ends come before the first token, some in the middle, some after the end: then nothing is ended.
        moment = rng.exponential(np.mean(outcome.latencies[-200:]) / 2 if outcome.latencies else 1.0)
        if fate < mix.disconnect_share:
            await asyncio.wait({sending}, timeout=moment)
            if not sending.done():
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
                outcome.disconnected += 1
                continue
        elif admin is not None and fate < mix.disconnect_share + mix.abort_share:
            await asyncio.wait({sending}, timeout=moment)
            if not sending.done() and await admin.abort(request_id):
                record = await sending
                outcome.aborted += 1
                if record.error is not None and "abort" not in record.error:
                    outcome.errors[record.error] += 1
                continue
        _enter(outcome, request, await sending)


def _enter(outcome: Outcome, request: BenchRequest, record: RequestRecord) -> None:
    if record.error is None and record.output_tokens != request.output_tokens:
        outcome.errors["an answer is shorter or longer than was asked for"] += 1
    elif record.error is not None:
        outcome.errors[record.error] += 1
    else:
        outcome.completed += 1
        outcome.output_tokens += record.output_tokens
        outcome.latencies.append(record.latency)
        outcome.itls += record.itls


def _log_uniform(rng: np.random.Generator, least: int, most: int) -> int:
    return int(np.exp(rng.uniform(np.log(least), np.log(most + 1))))
