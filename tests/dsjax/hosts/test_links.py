"""Which processes are reached, which are left out where two do not reach each other, and how links are watched, over real connections.

Also what a host's counters say of its network cards.
"""

import socket
import sys
from itertools import combinations
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from deployments import OTHER, request

from dsjax.hosts import links
from dsjax.hosts.interfaces import Interface, read_interfaces
from dsjax.hosts.links import Links, LinkState, left_out
from dsjax.serve.metrics_families import Registry, exposition
from dsjax.serve.metrics_links import add_link_metrics


def links_of(endpoint) -> Links:
    return Links(SimpleNamespace(me=request(9, endpoint.port)), endpoint, lambda epoch: None)


def test_who_answers_is_reached_and_neither_who_is_gone_hangs_nor_has_another_key(endpoints):
    own, well, gone, foreign = endpoints(), endpoints(), endpoints(), endpoints(OTHER)
    gone.close()
    with socket.create_server(("127.0.0.1", 0)) as hangs:
        ports = [well.port, gone.port, hangs.getsockname()[1], foreign.port]
        members = [request(number, port) for number, port in enumerate(ports)]
        here = links_of(own)
        assert here.unreached(members, seconds=5) == [1, 2, 3]
        assert here.unreached(members[:1]) == []


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


@pytest.fixture
def watching(monkeypatch, endpoints):
    monkeypatch.setattr(links, "_PROBE_SECONDS", 20.0)  # a machine that runs the suite may be slow
    return links_of(endpoints())


def test_a_link_s_round_trip_and_segments_are_seen(watching, endpoints):
    one, other = endpoints(), endpoints()
    members = [request(1, one.port), request(2, other.port)]
    watching.probe(members)
    assert set(watching.states) == {1, 2}
    first = watching.states[1]
    segments = first.segments
    assert (first.probes, first.unanswered) == (1, 0)
    assert 0 < first.answer < 20
    peers = dict(watching._watched)
    watching.probe(members)
    assert watching.states[1].probes == 2
    assert [watching._watched[one][0] is peers[one][0] for one in members] == [True, True], "the connection is kept"
    assert watching.unreached(members) == [], "who is watched is reached as before"
    if sys.platform == "linux":
        assert 0 < first.round_trip < 20
        assert 5 <= segments < watching.states[1].segments
        assert 0 <= first.retransmitted < segments, "a busy machine acknowledges some late"


def test_a_process_that_has_gone_is_counted_and_one_that_comes_in_its_place_is_watched(watching, endpoints):
    other = endpoints()
    watching.probe([request(1, other.port)])
    segments = watching.states[1].segments
    other.close()
    for _ in range(2):
        watching.probe([request(1, other.port)])
    state = watching.states[1]
    assert (state.probes, state.unanswered) == (3, 2)
    assert state.segments >= segments, "a connection that is gone takes none of the counts away"
    watching.probe([request(1, endpoints().port, pid=11)])
    assert (watching.states[1].probes, watching.states[1].unanswered) == (4, 2)
    watching.probe([])
    assert (watching.states, watching._watched) == ({}, {}), "who is not in the mesh any more is not shown"


def test_a_link_that_two_threads_drop_at_once_is_dropped():
    """One of a group that ends, and one that finds the other process gone."""

    class Watched(dict):
        def __contains__(self, member):  # the other thread drops it as soon as this one has seen it
            return self.pop(member, None) is not None

    dropping, peer = links_of(Mock(port=1)), Mock()
    dropping._watched = Watched(one=(peer, 0, 0))
    for _ in range(2):
        dropping._drop("one")
    peer.close.assert_called_once_with()


def test_a_stranger_at_a_process_s_port_is_no_answer(watching, endpoints):
    watching.probe([request(1, endpoints(OTHER).port)])
    assert watching.states[1] == LinkState(probes=1, unanswered=1)


def card(root, path, **files):
    for name, text in files.items():
        file = root / path / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")


def test_cards_of_known_speed_are_read_those_with_rdma_too(tmp_path):
    card(tmp_path, "net/eth0", speed=25_000, statistics__tx_bytes=7, statistics__rx_bytes=9)
    card(tmp_path, "net/lo", statistics__tx_bytes=1, statistics__rx_bytes=1)
    card(tmp_path, "net/virbr0", speed=-1, statistics__tx_bytes=1, statistics__rx_bytes=1)
    counters = {"counters__port_xmit_data": 10, "counters__port_rcv_data": 20}
    card(tmp_path, "infiniband/mlx5_0/ports/1", rate="200 Gb/sec (4X HDR)", **counters)
    assert list(read_interfaces(tmp_path)) == [Interface("eth0", 7, 9, 3.125e9), Interface("mlx5_0/1", 40, 80, 25e9)]
    assert list(read_interfaces(tmp_path / "nowhere")) == []


def test_metrics_have_what_is_known_and_leave_out_what_is_not():
    registry = Registry(process="1")
    links = {0: LinkState(50e-6, 90e-6, 9, 1, 200, 3), 2: LinkState(probes=4, unanswered=4)}
    add_link_metrics(registry, lambda: links, lambda: [Interface("eth0", 5, 6, 7.0)])
    lines = exposition(registry.families, openmetrics=False).decode().splitlines()
    shown = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    assert shown['dsjax_link_round_trip_seconds{process="1",peer="0"}'] == 50e-6
    assert 'dsjax_link_round_trip_seconds{process="1",peer="2"}' not in shown
    assert shown['dsjax_link_probes_unanswered_total{process="1",peer="2"}'] == 4
    assert shown['dsjax_link_segments_retransmitted_total{process="1",peer="0"}'] == 3
    assert shown['dsjax_network_bytes_total{process="1",interface="eth0",direction="received"}'] == 6
    assert shown['dsjax_network_speed_bytes_per_second{process="1",interface="eth0"}'] == 7
