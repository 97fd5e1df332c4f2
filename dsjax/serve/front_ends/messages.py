"""Messages between a front end and the engine's process: MessagePack with a length prefix, on a socket pair."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from dsjax.engine.contract.executor import RowResult
from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.schedule.request import FinishReason, Request, RequestOptions
from dsjax.engine.schedule.scheduler_config import SchedulerConfig
from dsjax.engine.text.input_processor import PreparedRequest
from dsjax.errors import UserError
from dsjax.serve.options import ServeOptions

_LENGTH_BYTES = 4
MAX_UNSENT_BYTES = 64 << 20
"""Most unread bytes of messages to a front end. A front end with more is considered hung and killed."""


class _Message(msgspec.Struct, array_like=True, tag=True):
    pass


class NewRequest(msgspec.Struct, array_like=True):
    """One prompt and its completions, as the engine's core needs them."""

    # handle, id and seed of each. The front end assigns the handle, which identifies a completion in later messages
    completions: list[tuple[int, str, int]]
    token_ids: list[int]
    max_tokens: int
    params: SamplingParams  # sampling parameters without stop strings, which the front end matches
    stop_ids: list[int]
    arrival_time: float
    priority: int
    cache_salt: bytes | None  # bytes, because JSON strings may hold lone surrogates
    session: bytes | None  # likewise
    dp_rank: int | None
    page_hashes: list[bytes]

    @classmethod
    def from_prepared(cls, prepared: PreparedRequest, first_handle: int) -> NewRequest:
        """Create the message for a validated request; its completions get consecutive handles."""
        first = prepared.completions[0]
        return cls(
            [
                (first_handle + index, request.request_id, request.seed)
                for index, request in enumerate(prepared.completions)
            ],
            prepared.prompt_token_ids,
            first.max_tokens,
            dataclasses.replace(prepared.params, stop=()),
            sorted(first.stop_ids),
            first.arrival_time,
            first.options.priority,
            _to_bytes(first.options.cache_salt),
            _to_bytes(first.options.session),
            first.options.dp_rank,
            first.page_hashes,
        )

    def to_requests(self, rules: list) -> list[Request]:
        """Create the core's requests. rules: the logit rules of each completion."""
        stop_ids = frozenset(self.stop_ids)
        options = RequestOptions(self.priority, _to_text(self.cache_salt), _to_text(self.session), self.dp_rank)
        return [
            Request(
                request_id,
                list(self.token_ids),
                len(self.token_ids),
                self.params,
                self.max_tokens,
                seed,
                stop_ids,
                self.arrival_time,
                options=options,
                rules=rules[index],
                page_hashes=list(self.page_hashes),
            )
            for index, (_, request_id, seed) in enumerate(self.completions)
        ]


class RequestProgress(msgspec.Struct, array_like=True):
    """Fields of a `Request` that metrics and the log read. Times are those of the monotonic clock."""

    rank: int | None
    num_cached_tokens: int | None
    num_preemptions: int
    first_scheduled_time: float | None
    first_token_time: float | None
    finish_time: float | None

    @classmethod
    def from_request(cls, request: Request) -> RequestProgress:
        """Copy the fields of a request."""
        return cls(*(getattr(request, name) for name in cls.__struct_fields__))

    def copy_to(self, request: Request) -> None:
        """Copy the fields to the front end's request."""
        for name in self.__struct_fields__:
            setattr(request, name, getattr(self, name))


UpdateEntry = tuple[int, RowResult | None, FinishReason | None, RequestProgress | None]
"""An `Update` with the completion's handle. The progress is sent up to the first token and at the end."""


# From a front end.


class Hello(_Message):
    """The front end is listening."""


class Add(_Message):
    """Requests to admit together or not at all. The engine's process limits the queue and compiles grammars."""

    number: int
    requests: list[NewRequest]


class Abort(_Message):
    """The clients of these completions have left."""

    handles: list[int]


class Snapshot(_Message):
    """Counters and histograms: (family, suffix of its name, label values, value) of each sample that is not 0."""

    number: int
    samples: list[tuple[str, str, tuple[str, ...], float]]


class Count(_Message):
    """Number of requests that an `AbortById` aborted."""

    number: int
    count: int


# From the engine's process.


