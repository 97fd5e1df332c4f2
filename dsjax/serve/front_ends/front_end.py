"""Front end process: HTTP server, tokenizer and detokenizer for an engine in another process.

The engine's process starts it as `python -m dsjax.serve.front_ends.front_end CHANNEL LISTENER` with two inherited descriptors.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from dsjax.background import contained
from dsjax.engine.contract.sampling_params import SamplingError
from dsjax.engine.request_streams import RequestStreams
from dsjax.engine.schedule.request import Request
from dsjax.engine.schedule.scheduler import Update
from dsjax.engine.schedule.scheduler_config import SchedulerConfig
from dsjax.engine.text.input_processor import InputProcessor, PreparedRequest
from dsjax.engine.text.output_processor import OutputProcessor
from dsjax.engine.text.outputs import EngineClosingError, EngineDeadError
from dsjax.engine.text.tokenizer import Tokenizer
from dsjax.serve.connections import error_response
from dsjax.serve.errors import ApiError
from dsjax.serve.front_ends import messages
from dsjax.serve.guards import ADMIN_PATHS, Guard
from dsjax.serve.logs import configure_logging
from dsjax.serve.metrics import Metrics
from dsjax.serve.server import Server, tune_interpreter
from dsjax.serve.serving import QUEUE_FULL, Phase, Serving, queue_full

logger = logging.getLogger(__name__)

FORWARDED_PATHS = ADMIN_PATHS | {"/metrics", "/history", "/server_info", "/get_load", "/ready"}
"""Paths that are forwarded to the engine's server."""
_HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"upgrade", b"te"})
_NOT_SENT = _HOP_BY_HOP | {b"x-request-id"}
_NOT_RETURNED = _HOP_BY_HOP | {b"content-encoding", b"date", b"server"}


class RemoteEngine(RequestStreams):
    """The engine of another process. Requests and tokens go over a channel; streams and text belong to this process.

    Attributes:
        channel: set before the first client connects.
        on_refused: called with the reason when the engine's process refuses a request.
        num_ranks: DP ranks of the mesh.
    """

    channel: messages.Channel
    waiting = (0, 0)
    """Requests and tokens in the queue: always 0, because the engine's process admits requests for all front ends."""
    change_under_way = None
    """None: requests wait in the engine's process while the mesh changes."""
    running = False
    """False: no thread of this process runs a step."""

    def __init__(self, welcome: messages.Welcome, tokenizer: Tokenizer | None):
        inputs = InputProcessor(
            tokenizer,
            welcome.scheduler,
            welcome.vocab_size,
            welcome.eos_token_ids,
            welcome.seed,
            compiles_grammars=False,
        )
        outputs = OutputProcessor(tokenizer, welcome.stream_interval)
        super().__init__(inputs, outputs)
        self.tokenizer = tokenizer
        self.on_death: Callable[[], None] | None = None
        self.on_refused: Callable[[str], None] = lambda code: None
        self.num_ranks = welcome.num_ranks
        self._handles = itertools.count(1)
        self._by_handle: dict[int, Request] = {}
        self._handles_by_id: dict[str, int] = {}
        self._is_closed = False

    def start(self) -> None:
        """Do nothing: the engine's process starts its own thread."""

    async def call(self, function: Any) -> Any:
        """Raise `EngineDeadError`: the core is in another process, and requests that need it are forwarded there."""
        raise EngineDeadError("the engine is in another process")

    async def shutdown(self, timeout: float = 10.0) -> None:
        """End the remaining streams."""
        self._is_closed = True
        self.abort_all()
        self.channel.fail(EngineClosingError("the server is shutting down"))
        self.channel.close()

    async def _admit(self, prepared: Sequence[PreparedRequest]) -> None:
        new_requests = []
        for request in prepared:
            handles = [next(self._handles) for _ in request.completions]
            for handle, completion in zip(handles, request.completions, strict=True):
                self._by_handle[handle] = completion
                self._handles_by_id[completion.request_id] = handle
            new_requests.append(messages.NewRequest.from_prepared(request, handles[0]))
        response = await self.channel.ask(lambda number: messages.Add(number, new_requests))
        if response.refusal is None:
            return
        for request in prepared:
            self._forget_handles(completion.request_id for completion in request.completions)
        if response.param is not None:
            raise SamplingError(response.param, response.refusal)
        if response.failed:
            raise RuntimeError(response.refusal)
        self.on_refused(QUEUE_FULL)
        raise queue_full(response.refusal)

    def resize(self, scheduler: SchedulerConfig, num_ranks: int) -> None:
        """Apply the request limits of a changed mesh."""
        self.num_ranks = num_ranks
        self._inputs.change(scheduler)

    def receive(self, entries: Sequence[messages.UpdateEntry]) -> None:
        """Deliver the updates of a step, as the engine's thread does within one process."""
        updates = []
        for handle, result, finish_reason, progress in entries:
            request = self._by_handle.get(handle)
            if request is None:
                continue
            if progress is not None:
                progress.copy_to(request)
            if result is not None:
                request.token_ids.extend(result.token_ids)
            if finish_reason is not None:
                request.finish_reason = finish_reason
                self._forget_handles([request.request_id])
            updates.append(Update(request, result, finish_reason))
        self.deliver(updates, None)

    def mark_dead(self) -> None:
        """End all streams and the server, because the engine has failed or its process has ended."""
        if not self._is_closed:
            self._is_closed = True
            self.channel.fail(EngineDeadError("the engine has failed"))
            self.fail_requests(EngineDeadError("the engine has failed"))
            if self.on_death is not None:
                self.on_death()

    def _end(self, completion_ids: Sequence[str]) -> None:
        handles = [self._handles_by_id[name] for name in completion_ids if name in self._handles_by_id]
        if handles:
            self.channel.send(messages.Abort(handles))
        self._forget_handles(completion_ids)

    def _forget_handles(self, completion_ids: Any) -> None:
        for completion_id in completion_ids:
            handle = self._handles_by_id.pop(completion_id, None)
            self._by_handle.pop(handle, None)


