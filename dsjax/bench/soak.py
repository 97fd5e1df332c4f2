"""`dsjax bench soak`: run sessions with disconnects and aborts for minutes, then check that the server kept its promises."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import typer

from dsjax.bench.serve.records import BenchRequest, RequestRecord
from dsjax.cli.options import options_of
from dsjax.cli.output import report_console, write_json
from dsjax.errors import UserError
from dsjax.options import Checked, check_place, option
from dsjax.tables import table

if TYPE_CHECKING:
    from collections.abc import Sequence

    import aiohttp

    from dsjax.bench.accept.watch import ServerWatch
    from dsjax.bench.serve.client import Client


@dataclass(frozen=True)
class SoakOptions(Checked):
    """Options of `dsjax bench soak`: the server and the load."""

    base_url: str = option("http://127.0.0.1:8000", "Base URL of dsjax serve, with or without /v1.")
    api_key: str | None = option(None, "API key, sent as a bearer token.", envvar="OPENAI_API_KEY")
    admin_api_key: str | None = option(None, "Admin key of the server. Without it, no request is aborted by id.")
    duration: float = option(600.0, "Send requests for this many seconds.", above=0)
    max_concurrency: int = option(200, "Number of sessions. Each sends one request after another.", least=1)
    input_len: int = option(2048, "Maximum prompt tokens, log-uniform from 1, limited by the model's length.", least=1)
    output_len: int = option(512, "Maximum output tokens, log-uniform from 1.", least=1)
    vocab_size: int = option(4096, "Draw token ids from 16 to below this number.", least=17)
    disconnect_share: float = option(0.1, "Share of requests that disconnect at a random time.", least=0)
    abort_share: float = option(0.05, "Share of requests that are aborted at a random time.", least=0)
    seed: int = option(0, "Random seed.", least=0)
    request_timeout: float = option(1800.0, "Timeout of one request, in seconds.", above=0)
    memory_growth: float = option(0.05, "Maximum growth of memory that counts as flat, as a fraction.", least=0)
    itl_p99: float | None = option(None, "Maximum P99 of the inter-token latency, in ms.", above=0)
    json_file: str | None = option(None, "Also write JSON to this file; - for standard output.", flag="--json")

    def __post_init__(self):
        super().__post_init__()
        check_place("--json", self.json_file)

    def draw(self, rng: np.random.Generator, max_model_len: int) -> BenchRequest:
        """Draw a request. Its prompt is cut so that prompt and output fit `max_model_len`."""
        output, prompt = (int(np.exp(rng.uniform(0, np.log(most + 1)))) for most in (self.output_len, self.input_len))
        output = min(output, max_model_len - 1)
        prompt = min(prompt, max_model_len - output)
        return BenchRequest(rng.integers(16, self.vocab_size, prompt).tolist(), prompt, output)


@options_of(title=lambda kind: None, options=SoakOptions)
def soak(options: SoakOptions) -> None:
    """Load a dsjax server, disconnect or abort some of the requests, and check the server's state afterwards.

    Exit status 1: an unexpected error, no completed request, a page still in use at the end, growing memory, a compilation after warm-up,
    or, with --itl-p99, a higher P99 inter-token latency.
    """
    try:
        from dsjax.bench.serve.client import run
    except ImportError as error:
        raise UserError("dsjax bench soak needs aiohttp, which is not installed: pip install 'dsjax[bench]'") from error
    body = run(measure(options))
    console = report_console(stderr=options.json_file == "-")
    rows = [
        ("holds" if claim["holds"] else "FAILS", claim["claim"], str(claim["found"]), str(claim["expected"]))
        for claim in body["claims"]
    ]
    console.print(table(None, ("<<", "<<claim", "<<found", "<<expected"), rows))
    named = ("completed", "disconnected", "aborted", "output_tokens")
    shown = [f"{body[name]:,} {name.replace('_', ' ')}" for name in named]
    shown += [f"ITL {value:.1f} ms ({name})" for name, value in body["itl_ms"].items()]
    console.print(", ".join(shown), highlight=False)
    if options.json_file:
        write_json(options.json_file, body)
    if not all(claim["holds"] for claim in body["claims"]):
        raise typer.Exit(1)


@dataclass
class Outcome:
    """Totals over all sessions. `errors`: unexpected errors only, not those of aborted requests."""

    completed: int = 0
    disconnected: int = 0
    aborted: int = 0
    output_tokens: int = 0
    errors: Counter = field(default_factory=Counter)
    itls: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)

    def enter(self, request: BenchRequest, record: RequestRecord) -> None:
        """Count a request that was neither disconnected nor aborted."""
        if record.error is not None or record.output_tokens != request.output_tokens:
            self.errors[record.error or "an answer is shorter or longer than was asked for"] += 1
            return
        self.completed += 1
        self.output_tokens += record.output_tokens
        self.latencies.append(record.latency)
        self.itls += record.itls


class Soak:
    """Sessions against one server. client: sends their requests; length: the server's `max_model_len`."""

    def __init__(self, options: SoakOptions, http: aiohttp.ClientSession, url: str, client: Client, length: int):
        self._options, self._http, self._url, self._client, self._length = options, http, url, client, length
        self._ids = itertools.count()
        self.outcome = Outcome()

    async def run(self) -> None:
        """Run the sessions for `duration`. Requests still in flight then are finished."""
        deadline = time.monotonic() + self._options.duration
        drawn = [np.random.default_rng([self._options.seed, number]) for number in range(self._options.max_concurrency)]
        await asyncio.gather(*[self._session(rng, deadline) for rng in drawn])

    async def _session(self, rng: np.random.Generator, deadline: float) -> None:
        options, outcome = self._options, self.outcome
        abort_share = options.abort_share if options.admin_api_key else 0.0
        while time.monotonic() < deadline:
            request = options.draw(rng, self._length)
            request_id = f"soak-{next(self._ids)}"
            sending = asyncio.ensure_future(self._client.send(request, headers={"X-Request-ID": request_id}))
            # The moment may fall before the first token, mid-stream, or after the end; in the last case the request just completes.
            moment = rng.exponential(np.mean(outcome.latencies[-200:]) / 2 if outcome.latencies else 1.0)
            fate = rng.random() - options.disconnect_share
            if fate < abort_share:
                await asyncio.wait({sending}, timeout=moment)
            if fate < 0 and not sending.done():
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
                outcome.disconnected += 1
            elif 0 <= fate < abort_share and not sending.done() and await self._abort(request_id):
                record = await sending
                outcome.aborted += 1
                if record.error is not None and "abort" not in record.error:
                    outcome.errors[record.error] += 1
            else:
                outcome.enter(request, await sending)

    async def _abort(self, request_id: str) -> int:
        """Abort a request; return the number of aborted requests, 0 if it had already finished."""
        headers = {"Authorization": f"Bearer {self._options.admin_api_key}"}
        body = await self._ask("POST", "/abort_request", json={"request_id": request_id}, headers=headers)
        return json.loads(body)["aborted"]

    async def loads(self, seconds: float = 60.0) -> list[dict[str, Any]]:
        """Return the ranks' loads once all ranks are idle, or as they are after `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            loads = json.loads(await self._ask("GET", "/get_load"))["ranks"]
            held = any(load[name] for load in loads for name in ("running", "waiting", "used_pages"))
            if not held or time.monotonic() > deadline:
                return loads
            await asyncio.sleep(0.2)

    async def _ask(self, method: str, path: str, **options: Any) -> str:
        async with self._http.request(method, self._url + path, **options) as answer:
            if answer.status != 200:
                raise UserError(
                    f"{self._url}{path} answered {answer.status}, expected 200 (--admin-api-key, dsjax serve)"
                )
            return await answer.text()


async def measure(options: SoakOptions) -> dict[str, Any]:
    """Run a soak test and judge it."""
    from dsjax.bench.accept.watch import ServerWatch
    from dsjax.bench.serve.client import Client, open_session
    from dsjax.bench.serve.options import ServerOptions
    from dsjax.bench.serve.server_facts import ServerError, ask_server, server_url

    url = server_url(options.base_url)
    async with open_session(options.api_key) as http:
        facts = await ask_server(http, url, None)
        if facts.max_model_len is None:
            raise ServerError(f"{url} does not say its max_model_len; is it dsjax serve?")
        asked = ServerOptions(ignore_eos=True, request_timeout=options.request_timeout)
        sessions = Soak(options, http, url, Client(http, url, facts.model, asked), facts.max_model_len)
        async with ServerWatch(http, url, (), interval=2.0) as watch:
            await sessions.run()
        return judge(options, sessions.outcome, watch, await sessions.loads())


def judge(
    options: SoakOptions, outcome: Outcome, watch: ServerWatch, loads: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return the measured totals, and each claim with its found and expected values."""
    from dsjax.bench.accept.watch import COMPILED

    growth = _growth([sample.bytes for sample in watch.memory])
    pages = sum(load["used_pages"] for load in loads)
    held = sum(load["running"] + load["waiting"] for load in loads)
    compiled = watch.counters[-1].total(COMPILED) if watch.counters and watch.counters[-1].by(COMPILED) else None
    itls = np.asarray(outcome.itls or [0.0]) * 1e3
    p99 = float(np.percentile(itls, 99))
    bound = options.itl_p99
    claims = (
        ("no error but those asked for", not outcome.errors, dict(outcome.errors), {}),
        ("requests were completed", outcome.completed > 0, outcome.completed, "> 0"),
        ("pages in use at the end", pages == 0 and held == 0, pages, 0),
        ("memory is flat", growth is None or growth <= options.memory_growth, growth, f"<= {options.memory_growth}"),
        ("compilations after warm-up", not compiled, compiled, 0),
    )
    if bound is not None:
        claims += (("P99 of the ITL, ms", p99 <= bound, round(p99, 1), f"<= {bound:g}"),)
    return {
        "options": {name: value for name, value in asdict(options).items() if "key" not in name},
        **{name: getattr(outcome, name) for name in ("completed", "disconnected", "aborted", "output_tokens")},
        "itl_ms": {"median": float(np.median(itls)), "p99": p99, "max": float(itls.max())},
        "claims": [dict(zip(("claim", "holds", "found", "expected"), claim, strict=True)) for claim in claims],
    }


def _growth(memory: Sequence[float]) -> float | None:
    """Relative growth from the second tenth of the samples to the last; buffers are allocated in the first tenth. None without samples."""
    tenth = max(1, len(memory) // 10)
    start = memory[tenth : 2 * tenth] or memory
    return round(float(np.mean(memory[-tenth:]) / np.mean(start) - 1), 4) if start else None
