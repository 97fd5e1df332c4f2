"""`BroadcastLog` and `LogReader`: every reader has every entry, in order, from when it was let in."""

import itertools
import queue
import time
from unittest.mock import Mock

import psutil
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from dsjax.addresses import split_address
from dsjax.messaging import PeerLostError, RefusedError
from dsjax.messaging.broadcast import BroadcastLog, LogReader
from dsjax.messaging.curve import connect_with_curve

SECONDS = 60.0


@pytest.fixture
def ends(endpoints):
    return [endpoints() for _ in range(3)]


def reader(end, log, leader, name):
    heard = queue.SimpleQueue()
    LogReader(end, end.connect(leader.address, "member"), log.address, name, lambda *entry: heard.put(entry), heard.put)
    return heard


def test_readers_that_come_at_different_times_miss_nothing_from_then_on(ends):
    log = BroadcastLog(ends[0])
    first = reader(ends[1], log, ends[0], b"a")
    for number in range(100):
        log.append(0, b"%d" % number)
    second = reader(ends[2], log, ends[0], b"b")
    for number in range(100, 200):
        log.append(1, b"%d" % number * (1 if number % 50 else 1_000_000))
    heard = [first.get(timeout=SECONDS) for _ in range(200)]
    later = [second.get(timeout=SECONDS) for _ in range(100)]
    assert [epoch for epoch, _ in heard] == [0] * 100 + [1] * 100
    assert heard[100:] == later
    assert [int(body[:3]) for _, body in later] == list(range(100, 200))


def test_a_reader_that_is_busy_hears_all_before_it_hears_that_the_log_has_ended(ends):
    log = BroadcastLog(ends[0])
    heard = reader(ends[1], log, ends[0], b"a")
    ends[1].post(lambda: time.sleep(0.3))
    for number in range(200):
        log.append(0, b"%d" % number)
    log.close(SECONDS)
    assert [heard.get(timeout=SECONDS) for _ in range(200)] == [(0, b"%d" % number) for number in range(200)]
    assert isinstance(heard.get(timeout=SECONDS), PeerLostError)


def test_a_log_that_cannot_be_heard_is_known_at_once(ends):
    log, began = BroadcastLog(ends[0]), time.monotonic()
    log.close()
    ends[1].silence = 100.0
    with pytest.raises(PeerLostError, match="cannot be heard"):
        reader(ends[1], log, ends[0], b"a")
    assert time.monotonic() - began < 60, "and not after the silence of a process that hangs"


def test_a_writer_that_does_not_answer_is_lost(ends, endpoints):
    leader = endpoints(holds=["log"])
    peer = ends[1].connect(leader.address, "member")
    ends[1].silence = 0.2  # from here on: a connection with such heartbeats would end where the machine is busy
    with pytest.raises(PeerLostError, match="cannot be heard"):
        LogReader(ends[1], peer, BroadcastLog(ends[0]).address, b"a", Mock(), Mock())


def test_a_reader_with_a_name_of_megabytes_takes_the_log_from_nobody(ends):
    log = BroadcastLog(ends[0])
    heard = reader(ends[1], log, ends[0], b"a")
    with pytest.raises(RefusedError, match="3,000,000 bytes"):
        reader(ends[2], log, ends[0], b"b" * 3_000_000)
    log.append(0, b"goes on")
    assert heard.get(timeout=SECONDS) == (0, b"goes on")


def test_a_missing_entry_is_an_error_and_not_passed_over(ends):
    log = BroadcastLog(ends[0])
    heard = reader(ends[1], log, ends[0], b"a")
    log._next_number += 1
    log.append(0, b"after a gap")
    assert "is missing" in str(heard.get(timeout=SECONDS))
    time.sleep(0.05)
    assert heard.empty()


def test_readers_that_come_and_go_while_nothing_is_appended_leave_no_memory_behind(ends):
    log, client = BroadcastLog(ends[0]), ends[1]
    host, port = split_address(log.address)

    def come_and_go(count):
        for _ in range(count):
            socket = client.socket(zmq.SUB, host)
            connect_with_curve(socket, client.credentials.key, "member")
            monitor = client.watch(socket)
            socket.connect(f"tcp://{host}:{port}")
            while recv_monitor_message(monitor)["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED:
                pass
            client.unwatch(socket, monitor)
        time.sleep(1.5)  # the messaging thread looks each second
        return psutil.Process().memory_info().rss

    taken = [come_and_go(300) for _ in range(4)]  # of which each took 3.5 MiB once
    assert min(now - before for before, now in itertools.pairwise(taken)) < 1 << 20
