"""`MessageParser`: an assistant's text taken apart into reasoning, content and tool calls, as it comes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dsjax.serve.reasoning import ReasoningSplitter, ReasoningTokens
from dsjax.serve.tool_calls import ToolCallParser


@dataclass
class MessagePiece:
    """What a piece of text added; `tool_calls` are deltas as OpenAI's chunks have them."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    def delta(self) -> dict[str, Any]:
        """As a chunk's delta."""
        body: dict[str, Any] = {}
        if self.reasoning:
            body |= {"reasoning_content": self.reasoning, "reasoning": self.reasoning}
        if self.content:
            body["content"] = self.content
        if self.tool_calls:
            body["tool_calls"] = self.tool_calls
        return body

    def message(self) -> dict[str, Any]:
        """As a whole message: every delta of a call has been put together."""
        calls: list[dict[str, Any]] = []
        for delta in self.tool_calls:
            if delta["index"] == len(calls):
                calls.append({"id": delta["id"], "type": delta["type"], "function": dict(delta["function"])})
            else:
                calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
        body: dict[str, Any] = {"role": "assistant", "content": self.content or (None if calls else "")}
        if self.reasoning:
            body |= {"reasoning_content": self.reasoning, "reasoning": self.reasoning}
        if calls:
            body["tool_calls"] = calls
        return body


class MessageParser:
    """Reasoning first, then tool calls in what is left; either may be None, and the text then passes through."""

    def __init__(
        self,
        reasoning: ReasoningSplitter | None,
        tools: ToolCallParser | None,
        include_reasoning: bool,
        close_token_id: int | None = None,
    ):
        self._reasoning = reasoning
        self._tokens = None if reasoning is None else ReasoningTokens(reasoning, close_token_id)
        self._tools = tools
        self._include_reasoning = include_reasoning

    @property
    def has_calls(self) -> bool:
        """Whether a tool call has begun."""
        return self._tools is not None and self._tools.num_calls > 0

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning so far, its closing tag included."""
        return 0 if self._tokens is None else self._tokens.count

    def push(self, text: str, finished: bool = False, token_ids: Sequence[int] = ()) -> MessagePiece:
        """Add text, and the tokens that it comes from; with `finished` nothing is held back any more."""
        piece = MessagePiece(content=text)
        if self._reasoning is not None:
            reasoning, piece.content = self._reasoning.push(text, finished)
            self._tokens.push(token_ids)
            piece.reasoning = reasoning if self._include_reasoning else ""
        if self._tools is not None:
            found = self._tools.push(piece.content, finished)
            piece.content, piece.tool_calls = found.content, found.deltas
        return piece
