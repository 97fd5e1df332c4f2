"""`EventParser`: server-sent events out of bytes that come in pieces of any size.

Source: the HTML standard, section 9.2.6, "Interpreting an event stream". Only `data` is kept: OpenAI's streams use
nothing else.
"""

_LARGEST_EVENT = 16 * 1024 * 1024


class EventStreamError(ValueError):
    """Bytes that are no event stream."""


class EventParser:
    """Takes bytes as they come from the network; gives the data of each event that has become whole.

    A piece may end anywhere: within a line, between CR and LF, within a character. Lines end with LF, CRLF or CR. An event
    that the stream ends in the middle of is never given, as the standard has it.
    """

    def __init__(self):
        self._rest = b""
        self._data: list[bytes] = []
        self._at_start = True

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that end in this piece, in order.

        Raises:
            EventStreamError: an event is longer than 16 MiB, so this is hardly a stream of events.
        """
        if (event := self._only_event(piece)) is not None:
            self._at_start = False
            return [event]
        text = self._rest + piece
        if self._at_start:
            if len(text) < 3 and b"\xef\xbb\xbf".startswith(text):
                self._rest = text
                return []
            self._at_start = False
            text = text.removeprefix(b"\xef\xbb\xbf")
        # A CR at the end may be the first half of a CRLF: its line waits for the next piece.
        held = text.endswith(b"\r")
        if b"\r" in text:
            text = (text[:-1] if held else text).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = text.split(b"\n")
        self._rest = lines.pop() + (b"\r" if held else b"")
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif line == b"data":
                self._data.append(b"")
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        if len(self._rest) > _LARGEST_EVENT or sum(map(len, self._data)) > _LARGEST_EVENT:
            raise EventStreamError("an event is longer than 16 MiB; the answer is not a stream of events")
        return events

    def _only_event(self, piece: bytes) -> bytes | None:
        """The data of a piece that is one whole event of one line, as servers write a token's; None for any other piece."""
        if self._rest or self._data or not piece.startswith(b"data: ") or not piece.endswith(b"\n\n"):
            return None
        event = piece[6:-2]
        return None if b"\n" in event or b"\r" in event else event
