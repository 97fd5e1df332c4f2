"""Looking for markers in a text that comes in pieces."""

from collections.abc import Sequence


def find_first(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Where the first of the markers begins, and which it is: of several at one place the longest."""
    found = [(at, -len(marker), marker) for marker in markers if (at := text.find(marker)) >= 0]
    if not found:
        return None
    at, _, marker = min(found)
    return at, marker


def num_undecided(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` with which one of the markers begins: it must wait for what comes."""
    longest = max(map(len, markers), default=0)
    for length in range(min(len(text), longest - 1), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0
