"""Answers of Anthropic's `/v1/messages`: content blocks, or the events that build them."""

from collections.abc import Mapping
from typing import Any

from dsjax.engine.text.prompt_encoder import arguments_object
from dsjax.serve.anthropic_request import MessagesRequest
from dsjax.serve.chat import ConvertedAnswer
from dsjax.serve.errors import ApiError, anthropic_body
from dsjax.serve.schemas import ChatChoice
from dsjax.serve.serving import Serving

Event = dict[str, Any]

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_EMPTY_BLOCKS = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": "", "citations": None},
}
_NAMES = {"reasoning_effort": "output_config.effort"}


class ContentBlocks:
    """The content blocks of one message, built from a chat message's deltas; each delta yields events."""

    def __init__(self):
        self.blocks: list[dict[str, Any]] = []
        self._is_open = False
        self._arguments = ""
        self._call = -1

    def push(self, delta: Mapping[str, Any]) -> list[Event]:
        """Add a delta and return its events."""
        events = []
        for kind, text in (("thinking", delta.get("reasoning_content")), ("text", delta.get("content"))):
            if text:
                if not self._is_open or self.blocks[-1]["type"] != kind:
                    events += self._begin(dict(_EMPTY_BLOCKS[kind]))
                self.blocks[-1][kind] += text
                events.append(self._delta({"type": f"{kind}_delta", kind: text}))
        for call in delta.get("tool_calls") or ():
            if call["index"] != self._call:
                self._call = call["index"]
                block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
                events += self._begin({**block, "caller": {"type": "direct"}})
            if arguments := call["function"].get("arguments"):
                self._arguments += arguments
                events.append(self._delta({"type": "input_json_delta", "partial_json": arguments}))
        return events

    def finish(self) -> list[Event]:
        """Close the open block."""
        if not self._is_open:
            return []
        self._is_open = False
        if self.blocks[-1]["type"] == "tool_use":
            self.blocks[-1]["input"] = arguments_object(self._arguments)  # truncated arguments are not a JSON object
            self._arguments = ""
        return [{"type": "content_block_stop", "index": len(self.blocks) - 1}]

    def _begin(self, block: dict[str, Any]) -> list[Event]:
        events = self.finish()
        self.blocks.append(block)
        self._is_open = True
        return [*events, {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


class MessagesAnswer(ConvertedAnswer):
    """A chat answer in the format of this API."""

    def __init__(self, serving: Serving, body: MessagesRequest, request_id: str):
        super().__init__(serving, body, f"msg_{request_id}", request_id)
        self._content = ContentBlocks()
        self._end: dict[str, Any] = {"stop_reason": None, "stop_sequence": None, "stop_details": None}

    def without_effect(self) -> list[str]:
        """Return the names of the request's fields that have no effect."""
        return self._body.without_effect() + [_NAMES.get(name, name) for name in self._chat.without_effect()]

    def first_chunks(self) -> list[Event]:
        """Return the event of a message without content."""
        self._chat.first_chunks()
        return [{"type": "message_start", "message": self._built()}]

    def _convert(self, choice: ChatChoice) -> list[Event]:
        if choice["finish_reason"] is not None:
            self._end["stop_reason"] = _STOP_REASONS[choice["finish_reason"]]
            if isinstance(choice.get("stop_reason"), str):
                self._end |= {"stop_reason": "stop_sequence", "stop_sequence": choice["stop_reason"]}
        return self._content.push(choice["delta"])

    def last_chunks(self) -> list[Event]:
        """Return the events that close the content and the message."""
        ended = {"type": "message_delta", "delta": self._end, "usage": self._usage()}
        return [*self._content.finish(), ended, {"type": "message_stop"}]

    def failure(self, error: ApiError) -> Event:
        """Return the event for an error after the stream has begun."""
        return anthropic_body(error)

    def _built(self) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self._model, "container": None}
        return {**head, "content": self._content.blocks, **self._end, "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        """Return the usage in this API's format, in which `input_tokens` excludes cached tokens."""
        usage = self._chat.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation": None,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "inference_geo": None,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
            "server_tool_use": None,
            "service_tier": "standard",
        }
