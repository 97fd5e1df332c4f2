"""`BenchRequest`: a request to a server; `RequestRecord`: its answer and times; `AnswerReader`: fills the record from the stream."""

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import pydantic_core

TokenSource = Literal["usage", "tokenizer", "chunks"]


@dataclass(frozen=True)
class BenchRequest:
    """One request to send."""

    prompt: str | list[int]  # text, or token ids (completions only)
    prompt_tokens: int  # intended length; the server's usage overrides it in the record
    output_tokens: int  # maximum tokens of the answer
    arrival: float | None = None  # seconds after the first request's, if the dataset has arrival times


@dataclass
class RequestRecord:
    """Timeline and result of one request. Times are seconds since the run's start."""

    arrival: float  # when it was due
    start: float  # when sending began; later than `arrival` if `--max-concurrency` held it back
    prompt_tokens: int  # as counted by `token_source`
    # when each chunk that carried tokens was read from the socket
    chunk_times: list[float] = field(default_factory=list)
    end: float = 0.0  # when the last chunk with a choice was read: the end of the answer, before the usage and `[DONE]`
    output_tokens: int = 0  # as counted by `token_source`
    token_source: TokenSource = "chunks"
    cached_tokens: int | None = None  # prompt tokens that hit the server's prefix cache; None if not reported
    finish_reason: str | None = None
    text: str = ""  # the answer, reasoning included
    # None if the answer is complete, else one line. A record with an error counts only in `failed`
    error: str | None = None
    meant_prompt_tokens: int = field(init=False)  # intended by the dataset

    def __post_init__(self):
        self.meant_prompt_tokens = self.prompt_tokens

    @property
    def succeeded(self) -> bool:
        """Whether the answer is complete."""
        return self.error is None

    @property
    def ttft(self) -> float:
        """Seconds from the start of sending to the first chunk that carried tokens."""
        return self.chunk_times[0] - self.start

    @property
    def latency(self) -> float:
        """Seconds from the start of sending to the end of the answer."""
        return self.end - self.start

    @property
    def tpot(self) -> float | None:
        """Mean seconds of an output token after the first; None for fewer than two tokens."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itls(self) -> list[float]:
        """Seconds between chunks that carried tokens, one value per gap, regardless of the later chunk's number of tokens."""
        return [later - earlier for earlier, later in itertools.pairwise(self.chunk_times)]


_LARGEST_EVENT = 16 * 1024 * 1024
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_END_OF_EVENT = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")

_LONGEST_ERROR = 300

_MOST_TOKENS = 2**31 - 1


class EventStreamError(ValueError):
    """The bytes are not an event stream."""


class EventParser:
    """Incremental parser of server-sent events: takes bytes from the network and returns the data of each complete event.

    A piece may end anywhere: within a line, between CR and LF, within a character. Lines end with LF, CRLF or CR. As in
    the standard, an event that is incomplete when the stream ends is dropped.
    """

    def __init__(self):
        self._rest = b""
        self._at_start = True

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of the events that end in this piece, in order.

        Raises:
            EventStreamError: an event is longer than 16 MiB, so this is probably not an event stream.
        """
        text = self._rest + piece
        if self._at_start and len(text) >= len(_BYTE_ORDER_MARK):
            self._at_start = False
            text = text.removeprefix(_BYTE_ORDER_MARK)
        *events, self._rest = _END_OF_EVENT.split(text) if b"\r" in text else text.split(b"\n\n")
        if len(self._rest) > _LARGEST_EVENT:
            raise EventStreamError("an event is longer than 16 MiB; the answer is not a stream of events")
        return [b"\n".join(data) for event in events if (data := _data_of(event))]


def _data_of(event: bytes) -> list[bytes]:
    return [line[5:].removeprefix(b" ") for line in event.splitlines() if line[:5] in (b"data:", b"data")]


class AnswerError(Exception):
    """The server's answer is an error, or not a valid answer; the message is one line."""


