"""Answers of `/v1/responses`: output items, or the events that build them."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dsjax.engine.request_streams import OutputStream
from dsjax.engine.schedule.request import RequestOptions
from dsjax.serve.answers import errors_name
from dsjax.serve.chat import ConvertedAnswer
from dsjax.serve.connections import EventStream, to_json
from dsjax.serve.errors import ApiError
from dsjax.serve.guards import new_id
from dsjax.serve.responses_request import ResponsesRequest
from dsjax.serve.schemas import ChatChoice
from dsjax.serve.serving import Serving

Event = dict[str, Any]

_CONTENT = {"reasoning": "reasoning_text", "message": "output_text"}
_PREFIX = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


class OutputItems:
    """The output items of one answer, built from a chat message's deltas; each delta yields events.

    Only messages have log-probabilities; those of reasoning and tool calls are dropped. While a parser holds back the text of some
    tokens, their log-probabilities are kept until it is known which item they belong to.
    """

    def __init__(self):
        self.items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._call_index = -1
        self._num_scored = 0  # tokens so far that have log-probabilities
        self._undecided: list[dict[str, Any]] = []  # log-probabilities whose item is not known yet

    def push(self, delta: Mapping[str, Any], logprobs: Sequence[dict[str, Any]], reasoning_tokens: int) -> list[Event]:
        """Add a chat message's delta and return its events. reasoning_tokens: reasoning tokens of the message so far."""
        events = []
        self._num_scored += len(logprobs)
        self._undecided += logprobs
        num_after_reasoning = max(0, self._num_scored - reasoning_tokens)
        del self._undecided[: max(0, len(self._undecided) - num_after_reasoning)]  # drop those of reasoning
        if text := delta.get("reasoning_content"):
            events += self._add_text("reasoning", text, [])
        if text := delta.get("content"):
            events += self._add_text("message", text, self._take_logprobs())
        for call in delta.get("tool_calls") or ():
            events += self._add_call(call)
            self._undecided = []
        return events

    def finish(self, status: str) -> list[Event]:
        """Close the open item. An answer without items gets an empty message."""
        events = []
        is_message = self._open is not None and self._open["type"] == "message"
        if not self.items or (is_message and self._undecided):
            events = self._add_text("message", "", self._take_logprobs())
        return events + self._close(status)

    def _take_logprobs(self) -> list[dict[str, Any]]:
        logprobs = self._undecided
        self._undecided = []
        return logprobs

    def _add_text(self, kind: str, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        events = []
        if self._open is None or self._open["type"] != kind:
            events += self._close("completed")
            events += self._begin({"type": kind, **({"role": "assistant"} if kind == "message" else {"summary": []})})
            part = {"type": _CONTENT[kind], "text": ""}
            self._open["content"] = [part | ({"annotations": [], "logprobs": []} if kind == "message" else {})]
            events.append(self._part_event("response.content_part.added", part=_copy(self._open["content"][0])))
        part = self._open["content"][0]
        part["text"] += text
        if kind == "message":
            part["logprobs"] += logprobs
        if text or logprobs:
            fields = {"logprobs": logprobs} if kind == "message" else {}
            events.append(self._part_event(f"response.{_CONTENT[kind]}.delta", delta=text, **fields))
        return events

    def _add_call(self, call: Mapping[str, Any]) -> list[Event]:
        events = []
        function = call["function"]
        if call["index"] != self._call_index:
            self._call_index = call["index"]
            events += self._close("completed")
            item = {"type": "function_call", "call_id": call["id"], "name": function["name"], "arguments": ""}
            events += self._begin(item)
        if text := function.get("arguments"):
            self._open["arguments"] += text
            events.append(self._item_event("response.function_call_arguments.delta", delta=text))
        return events

    def _begin(self, item: dict[str, Any]) -> list[Event]:
        self._open = {"id": f"{_PREFIX[item['type']]}_{new_id()}", "status": "in_progress", **item}
        empty_item = _copy(self._open) | ({} if item["type"] == "function_call" else {"content": []})
        self.items.append(self._open)
        return [{"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": empty_item}]

    def _close(self, status: str) -> list[Event]:
        if self._open is None:
            return []
        item = self._open
        item["status"] = status
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            events = [self._item_event("response.function_call_arguments.done", **done)]
        else:
            part = item["content"][0]
            logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            events = [
                self._part_event(f"response.{part['type']}.done", text=part["text"], **logprobs),
                self._part_event("response.content_part.done", part=_copy(part)),
            ]
        self._open = None
        return [
            *events,
            {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": _copy(item)},
        ]

    def _item_event(self, kind: str, **more: Any) -> Event:
        return {"type": kind, "item_id": self._open["id"], "output_index": len(self.items) - 1, **more}

    def _part_event(self, kind: str, **more: Any) -> Event:
        return self._item_event(kind, content_index=0, **more)


class ResponsesAnswer(ConvertedAnswer):
    """A chat answer converted to the Responses API's format."""

    def __init__(self, serving: Serving, body: ResponsesRequest, request_id: str):
        super().__init__(serving, body, f"resp-{request_id}", request_id)
        self._created = int(time.time())
        self._items = OutputItems()
        self._sequence = 0
        self._finish_reason: str | None = None

    def without_effect(self) -> list[str]:
        """Return the names of the request's fields that have no effect."""
        fields = self._body.without_effect()
        return fields + [name for name in self._chat.without_effect() if name not in ("store", "metadata", *fields)]

    async def start(self, options: RequestOptions) -> OutputStream:
        """Validate the request and queue the prompt, as `ChatAnswer.start` does.

        Raises:
            ApiError, UserError: the request was refused; nothing was queued.
        """
        with errors_name("text.format", instead_of="response_format"):
            return await super().start(options)

    def _built(self) -> dict[str, Any]:
        return self._response(self._status, self._chat.usage())

    def first_chunks(self) -> list[Event]:
        """Return the events `response.created` and `response.in_progress`."""
        self._chat.first_chunks()
        response = self._response("in_progress", None)
        return self._numbered(
            {"type": kind, "response": response} for kind in ("response.created", "response.in_progress")
        )

    def _convert(self, choice: ChatChoice) -> list[Event]:
        reasoning_tokens = self._chat.usage()["completion_tokens_details"]["reasoning_tokens"]
        logprobs = (choice["logprobs"] or {}).get("content") or []
        events = self._items.push(choice["delta"], logprobs, reasoning_tokens)
        self._finish_reason = choice["finish_reason"] or self._finish_reason
        return self._numbered(events)

    def last_chunks(self) -> list[Event]:
        """Return the events that close the items, and the final event with the whole answer."""
        events = self._items.finish(self._status)
        return self._numbered([*events, {"type": f"response.{self._status}", "response": self._built()}])

    def failure(self, error: ApiError) -> Event:
        """Return the event for an error after the stream has begun."""
        event = {"type": "error", "code": error.code or error.type, "message": error.message, "param": error.param}
        return self._numbered([event])[0]

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _numbered(self, events: Iterable[Event]) -> list[Event]:
        numbered = []
        for event in events:
            numbered.append({**event, "sequence_number": self._sequence})
            self._sequence += 1
        return numbered

    def _response(self, status: str, usage: Mapping[str, Any] | None) -> dict[str, Any]:
        body = self._body
        form = body.text.format if body.text and body.text.format else None
        tool_choice = body.tool_choice if isinstance(body.tool_choice, str | None) else body.tool_choice.model_dump()
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "frequency_penalty": body.frequency_penalty or 0.0,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": [] if status == "in_progress" else [_copy(item) for item in self._items.items],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "presence_penalty": body.presence_penalty or 0.0,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}},
            "tool_choice": tool_choice or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": usage and _usage(usage),
            "user": body.user,
        }


class NamedEvents(EventStream):
    """Named server-sent events without a final `[DONE]`, for the Responses API and Anthropic's."""

    _END = b""

    def _event(self, chunk: Mapping[str, Any]) -> bytes:
        return b"event: " + chunk["type"].encode() + b"\ndata: " + to_json(chunk) + b"\n\n"

    def _failure(self, error: ApiError) -> Mapping[str, Any]:
        return self._answer.failure(error)


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        "total_tokens": usage["total_tokens"],
    }


def _copy(item: Mapping[str, Any]) -> dict[str, Any]:
    """Copy an item deeply enough that later changes to the item do not change an event."""
    return {name: [dict(part) for part in value] if isinstance(value, list) else value for name, value in item.items()}
