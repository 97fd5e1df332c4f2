"""Server-sent events come out the same, wherever the network cut them."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dsjax.bench.serve.records import EventParser, EventStreamError

STREAM = (
    '\ufeffdata: {"text": "héllo 🙂"}\n\n'
    ": a comment\r\n\r\nevent: x\r\nid: 1\r\ndata: two\r\ndata:  lines\r\n\r\n"
    "data:no space\r\rdata\n\nretry: 5\n\ndata: [DONE]\n\ndata: never ended\n"
).encode()
EVENTS = ['{"text": "héllo 🙂"}'.encode(), b"two\n lines", b"no space", b"", b"[DONE]"]


def parse(pieces) -> list[bytes]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)]


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
@example(range(len(STREAM)))
def test_any_cuts(cuts):
    assert all(parse([STREAM[:at], STREAM[at:]]) == EVENTS for at in cuts)
    edges = [0, *sorted(cuts), len(STREAM)]
    assert parse(STREAM[a:b] for a, b in itertools.pairwise(edges)) == EVENTS


def test_an_event_is_given_as_soon_as_its_blank_line_is_there_and_an_endless_one_is_an_error():
    parser = EventParser()
    assert parser.feed(b"data: a\n") == []
    assert parser.feed(b"\ndata: b") == [b"a"]
    assert parser.feed(b"\n\n") == [b"b"]
    parser = EventParser()
    with pytest.raises(EventStreamError, match="16 MiB"):
        list(map(parser.feed, [b"x" * 2**20] * 40))