class AnswerReader:
    """Reads one answer of `/v1/completions` or `/v1/chat/completions` into a record.

    A chunk carries tokens if its choice has text (for chat: content, reasoning, or tool calls) or token ids; or if it has
    no text but no finish reason either: the server holds back or omits the token's text. A chunk with only the chat role
    or only a finish reason carries no tokens.
    """

    def __init__(self, record: RequestRecord, count_tokens: Callable[[str], int] | None = None):
        self._record = record
        self._count_tokens = count_tokens
        self._parser = EventParser()
        self._pieces: list[str] = []
        self._has_usage = False
        self.done = False

    def feed(self, piece: bytes, now: float) -> None:
        """Take bytes read from the socket at time `now`. Raises `AnswerError`: an error event, or bytes that are not an answer's stream."""
        try:
            events = self._parser.feed(piece)
        except EventStreamError as error:
            raise AnswerError(str(error)) from error
        for event in events:
            if event == b"[DONE]":
                self.done = True
            elif event:  # an empty event is a keep-alive
                try:
                    self._take(_object(event), now)
                except (AttributeError, TypeError) as error:
                    raise AnswerError(f"a chunk is not of OpenAI's shape: {event[:80]!r}") from error

    def close(self) -> None:
        """Complete the record at the end of the stream. Raises `AnswerError`: the answer broke off, or never began."""
        record = self._record
        if not self.done and record.finish_reason is None:
            raise AnswerError("the stream ended without [DONE] and without a finish reason")
        if not record.end:
            raise AnswerError("the answer has no choice")
        if not record.chunk_times:  # the first token ended the answer, and has no text
            record.chunk_times.append(record.end)
        record.text = "".join(self._pieces)
        if self._has_usage:
            record.token_source = "usage"
        elif self._count_tokens is not None:
            record.output_tokens = max(1, self._count_tokens(record.text))
            record.token_source = "tokenizer"
        else:
            record.output_tokens = len(record.chunk_times)
            record.token_source = "chunks"

    def _take(self, chunk: dict[str, Any], now: float) -> None:
        if chunk.get("error"):
            raise AnswerError(f"error event: {error_message(chunk)}")
        record = self._record
        for choice in chunk.get("choices") or ():
            record.end = now
            text, carries = _text_of(choice)
            if carries or (text == "" and choice.get("finish_reason") is None):
                record.chunk_times.append(now)
            if text:
                self._pieces.append(text)
            record.finish_reason = choice.get("finish_reason") or record.finish_reason
        usage = chunk.get("usage")
        if usage and (made := _count(usage, "completion_tokens")) is not None:
            record.output_tokens = made
            record.prompt_tokens = _count(usage, "prompt_tokens") or record.prompt_tokens
            record.cached_tokens = _count(usage.get("prompt_tokens_details") or {}, "cached_tokens")
            self._has_usage = True


def _count(usage: dict[str, Any], name: str) -> int | None:
    """Return a number of tokens; None if missing. Raises `AnswerError` if it is not a valid number of tokens."""
    value = usage.get(name)
    if value is not None and not (type(value) is int and 0 <= value <= _MOST_TOKENS):
        raise AnswerError(f"the usage has {name} {str(value)[:80]!r}, expected a number of tokens")
    return value


def _text_of(choice: dict[str, Any]) -> tuple[str | None, bool]:
    """Return a choice's text, and whether it certainly carries tokens. Text is None in a chunk with only the role."""
    carries = bool(choice.get("token_ids"))
    if "delta" not in choice:
        text = "" + (choice.get("text") or "")  # TypeError if it is not text
        return text, carries or bool(text)
    delta = choice["delta"] or {}
    # Servers that send both reasoning fields send the same text in both.
    text = (delta.get("reasoning_content") or delta.get("reasoning") or "") + (delta.get("content") or "")
    carries = carries or bool(text) or bool(delta.get("tool_calls"))
    return (None if "role" in delta and not carries else text), carries


def _object(event: bytes) -> dict[str, Any]:
    try:
        body = pydantic_core.from_json(event)
    except ValueError as error:
        raise AnswerError(f"an event is not JSON: {event[:80]!r}") from error
    if not isinstance(body, dict):
        raise AnswerError(f"an event is not a JSON object: {event[:80]!r}")
    return body


def error_message(body: Any) -> str:
    """Return the message of an error body in one line: OpenAI's format, FastAPI's, or the whole body."""
    if isinstance(body, dict):
        error = body.get("error", body.get("detail", body.get("message", body)))
        body = error.get("message", error) if isinstance(error, dict) else error
    line = " ".join(str(body).split())
    return line if len(line) <= _LONGEST_ERROR else line[:_LONGEST_ERROR] + "…"
