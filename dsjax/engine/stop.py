"""`StopStrings`: where a text ends because it came to a stop string, wherever its pieces are cut."""

from collections.abc import Sequence


class StopStrings:
    """Passes a stream of text on until one of the stop strings is complete.

    What could still become a stop string is held back. The result does not depend on how the text is cut into pieces:
    the first stop string to be complete counts, and of several complete at the same character the longest.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool = False):
        self._stops = tuple(stops)
        self._include_in_output = include_in_output
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is certain to be before any stop string; sets `matched` when one is complete."""
        if not self._stops:
            return text
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return text[: end if self._include_in_output else start]
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text held back. The stream has ended, or stop strings begin to count only after this point."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that is a beginning of some stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
