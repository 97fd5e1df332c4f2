"""Reasoning apart from the answer: `<think>…</think>` as DeepSeek-R1 and V3.1 write it, in text that comes in pieces."""

import enum
from collections.abc import Sequence
from typing import NamedTuple

from dsjax.engine.tokenizer import Tokenizer
from dsjax.serve.markers import num_undecided

OPEN, CLOSE = "<think>", "</think>"


class Section(enum.Enum):
    """What the next character belongs to."""

    UNDECIDED = "undecided"  # the first characters show it: an opening tag, or the answer
    REASONING = "reasoning"
    CONTENT = "content"


class Piece(NamedTuple):
    """New text of each kind."""

    reasoning: str
    content: str


class ReasoningSplitter:
    """Takes an answer's text piece by piece; line breaks next to the tags are dropped, everything else is kept.

    However the text is cut, the pieces put together are the same.
    """

    def __init__(self, start: Section):
        self._section = start
        self._held = ""
        self._at_start = start is not Section.CONTENT
        self.had_reasoning = start is Section.REASONING

    @property
    def section(self) -> Section:
        """What the text has come to."""
        return self._section

    def push(self, text: str, finished: bool = False) -> Piece:
        """Add text; with `finished` nothing is held back any more."""
        self._held += text
        if self._section is Section.UNDECIDED:
            self._decide(finished)
        reasoning = self._take_reasoning(finished) if self._section is Section.REASONING else ""
        content = self._take_content() if self._section is Section.CONTENT else ""
        return Piece(reasoning, content)

    def _decide(self, finished: bool) -> None:
        text = self._held.lstrip()
        if text.startswith(OPEN):
            self._section, self._held = Section.REASONING, text[len(OPEN) :]
            self.had_reasoning = True
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


class ReasoningTokens:
    """Counts the tokens of the reasoning, its closing tag included, while a splitter reads their text.

    Where the closing tag is no token of the model, the tokens that came together with it count as reasoning.
    """

    def __init__(self, splitter: ReasoningSplitter, close_token_id: int | None):
        self._splitter, self._close = splitter, close_token_id
        self._before = splitter.section
        self._undecided = 0
        self.count = 0

    def push(self, token_ids: Sequence[int]) -> None:
        """Enter the tokens whose text the splitter has just read."""
        before, self._before = self._before, self._splitter.section
        if before is Section.CONTENT:
            return
        if self._before is Section.UNDECIDED:
            self._undecided += len(token_ids)
        elif self._before is Section.REASONING:
            self.count += self._undecided + len(token_ids)
            self._undecided = 0
        elif self._splitter.had_reasoning:
            ended = token_ids.index(self._close) + 1 if self._close in token_ids else len(token_ids)
            self.count += self._undecided + ended


class ReasoningParser:
    """Which section an answer to a rendered prompt begins with, and the token after which the answer itself begins."""

    def __init__(self, close_token_id: int | None, always: bool):
        self.close_token_id = close_token_id
        self._always = always

    @classmethod
    def choose(cls, name: str, tokenizer: Tokenizer | None) -> "ReasoningParser | None":
        """The parser of this name; `auto`: one where the model has the closing tag as a token and a template that writes it."""
        if name == "none" or tokenizer is None:
            return None
        close = tokenizer.token_id(CLOSE)
        template = tokenizer.chat_template
        if name == "auto" and (close is None or template is None or CLOSE not in template.source):
            return None
        return cls(close, always=name == "deepseek_r1")

    def start_of(self, prompt: str, unfinished: str | None = None) -> Section:
        """By the end of the prompt; `unfinished` is the assistant's text that the prompt ends with, if it is to be continued."""
        if unfinished is not None:
            thinking = OPEN in unfinished and CLOSE not in unfinished
            return Section.REASONING if thinking else Section.CONTENT
        end = prompt.rstrip()
        if end.endswith(OPEN):
            return Section.REASONING
        if end.endswith(CLOSE):
            return Section.CONTENT
        return Section.REASONING if self._always else Section.UNDECIDED
