"""Who is reached, and who is gone on without where two processes do not reach each other."""

import contextlib
import socket
import threading
from itertools import combinations

import pytest
from deployments import KEY, OTHER

from dsjax.hosts.links import Answerer, left_out, unreached
from dsjax.hosts.wire import JoinRequest


def request(process_id: int, port: int) -> JoinRequest:
    return JoinRequest(process_id, 4, "host", 10, "127.0.0.1", "machine", port)


def test_who_answers_is_reached_and_neither_who_is_gone_nor_who_hangs():
    with contextlib.closing(Answerer("127.0.0.1", KEY)) as well, socket.create_server(("127.0.0.1", 0)) as hangs:
        gone = Answerer("127.0.0.1", KEY)
        gone.close()
        members = [request(1, well.port), request(2, gone.port), request(3, hangs.getsockname()[1]), request(0, 0)]
        assert unreached(members, KEY, seconds=2) == [2, 3]  # and nobody looks at one that does not listen
        assert unreached(members[:1], KEY) == []


def test_who_answers_without_the_key_is_not_reached():
    """Another deployment, or anybody, may listen at the port of a process that has gone."""
    with (
        contextlib.closing(Answerer("127.0.0.1", OTHER)) as foreign,
        socket.create_server(("127.0.0.1", 0)) as stranger,
    ):

        def answer() -> None:
            with stranger.accept()[0] as connection:
                connection.sendall(b"y" * 1000)

        threading.Thread(target=answer, daemon=True).start()
        members = [request(1, foreign.port), request(2, stranger.getsockname()[1])]
        assert unreached(members, KEY, seconds=2) == [1, 2]


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        ({0: [], 1: [], 2: []}, []),
        ({0: [], 1: [2], 2: [1]}, [2]),
        ({1: [], 2: [1]}, [2]),  # in one direction alone
        ({0: [], 1: [2, 3], 2: [1], 3: [1]}, [1]),  # one of three does, where two would
        ({0: [1], 1: [0], 2: []}, [1]),  # never process 0
        ({1: [2], 3: [4]}, [2, 4]),
    ],
)
def test_as_few_as_it_takes_are_left_out_and_all_others_reach_each_other(cut, expected):
    assert left_out(cut) == expected
    left = set(range(5)) - set(expected)
    pairs = {frozenset((one, other)) for one, others in cut.items() for other in others}
    assert not any(frozenset(pair) in pairs for pair in combinations(left, 2))
