"""`Client`: sends requests to an OpenAI-compatible server and times the answers.

aiohttp on uvloop, because the client shares the machine with the server: 256 streams of 64 one-token chunks cost 17 µs of
CPU time a token with aiohttp, and 155 to 190 with httpx (2 cores, Python 3.11, aiohttp 3.14, httpx 0.28).
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Literal, TypeVar

import aiohttp

from dsjax.bench.serve.options import ServerOptions
from dsjax.bench.serve.records import AnswerError, AnswerReader, BenchRequest, RequestRecord, error_message

try:
    import uvloop
except ImportError:  # not available on Windows
    uvloop = None

OpenAIEndpoint = Literal["completions", "chat"]
PATHS: dict[OpenAIEndpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}

Result = TypeVar("Result")


def open_session(api_key: str | None) -> aiohttp.ClientSession:
    """Return a session without a connection limit: the load sets the concurrency, not a connection pool."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers)


class Client:
    """Sends requests over one session. Reads `clock` when a request starts and after each read of bytes.

    url: of the server, without `/v1`. model: name in requests. count_tokens: counts an answer's tokens if the server does not report usage.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        model: str,
        options: ServerOptions,
        count_tokens: Callable[[str], int] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._session, self._options, self._count_tokens, self._clock = session, options, count_tokens, clock
        self._url = url + PATHS[options.endpoint]
        self._seconds = options.request_timeout
        self._timeout = aiohttp.ClientTimeout(total=self._seconds, sock_connect=min(30.0, self._seconds))
        self._common = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        if options.temperature is not None:
            self._common["temperature"] = options.temperature
        if options.ignore_eos:  # a vLLM field: other servers reject unknown fields
            self._common["ignore_eos"] = True
        self._extra = options.extra_fields()

    def body(self, request: BenchRequest) -> dict[str, Any]:
        """Return the JSON body of a request."""
        if self._options.endpoint == "chat":
            messages = [{"role": "user", "content": request.prompt}]
            own = {"messages": messages, "max_completion_tokens": request.output_tokens}
        else:
            own = {"prompt": request.prompt, "max_tokens": request.output_tokens}
        return self._common | own | self._extra

    async def send(
        self,
        request: BenchRequest,
        *,
        arrival: float = 0.0,
        zero: float = 0.0,
        headers: Mapping[str, str] | None = None,
        on_start: Callable[[RequestRecord], None] = lambda record: None,
    ) -> RequestRecord:
        """Send a request and read its answer to the end; record errors instead of raising them.

        arrival: when it was due, for the record. zero: clock reading at the run's start, from which the record's times count. headers:
        of this request only. on_start: called with the record when sending begins; the record grows while the answer arrives.
        """
        payload = json.dumps(self.body(request)).encode()
        record = RequestRecord(arrival=arrival, start=self._clock() - zero, prompt_tokens=request.prompt_tokens)
        on_start(record)
        try:
            await self._exchange(payload, record, zero, headers or {})
        except aiohttp.ConnectionTimeoutError:
            record.error = f"no connection within {self._timeout.sock_connect:g} s"
        except TimeoutError:  # before OSError, its base class; includes aiohttp's timeouts
            record.error = f"no end of the answer within {self._seconds:g} s"
        except AnswerError as error:
            record.error = str(error)
        except (aiohttp.ClientError, OSError) as error:
            record.error = f"{type(error).__name__}: {error}".rstrip(": ")
        return record

    async def _exchange(self, payload: bytes, record: RequestRecord, zero: float, headers: Mapping[str, str]) -> None:
        headers = {"Content-Type": "application/json", **headers}
        async with self._session.post(self._url, data=payload, headers=headers, timeout=self._timeout) as response:
            if response.status != 200:
                raise AnswerError(f"HTTP {response.status}: {error_message(await _body(response))}")
            if response.content_type != "text/event-stream":
                raise AnswerError(f"the answer is {response.content_type}, expected text/event-stream")
            reader = AnswerReader(record, self._count_tokens)
            async for piece in response.content.iter_any():
                reader.feed(piece, self._clock() - zero)
                if reader.done:
                    break
            reader.close()
            # Read the end of the stream, so that the connection can be reused; wait at most a second for it.
            with contextlib.suppress(TimeoutError, aiohttp.ClientError):
                async with asyncio.timeout(1.0):
                    await response.content.read()


async def _body(response: aiohttp.ClientResponse) -> Any:
    text = (await response.read()).decode("utf-8", "replace")
    try:
        return json.loads(text)
    except ValueError:
        return text or response.reason


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Run `main` like `asyncio.run`, on uvloop if installed."""
    return asyncio.run(main) if uvloop is None else uvloop.run(main)
