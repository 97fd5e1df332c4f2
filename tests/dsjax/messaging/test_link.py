"""`LinkListener` and `Link`: bulk messages, tickets, and what becomes of those who wait."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from deployments import KEY
from waits import until

from dsjax.addresses import split_address
from dsjax.messaging import Link, LinkListener, NotAMemberError, PeerLostError
from dsjax.messaging.link import LinkLostError

SECONDS = 60.0


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def ends(request, endpoints):
    return [endpoints(replace(KEY, encrypt_bulk=request.param)) for _ in range(2)]


@pytest.fixture
def listener(ends):
    return LinkListener(ends[0], ["one", "two"])


@pytest.fixture
def link(ends, listener):
    return Link(ends[1], listener.address, listener.ticket, "one")


NUMBERED = [bytes([number]) for number in range(8)]


def test_buffers_arrive_as_they_were_sent_both_ways(listener, link):
    rng = np.random.default_rng(0)
    sent = [rng.integers(0, 255, size, np.uint8) for size in (0, 7, 3_000_001)]
    link.send(b"there", *sent)
    message = listener.receive(SECONDS)
    got = [np.empty_like(one) for one in sent]
    message.read_into(*got)
    assert (message.sender, message.header) == ("one", b"there")
    assert all((a == b).all() for a, b in zip(sent, got, strict=True))
    listener.send("one", b"back", got[2])
    answer, back = link.receive(SECONDS), np.empty_like(got[2])
    answer.read_into(back)
    assert answer.header == b"back"
    assert (back == sent[2]).all()


@pytest.mark.parametrize("shape", [(5,), (7,)])
def test_other_data_than_was_expected_is_an_error(listener, link, shape):
    link.send(b"", np.zeros(6, np.uint8))
    with pytest.raises(PeerLostError, match="data than was expected"):
        listener.receive(SECONDS).read_into(np.empty(shape, np.uint8))


def test_who_has_no_ticket_or_another_name_or_a_name_that_is_taken_is_not_heard(ends, listener, link):
    link.send(b"first")
    assert listener.receive(SECONDS).header == b"first"
    others = [("one", listener.ticket), ("three", listener.ticket)]
    if ends[0].credentials.encrypt_bulk:
        others.append(("two", b"another"))
    else:
        with pytest.raises(NotAMemberError, match="ticket"):
            Link(ends[1], listener.address, b"another", "two")
    for name, ticket in others:
        stranger = Link(ends[1], listener.address, ticket, name)
        stranger.send(b"strange")
        assert listener.receive(0.2) is None
        stranger.close()
    link.send(b"second")
    assert listener.receive(SECONDS).header == b"second"


def test_a_link_that_ends_is_told_of_once_by_its_name(ends, listener, link):
    two = Link(ends[1], listener.address, listener.ticket, "two")
    for one in (link, two):
        one.send(b"here")
        listener.receive(SECONDS)
    link.close()
    with pytest.raises(LinkLostError) as caught:
        listener.receive(SECONDS)
    assert caught.value.name == "one"
    two.send(b"goes on")
    assert listener.receive(SECONDS).header == b"goes on"
    with pytest.raises(PeerLostError):
        listener.send("one", b"")


def test_who_waits_hears_that_the_other_side_or_its_own_has_closed_the_link(listener, link):
    with ThreadPoolExecutor(1) as pool:
        for close in (listener.close, link.close):
            waiting = pool.submit(link.receive)
            time.sleep(0.1)
            close()
            with pytest.raises(PeerLostError):
                waiting.result(SECONDS)


def test_who_waits_is_woken_without_a_message_once(listener, link):
    waking = threading.Timer(0.1, listener.wake)
    waking.start()
    assert listener.receive() is None
    link.send(b"later")
    assert listener.receive().header == b"later"


def test_what_was_sent_before_a_link_ends_is_received_though_nobody_listened_then(listener, link):
    sent = np.arange(3_000_001, dtype=np.uint8)
    for header in NUMBERED:
        link.send(header, sent)
    link.close(linger=SECONDS)
    time.sleep(0.5)
    assert [listener.receive(SECONDS).header for _ in NUMBERED] == NUMBERED
    with pytest.raises(LinkLostError):
        listener.receive(SECONDS)


def test_what_a_listener_has_sent_before_it_ends_is_received(listener, link):
    link.send(b"here")
    listener.receive(SECONDS)
    for header in NUMBERED:
        listener.send("one", header)
    listener.close(linger=SECONDS)
    time.sleep(0.5)
    assert [link.receive(SECONDS).header for _ in NUMBERED] == NUMBERED
    with pytest.raises(PeerLostError):
        link.receive(SECONDS)


def test_an_endpoint_ends_though_a_link_is_open(ends, listener, link):
    ending = threading.Thread(target=ends[1].close, daemon=True)
    ending.start()
    ending.join(SECONDS)
    assert not ending.is_alive()
    with pytest.raises(PeerLostError):
        link.receive(SECONDS)


def test_a_link_that_only_sends_keeps_nothing_of_what_its_listener_looks_for(listener, link):
    link.send(b"there")
    assert listener.receive(SECONDS).header == b"there"
    for _ in range(5):
        socket.create_connection(split_address(listener.address), SECONDS).close()
        listener.receive(0.5)
    until(lambda: not link._socket.poll(0), SECONDS, every=0.1, what="an empty message for each look waits in memory")


def test_the_messaging_thread_leaves_a_link_alone_while_it_opens(ends, listener, monkeypatch):
    tended = threading.Event()

    def tend_meanwhile(link):
        thread = threading.Thread(target=lambda: (link.tend(), tended.set()))
        time.sleep(0.2)  # the handshake is over, and nobody has looked
        thread.start()
        thread.join()
        return is_connected(link)

    is_connected = Link._is_connected
    monkeypatch.setattr(Link, "_is_connected", tend_meanwhile)
    link = Link(ends[1], listener.address, listener.ticket, "two")
    link.send(b"there")
    assert listener.receive(SECONDS).header == b"there"
    assert tended.is_set()


def test_a_listener_that_was_only_tended_still_hears_that_who_sent_to_it_is_gone(ends, listener, link):
    link.send(b"last words")
    link.close(linger=SECONDS)
    for _ in range(40):
        time.sleep(0.02)
        listener._sweep_at = 0.0
        listener.tend()
    assert listener.receive(SECONDS).header == b"last words"
    with pytest.raises(LinkLostError):
        listener.receive(SECONDS)
