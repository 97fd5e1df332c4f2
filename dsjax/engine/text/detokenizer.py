"""`IncrementalDetokenizer`, which turns a stream of tokens into text, and `StopStrings`, which ends that text.

`find_first` and `num_undecided` look for markers in an incomplete text; the server's parsers use them too.
"""

import codecs
from collections.abc import Collection, Sequence
from typing import NamedTuple

from dsjax.engine.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns a stream of tokens into text pieces whose concatenation is `tokenizer.decode` of all of them.

    A byte-level token is a run of bytes, which may end inside a character; such bytes are held back until the character is
    whole, or certain never to be (then it is U+FFFD).

    kept: special tokens whose text stays where those of others are skipped.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, kept: Collection[int] = ()):
        self._tokenizer, self._whole_texts = tokenizer, tokenizer.whole_texts
        self._skip_special_tokens, self._kept = skip_special_tokens, kept
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._within_character = False

    def push(self, token_id: int) -> str:
        """The text that is certain after this token."""
        if not self._within_character:
            text = self._whole_texts[token_id]
            if text is not None:
                return text
        if self._skip_special_tokens and token_id not in self._kept and self._tokenizer.is_special(token_id):
            return ""
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        self._within_character = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """The text of bytes still held back: U+FFFD, or nothing. The stream has ended."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Passes a stream of text on until one of the stop strings is complete.

    What could still become a stop string is held back. The result does not depend on how the text is cut into pieces:
    the first stop string to be complete counts, and of several complete at the same character the longest.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool = False):
        self._stops, self._include_in_output = tuple(stops), include_in_output
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is certain to be before any stop string; sets `matched` when one is complete."""
        if not self._stops:
            return text
        text = self._held + text
        complete = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if complete:
            end, start, self.matched = min(complete)
            self._held = ""
            return text[: end if self._include_in_output else start]
        keep = num_undecided(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text held back. The stream has ended, or stop strings begin to count only after this point."""
        held, self._held = self._held, ""
        return held


class FoundMarker(NamedTuple):
    """A marker in a text, and the index at which it begins."""

    at: int
    text: str


def find_first(text: str, markers: Sequence[str]) -> FoundMarker | None:
    """Return the first of the markers in a text; of several at one place the longest."""
    found = [FoundMarker(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found, key=lambda marker: (marker.at, -len(marker.text)), default=None)


def num_undecided(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that a marker begins with; the text after it decides what it is."""
    longest = max(map(len, markers), default=0)
    for length in range(min(len(text), longest - 1), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0