class Forwarding(Guard):
    """Forwards requests for the engine's process to its server, with the client's headers and body."""

    def __init__(self, app: ASGIApp, address: str, timeout: float):
        super().__init__(app)
        transport = httpx.AsyncHTTPTransport(uds=address)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=timeout + 60)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the application or to the engine's server."""
        if (scope["path"].rstrip("/") or "/") not in FORWARDED_PATHS:
            await self._app(scope, receive, send)
            return
        message = await receive()  # one message, because `BodyLimits` has read the whole body
        state = scope["state"]
        state["forwarded"] = True
        headers = [(name, value) for name, value in scope["headers"] if name not in _NOT_SENT]
        headers.append((b"x-request-id", state["request_id"].encode()))
        query = scope["query_string"].decode("latin-1")
        path = scope["path"] + (f"?{query}" if query else "")
        try:
            response = await self._client.request(scope["method"], path, headers=headers, content=message["body"])
        except httpx.HTTPError:
            error = ApiError(503, "the engine process does not respond", type="server_error", code="not_ready")
            await error_response(scope, error)(scope, receive, send)
            return
        headers = [(name, value) for name, value in response.headers.raw if name.lower() not in _NOT_RETURNED]
        headers.append((b"content-length", str(len(response.content)).encode()))
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": response.content})


class FrontEndServer(Server):
    """A `Server` that the engine's process starts and ends. It ignores signals, which a terminal sends to both processes."""

    def __init__(self, serving: Serving, engine: RemoteEngine, channel_socket: socket.socket, **options: Any):
        super().__init__(serving, **options)
        self._remote, self._channel_socket = engine, channel_socket

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Connect to the engine's process, then listen for clients."""
        reader, writer = await asyncio.open_connection(sock=self._channel_socket)
        self._channel = self._remote.channel = messages.Channel(reader, writer, messages.FromEngine)
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Do nothing."""

    async def _become_ready(self) -> None:
        tune_interpreter()
        self._remote.start()
        self._channel.send(messages.Hello())
        async for message in self._channel.messages():
            with contained("front end requests", "A message of the engine's process is lost."):
                self._receive(message)
        self._remote.mark_dead()  # sets `should_exit`

    def _receive(self, message: Any) -> None:
        match message:
            case messages.StepUpdates():
                self._remote.receive(message.updates)
            case messages.AddResponse():
                self._channel.resolve(message.number, message)
            case messages.PhaseIs():
                self._serving.phase = Phase(message.phase)
            case messages.Resized():
                self._remote.resize(message.scheduler, message.num_ranks)
                self._serving.max_model_len = message.max_model_len
                self._serving.metrics.on_change(message.num_ranks, 0)
            case messages.Gather():
                self._channel.send(messages.Snapshot(message.number, self._samples()))
            case messages.AbortById():
                self._channel.send(messages.Count(message.number, self._serving.abort(message.request_id)))
            case messages.EndStreams():
                self._remote.abort_all()
            case messages.EndProcess():
                self.should_exit = True
            case messages.Failed():
                self._remote.mark_dead()

    def _samples(self) -> list[tuple[str, str, tuple[str, ...], float]]:
        return [
            (family.name, suffix, labels, value)
            for family in self._serving.metrics.registry.families
            if family.kind != "gauge"
            for suffix, labels, value in family.samples()
            if value
        ]


def run(channel_fd: int, listener_fd: int) -> int:
    """Serve on an inherited listening socket for the engine at the other end of an inherited channel; return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until uvicorn installs its handler
    channel_socket = socket.socket(fileno=channel_fd)
    listener = socket.socket(fileno=listener_fd)
    try:
        welcome = messages.read_welcome(channel_socket)
    except EOFError:
        return 1
    configure_logging(welcome.log_level, as_json=welcome.log_json)
    tokenizer = None if welcome.tokenizer is None else Tokenizer.from_texts(*welcome.tokenizer)
    engine = RemoteEngine(welcome, tokenizer)
    metrics = Metrics(welcome.model_names[0], welcome.num_ranks, welcome.max_model_len)
    serving = Serving(
        engine,
        tuple(welcome.model_names),
        welcome.model_root,
        welcome.max_model_len,
        welcome.options,
        metrics=metrics,
        orders_by_priority=welcome.orders_by_priority,
        created=welcome.created,
    )
    engine.on_refused = metrics.on_rejected
    server = FrontEndServer(
        serving,
        engine,
        channel_socket,
        shutdown_timeout=0.0,
        log_level=welcome.log_level,
        before_routes=functools.partial(
            Forwarding, address=welcome.engine_address, timeout=welcome.options.request_timeout
        ),
    )
    return server.serve_on(listener)


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), int(sys.argv[2])))
