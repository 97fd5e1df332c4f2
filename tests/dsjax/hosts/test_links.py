"""Who is reached, and who is gone on without where two processes do not reach each other."""

import socket
from itertools import combinations

import pytest
from deployments import OTHER, request

from dsjax.hosts.links import left_out, unreached


def test_who_answers_is_reached_and_neither_who_is_gone_hangs_nor_has_another_key(endpoints):
    own, well, gone, foreign = endpoints(), endpoints(), endpoints(), endpoints(OTHER)
    gone.close()
    with socket.create_server(("127.0.0.1", 0)) as hangs:
        ports = [well.port, gone.port, hangs.getsockname()[1], foreign.port]
        members = [request(number, port) for number, port in enumerate(ports)]
        assert unreached(own, members, seconds=2) == [1, 2, 3]
        assert unreached(own, members[:1]) == []


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
