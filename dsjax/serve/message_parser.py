"""An assistant's text taken apart, as it comes, into reasoning, content and tool calls.

`ReasoningSplitter` finds the reasoning, `ToolCallParser` (in `tool_calls.py`) the calls, and `MessageParser` is both together.
"""

import enum
from collections.abc import Sequence
from typing import NamedTuple

from dsjax.engine.text.detokenizer import num_undecided
from dsjax.engine.text.tokenizer import Tokenizer
from dsjax.serve.tool_calls import MessagePiece, ToolCallParser

OPEN, CLOSE = "<think>", "</think>"


class Section(enum.Enum):
    """What the next character belongs to."""

    UNDECIDED = "undecided"  # the first characters show it: an opening tag, or the answer
    REASONING = "reasoning"
    CONTENT = "content"


class SplitText(NamedTuple):
    """New text of each kind."""

    reasoning: str
    content: str


class ReasoningSplitter:
    """Takes an answer's text piece by piece; line breaks next to the tags are dropped, everything else is kept.

    However the text is cut, the pieces put together are the same.

    Args:
        close_token_id: the closing tag as a token; None where it is none: the tokens that came together with it count as reasoning.

    Attributes:
        num_tokens: tokens of the reasoning so far, its closing tag included.
    """

    def __init__(self, start: Section, close_token_id: int | None = None):
        self._section, self._close = start, close_token_id
        self._held = ""
        self._at_start = start is not Section.CONTENT
        self._had_reasoning = start is Section.REASONING
        self._num_undecided = 0
        self.num_tokens = 0

    def push(self, text: str, finished: bool = False, token_ids: Sequence[int] = ()) -> SplitText:
        """Add text, and the tokens that it comes from; with `finished` nothing is held back any more."""
        before = self._section
        split = self._split(text, finished)
        if before is not Section.CONTENT:
            self._count(token_ids)
        return split

    def _count(self, token_ids: Sequence[int]) -> None:
        if self._section is Section.UNDECIDED:
            self._num_undecided += len(token_ids)
        elif self._had_reasoning:
            ends = self._section is Section.CONTENT and self._close in token_ids
            self.num_tokens += self._num_undecided + (token_ids.index(self._close) + 1 if ends else len(token_ids))
            self._num_undecided = 0

    def _split(self, text: str, finished: bool) -> SplitText:
        self._held += text
        if self._section is Section.UNDECIDED:
            self._decide(finished)
        reasoning = self._take_reasoning(finished) if self._section is Section.REASONING else ""
        content = self._take_content() if self._section is Section.CONTENT else ""
        return SplitText(reasoning, content)

    def _decide(self, finished: bool) -> None:
        text = self._held.lstrip()
        if text.startswith(OPEN):
            self._section, self._held = Section.REASONING, text[len(OPEN) :]
            self._had_reasoning = True
        elif finished or not OPEN.startswith(text):
            self._section, self._at_start = Section.CONTENT, False

    def _take_reasoning(self, finished: bool) -> str:
        self._drop_leading_breaks()
        before, tag, after = self._held.partition(CLOSE)
        if tag:
            self._section, self._held, self._at_start = Section.CONTENT, after, True
            return before.rstrip("\n")
        keep = 0 if finished else num_undecided(self._held, (CLOSE,))
        ready = self._held[: len(self._held) - keep]
        if not finished:
            ready = ready.rstrip("\n")  # they go if the tag comes next
        self._held = self._held[len(ready) :]
        return ready

    def _take_content(self) -> str:
        self._drop_leading_breaks()
        content, self._held = self._held, ""
        return content

    def _drop_leading_breaks(self) -> None:
        if self._at_start:
            self._held = self._held.lstrip("\n")
            self._at_start = not self._held


class ReasoningParser:
    """Which section an answer to a rendered prompt begins with, and the token after which the answer itself begins."""

    def __init__(self, close_token_id: int | None, always: bool):
        self.close_token_id = close_token_id
        self._always = always

    @classmethod
    def choose(cls, name: str, tokenizer: Tokenizer | None) -> "ReasoningParser | None":
        """Return the parser of this name; `auto`: one where the model has the closing tag as a token and a template that writes it."""
        if name == "none" or tokenizer is None:
            return None
        close = tokenizer.token_id(CLOSE)
        template = tokenizer.chat_template
        if name == "auto" and (close is None or template is None or CLOSE not in template.source):
            return None
        return cls(close, always=name == "deepseek_r1")

    def start_of(self, prompt: str, unfinished: str | None = None) -> Section:
        """Find the section that an answer begins with, read off the end of the prompt.

        `unfinished` is the assistant's text that the prompt ends with, if it is to be continued.
        """
        if unfinished is not None:
            thinking = OPEN in unfinished and CLOSE not in unfinished
            return Section.REASONING if thinking else Section.CONTENT
        end = prompt.rstrip()
        if end.endswith(OPEN):
            return Section.REASONING
        if end.endswith(CLOSE):
            return Section.CONTENT
        return Section.REASONING if self._always else Section.UNDECIDED


class MessageParser:
    """Splits off the reasoning, then takes tool calls out of the rest; where either is None, text passes it unchanged."""

    def __init__(
        self,
        reasoning: ReasoningSplitter | None,
        tools: ToolCallParser | None,
        include_reasoning: bool,
    ):
        self._reasoning, self._tools = reasoning, tools
        self._include_reasoning = include_reasoning

    @property
    def has_calls(self) -> bool:
        """Whether a tool call has begun."""
        return self._tools is not None and self._tools.num_calls > 0

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning so far, its closing tag included."""
        return 0 if self._reasoning is None else self._reasoning.num_tokens

    def push(self, text: str, finished: bool = False, token_ids: Sequence[int] = ()) -> MessagePiece:
        """Add text, and the tokens that it comes from; with `finished` nothing is held back any more."""
        piece = MessagePiece(content=text)
        if self._reasoning is not None:
            reasoning, piece.content = self._reasoning.push(text, finished, token_ids)
            piece.reasoning = reasoning if self._include_reasoning else ""
        if self._tools is not None:
            parsed = self._tools.push(piece.content, finished)
            piece.content, piece.tool_calls = parsed.content, parsed.tool_calls
        return piece
