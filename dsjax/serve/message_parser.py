"""Streaming parsers that split an assistant's text into reasoning, content and tool calls.

`ReasoningSplitter` finds the reasoning, `ToolCallParser` (in `tool_calls.py`) the calls, and `MessageParser` combines both.
"""

import enum
from collections.abc import Mapping, Sequence

from dsjax.engine.text.stop_strings import find_first, num_undecided
from dsjax.engine.text.tokenizer import Tokenizer
from dsjax.serve.tool_calls import OUTPUT_END, OUTPUTS_END, MessagePiece, ToolCallParser

OPEN, CLOSE = "<think>", "</think>"


class Section(enum.Enum):
    """Part of the message that the next character belongs to."""

    UNDECIDED = "undecided"  # depends on whether the text begins with an opening tag
    REASONING = "reasoning"
    CONTENT = "content"


class ReasoningSplitter:
    """Splits an answer's text into reasoning and content. The result does not depend on how the text is divided into pushes.

    Line breaks next to the tags are dropped, as is an opening tag at the start, which some models repeat after the prompt's.
    A tool call ends the reasoning unless a closing tag follows later; then the call is a draft within the reasoning.

    Args:
        close_token_id: token id of the closing tag; None if the tag is not one token; then tokens that arrive with it count as reasoning.
        openings: markers that begin a tool call, with their token ids or None.

    Attributes:
        num_tokens: number of reasoning tokens so far, including the closing tag.
    """

    def __init__(
        self, start: Section, close_token_id: int | None = None, openings: Mapping[str, int | None] | None = None
    ):
        self._section = start
        self._close = close_token_id
        self._openings = openings or {}
        self._buffer = ""
        self._may_open = self._at_start = start is not Section.CONTENT
        self._had_reasoning = start is Section.REASONING
        self._ended_by_call = False
        self._num_read = 0
        self._num_before_call: int | None = None
        self.num_tokens = 0

    def push(self, text: str, finished: bool = False, token_ids: Sequence[int] = ()) -> MessagePiece:
        """Add text and its tokens; return the piece that they add to the message. finished: the answer has ended; hold nothing back."""
        before = self._section
        split = self._split(text, finished)
        if before is not Section.CONTENT:
            self._count(token_ids)
        return split

    def _count(self, token_ids: Sequence[int]) -> None:
        if self._section is Section.CONTENT and self._close in token_ids:
            token_ids = token_ids[: token_ids.index(self._close) + 1]
        if self._num_before_call is None:
            calls = (index for index, token in enumerate(token_ids) if token in self._openings.values())
            self._num_before_call = next((self._num_read + index for index in calls), None)
        self._num_read += len(token_ids)
        if self._had_reasoning:
            ends_before = self._ended_by_call and self._num_before_call is not None
            self.num_tokens = self._num_before_call if ends_before else self._num_read

    def _split(self, text: str, finished: bool) -> MessagePiece:
        self._buffer += text
        piece = MessagePiece()
        if self._may_open:
            self._take_opening_tag(finished)
        if self._section is Section.REASONING and not self._may_open:
            piece.reasoning = self._take_reasoning(finished)
        if self._section is Section.CONTENT:
            self._drop_leading_breaks()
            piece.content = self._buffer
            self._buffer = ""
        return piece

    def _take_opening_tag(self, finished: bool) -> None:
        text = self._buffer.lstrip()
        if text.startswith(OPEN):
            self._section = Section.REASONING
            self._buffer = text[len(OPEN) :]
            self._may_open = False
            self._had_reasoning = True
        elif finished or not OPEN.startswith(text):
            self._may_open = False
            if self._section is Section.UNDECIDED:
                self._section = Section.CONTENT
                self._at_start = False

    def _take_reasoning(self, finished: bool) -> str:
        self._drop_leading_breaks()
        before, tag, after = self._buffer.partition(CLOSE)
        if tag:
            self._section = Section.CONTENT
            self._buffer = after
            self._at_start = True
            return before.rstrip("\n")
        begun = find_first(self._buffer, tuple(self._openings))
        keep = 0 if finished else num_undecided(self._buffer, (CLOSE, *self._openings))
        ready = self._buffer[: begun.at if begun else len(self._buffer) - keep]
        if begun or not finished:
            ready = ready.rstrip("\n")  # dropped if a tag or a call follows
        self._buffer = self._buffer[len(ready) :]
        if begun and finished:
            self._section = Section.CONTENT
            self._ended_by_call = True
            self._at_start = True
        return ready

    def _drop_leading_breaks(self) -> None:
        if self._at_start:
            self._buffer = self._buffer.lstrip("\n")
            self._at_start = not self._buffer


class ReasoningParser:
    """Finds the section in which an answer begins, and the token that ends reasoning."""

    def __init__(self, close_token_id: int | None, always: bool):
        self.close_token_id = close_token_id
        self._always = always

    @classmethod
    def choose(cls, name: str, tokenizer: Tokenizer | None) -> "ReasoningParser | None":
        """Return the parser with this name. `auto`: a parser if the closing tag is a token and the template writes it, else None."""
        if name == "none" or tokenizer is None:
            return None
        close = tokenizer.token_id(CLOSE)
        template = tokenizer.chat_template
        if name == "auto" and (close is None or template is None or not template.writes(CLOSE)):
            return None
        return cls(close, always=name == "deepseek_r1")

    def start_of(self, prompt: str, unfinished: str | None = None) -> Section:
        """Return the section in which an answer begins, judged by the end of the prompt.

        unfinished: text of the last assistant message, which the answer continues; None: the answer is a new message.
        """
        if unfinished is not None:
            is_thinking = OPEN in unfinished and CLOSE not in unfinished
            return Section.REASONING if is_thinking else Section.CONTENT
        end = prompt.rstrip()
        if end.endswith(OPEN):
            return Section.REASONING
        # After a tool's output V3.1 and R1 continue the same turn, without another opening tag.
        goes_on = end.endswith((CLOSE, OUTPUT_END, OUTPUTS_END))
        return Section.REASONING if self._always and not goes_on else Section.UNDECIDED


class MessageParser:
    """Splits off the reasoning, then the tool calls. A parser that is None is skipped."""

    def __init__(self, reasoning: ReasoningSplitter | None, tools: ToolCallParser | None, include_reasoning: bool):
        self._reasoning, self._tools = reasoning, tools
        self._include_reasoning = include_reasoning

    @property
    def has_calls(self) -> bool:
        """Whether a tool call has begun."""
        return self._tools is not None and self._tools.num_calls > 0

    @property
    def reasoning_tokens(self) -> int:
        """Number of reasoning tokens so far, including the closing tag."""
        return 0 if self._reasoning is None else self._reasoning.num_tokens

    def push(self, text: str, finished: bool = False, token_ids: Sequence[int] = ()) -> MessagePiece:
        """Add text and its tokens; return the piece that they add to the message. finished: the answer has ended; hold nothing back."""
        piece = self._reasoning.push(text, finished, token_ids) if self._reasoning else MessagePiece(content=text)
        if not self._include_reasoning:
            piece.reasoning = ""
        if self._tools is not None:
            parsed = self._tools.push(piece.content, finished)
            piece.content, piece.tool_calls = parsed.content, parsed.tool_calls
        return piece