class Welcome(_Message):
    """Everything a front end needs to start. tokenizer: the text of `tokenizer.json`, and its configuration."""

    options: ServeOptions
    scheduler: SchedulerConfig
    tokenizer: tuple[str, dict[str, Any]] | None
    vocab_size: int
    eos_token_ids: list[int]
    seed: int
    stream_interval: int
    model_names: list[str]
    model_root: str
    max_model_len: int
    num_ranks: int
    orders_by_priority: bool
    created: int
    log_level: str
    log_json: bool
    engine_address: str


class PhaseIs(_Message):
    """The server has entered a phase."""

    phase: str


class Resized(_Message):
    """The mesh and its request limits have changed."""

    scheduler: SchedulerConfig
    max_model_len: int
    num_ranks: int


class StepUpdates(_Message):
    """The updates of a step to this front end's requests."""

    updates: list[UpdateEntry]


class AddResponse(_Message):
    """Answer to an `Add`. refusal: why the requests were refused; None: they were admitted.

    param: the sampling parameter at fault. failed: the engine's process had an error. With neither, the queue is full.
    """

    number: int
    refusal: str | None = None
    param: str | None = None
    failed: bool = False


class Gather(_Message):
    """Send a `Snapshot`."""

    number: int


class AbortById(_Message):
    """Abort the requests with this request id, or all if None; their clients get an error."""

    number: int
    request_id: str | None


class EndStreams(_Message):
    """The shutdown timeout is over: end running requests with an error."""


class EndProcess(_Message):
    """Close the listener and end the process."""


class Failed(_Message):
    """The engine has failed."""


FromFrontEnd = Hello | Add | Abort | Snapshot | Count
FromEngine = (
    Welcome | PhaseIs | Resized | StepUpdates | AddResponse | Gather | AbortById | EndStreams | EndProcess | Failed
)


class Channel:
    """One end of the socket pair. Messages arrive whole and in order. An answer repeats the number of its question."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message_type: Any):
        self._reader, self._writer = reader, writer
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(message_type)
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future] = {}

    @property
    def unsent(self) -> int:
        """Bytes that are not sent yet."""
        return self._writer.transport.get_write_buffer_size()

    def send(self, message: _Message) -> None:
        """Send a message; drop it if the other end is closed.

        Raises:
            UserError: the message holds a string that is not valid Unicode.
        """
        if self._writer.is_closing():
            return
        try:
            body = self._encoder.encode(message)
        except UnicodeEncodeError as error:
            raise UserError("the request has a string with a lone surrogate; send valid Unicode") from error
        self._writer.write(len(body).to_bytes(_LENGTH_BYTES, "little") + body)

    def ask(self, question: Callable[[int], _Message]) -> asyncio.Future:
        """Send the message `question(number)`; return a future for the answer, which `resolve` completes."""
        number = next(self._numbers)
        self.send(question(number))
        self._pending[number] = asyncio.get_running_loop().create_future()
        return self._pending[number]

    def resolve(self, number: int, answer: Any) -> None:
        """Complete the future of the question with this number."""
        future = self._pending.pop(number, None)
        if future is not None and not future.done():
            future.set_result(answer)

    def fail(self, error: Exception) -> None:
        """Fail all pending questions with this error."""
        for future in self._pending.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # mark the exception as retrieved: the future may have no waiter

    async def messages(self) -> AsyncIterator[Any]:
        """Yield the other end's messages until it closes."""
        try:
            while True:
                length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "little")
                yield self._decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def close(self) -> None:
        """Close this end. Sent messages still arrive."""
        self._writer.close()


def read_welcome(channel_socket: socket.socket) -> Welcome:
    """Read the engine's first message, before the event loop starts.

    Raises:
        EOFError: the engine's process has ended.
    """
    length = int.from_bytes(_read_exactly(channel_socket, _LENGTH_BYTES), "little")
    return msgspec.msgpack.decode(_read_exactly(channel_socket, length), type=Welcome)


def _read_exactly(channel_socket: socket.socket, count: int) -> bytes:
    data = channel_socket.recv(count, socket.MSG_WAITALL)
    if len(data) < count:
        raise EOFError
    return data


def _to_bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode("utf-8", "surrogatepass")


def _to_text(data: bytes | None) -> str | None:
    return None if data is None else data.decode("utf-8", "surrogatepass")
