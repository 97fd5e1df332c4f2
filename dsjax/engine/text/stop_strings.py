"""`StopStrings`: ends a text at a stop string. `find_first` and `num_undecided`: search for markers in streamed text.

The server's reasoning and tool-call parsers use the two functions too.
"""

from collections.abc import Sequence
from typing import NamedTuple


class StopStrings:
    """Forwards streamed text until a stop string is complete. `stops` must not be empty.

    Text that may become a stop string is held back. The result does not depend on how the text is split: the first complete stop string
    wins, and the longest of several that complete at the same character.

    matched: the stop string found; None if none yet.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool = False):
        self._stops = tuple(stops)
        self._include_in_output = include_in_output
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Return the text that is certain to precede any stop string. Sets `matched` when one is complete."""
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
        """Return the text held back, at the end of the stream or while stop strings do not count yet."""
        text = self._held
        self._held = ""
        return text


class FoundMarker(NamedTuple):
    """A marker in a text, and the position at which it begins."""

    at: int
    text: str


def find_first(text: str, markers: Sequence[str]) -> FoundMarker | None:
    """Return the first marker, the longest of several at one position; None if there is none."""
    markers_found = [FoundMarker(index, marker) for marker in markers if (index := text.find(marker)) >= 0]
    return min(markers_found, key=lambda marker: (marker.at, -len(marker.text)), default=None)


def num_undecided(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text` that may begin a marker, depending on the text that follows."""
    longest = max(map(len, markers), default=0)
    for length in range(min(len(text), longest - 1), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0
