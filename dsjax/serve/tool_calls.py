"""`ToolCallParser`: DeepSeek's tool calls out of text that comes in pieces."""

import uuid
from dataclasses import dataclass, field
from typing import Any

from dsjax.engine.text import find_first, num_undecided
from dsjax.serve.tool_format import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR, ToolFormat


@dataclass
class ToolPiece:
    """What came: text of the answer, and deltas of calls as OpenAI's chunks have them."""

    content: str = ""
    deltas: list[dict[str, Any]] = field(default_factory=list)


class ToolCallParser:
    """Takes an answer's text piece by piece. However it is cut, the pieces put together are the same.

    A call whose arguments are not JSON is passed on as it is, as OpenAI does: whoever called knows what to do. What is cut off
    inside a call's name is dropped.

    Args:
        most: calls beyond so many are passed over.
    """

    def __init__(self, form: ToolFormat, most: int):
        self._most = most
        self._fence = form.after_name.strip() if form.after_name != SEPARATOR else ""
        self._ends = tuple(
            dict.fromkeys((form.after_arguments + CALL_END, form.after_arguments.strip() + CALL_END, CALL_END))
        )
        self._step = self._text
        self._held = ""
        self._has_arguments = False
        self.num_calls = 0

    def push(self, text: str, finished: bool = False) -> ToolPiece:
        """Add text; with `finished` nothing is held back any more."""
        self._held += text
        piece = ToolPiece()
        while self._step(piece, finished):
            pass
        return piece

    # Each state takes what it can from `_held` and says whether the next state may go on.

    def _text(self, piece: ToolPiece, finished: bool) -> bool:
        found = find_first(self._held, (CALLS_BEGIN, CALL_BEGIN))
        if found:
            at, marker = found
            piece.content += self._held[:at]
            self._held = self._held[at + (len(marker) if marker == CALLS_BEGIN else 0) :]
            self._step = self._between
            return True
        keep = 0 if finished else num_undecided(self._held, (CALLS_BEGIN, CALL_BEGIN))
        piece.content += self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return False

    def _between(self, piece: ToolPiece, finished: bool) -> bool:
        found = find_first(self._held, (CALL_BEGIN, CALLS_END))
        if not found:
            return False
        at, marker = found
        self._held = self._held[at + len(marker) :]
        self._step = self._name if marker == CALL_BEGIN else self._text
        return True

    def _name(self, piece: ToolPiece, finished: bool) -> bool:
        end = find_first(self._held, (CALL_END,))
        found = find_first(self._held, (self._fence or SEPARATOR,))
        if found is None or (end is not None and end[0] < found[0]):
            if end is not None:  # a call without arguments' beginning: nothing to make of it
                self._held, self._step = self._held[end[0] + len(CALL_END) :], self._between
            return end is not None
        at, marker = found
        name = self._held[:at].rpartition(SEPARATOR)[2].strip()
        self._held = self._held[at + len(marker) :]
        self.num_calls += 1
        self._has_arguments = False
        self._step = self._arguments
        head = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": {"name": name, "arguments": ""}}
        self._emit(piece, head)
        return True

    def _arguments(self, piece: ToolPiece, finished: bool) -> bool:
        if not self._has_arguments:
            self._held = self._held.lstrip()
        found = find_first(self._held, self._ends)
        if found:
            at, marker = found
            text, self._held = self._held[:at], self._held[at + len(marker) :]
            if not (text or self._has_arguments):
                text = "{}"
            self._step = self._between
        else:
            keep = 0 if finished else num_undecided(self._held, self._ends)
            text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        if text:
            self._has_arguments = True
            self._emit(piece, {"function": {"arguments": text}})
        return found is not None

    def _emit(self, piece: ToolPiece, delta: dict[str, Any]) -> None:
        if self.num_calls <= self._most:
            piece.deltas.append({"index": self.num_calls - 1, **delta})
