"""What strangers and confused members say to a port (`tools/fuzz_ports.py`), each kind drawn by a generator; and what is at a port."""

import contextlib
import random
import socket
import struct
from collections.abc import Callable, Sequence

from listening_sockets import listening_addresses

from dsjax.messaging.endpoint import PING
from dsjax.messaging.wire import Kind, encode

SERVICES = (
    *("join", "prepared", "ready", "leave", "gather", "log", "look", "pulled", PING),
    *("experts.open", "experts.compile", "experts.stage", "experts.place", "prefill", "pull", "done"),
)
"""What members ask for; a name that a process does not serve is a case too."""
GREETING = 64
"""Bytes of a greeting."""
_CONNECT_SECONDS, _SAY_SECONDS = 20.0, 2.0
_NONSENSE = (None, True, -1, 0, 2**63, 0.5, "x", b"x", "x" * 5000, [], {}, [0], [1, 2, 3], ["x", b"x", {"x": [None]}])


def greeting(mechanism: str) -> bytes:
    """How a connection begins in ZMTP 3.1."""
    return b"\xff" + bytes(7) + b"\1\x7f\3\1" + mechanism.encode().ljust(20, b"\0") + bytes(32)


def frame(body: bytes, is_command: bool = False) -> bytes:
    """A frame of ZMTP, as it goes over the wire."""
    flags = 4 * is_command
    return (bytes([flags, len(body)]) if len(body) < 256 else bytes([flags | 2]) + struct.pack(">Q", len(body))) + body


def _hello(rng: random.Random, mechanism: str) -> bytes:
    """A HELLO of somebody who does not know the key or the ticket."""
    said = [rng.randbytes(rng.randrange(40)) for _ in range(2)]
    plain = b"".join(bytes([len(one)]) + one for one in said)
    return frame(b"\5HELLO" + (plain if mechanism == "PLAIN" else b"\1\0" + bytes(72) + rng.randbytes(120)), True)


def _changed(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + rng.randbytes(1) + data[at + 1 :]


def _random_bytes(rng: random.Random, mechanism: str) -> bytes:
    return rng.randbytes(int(2 ** rng.uniform(0, 13)))


_EARLY = (
    *(frame(b"\5READY\x0bSocket-Type\0\0\0" + bytes([len(kind)]) + kind, True) for kind in (b"DEALER", b"SUB")),
    frame(b"\4PING\0\1", True),
    *(frame(b"\1"), frame(encode(Kind.REQUEST, PING, 1, None)[0])),
)
STRANGERS: dict[str, Callable[[random.Random, str], bytes]] = {
    "random bytes": _random_bytes,
    "cut greeting": lambda rng, mechanism: (greeting(mechanism) + _hello(rng, mechanism))[: rng.randrange(264)],
    "other version": lambda rng, mechanism: _changed(rng, greeting(mechanism)[:12]) + greeting(mechanism)[12:],
    "other mechanism": lambda rng, mechanism: (
        greeting(rng.choice(["NULL", "PLAIN", "CURVE", "GSSAPI", "curve", "", "X" * 20])) + _hello(rng, mechanism)
    ),
    "wrong hello": lambda rng, mechanism: greeting(mechanism) + _hello(rng, mechanism),
    "misshapen hello": lambda rng, mechanism: (
        greeting(mechanism)
        + frame(
            rng.choice([b"\5HELLO", b"\x08INITIATE", b"\5ERROR", b"\xff", b""]) + rng.randbytes(rng.randrange(300)),
            True,
        )
    ),
    "frame without end": lambda rng, mechanism: (
        greeting(mechanism)
        + rng.choice([b"\2", b"\3", b"\6"])
        + struct.pack(">Q", int(2 ** rng.uniform(8, 63)))
        + rng.randbytes(rng.randrange(1 << 16))
    ),
    "early messages": lambda rng, mechanism: greeting(mechanism) + b"".join(rng.choices(_EARLY, k=4)),
}
"""What somebody says to a ZeroMQ port who does not belong to the deployment, by the port's mechanism."""

_REQUEST = (
    b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 37\r\n\r\n{"model": "tiny", "prompt": [1, 2, 3]}'
)
REQUESTS: dict[str, Callable[[random.Random, str], bytes]] = {
    "random bytes": _random_bytes,
    "cut request": lambda rng, _: _REQUEST[: rng.randrange(len(_REQUEST))],
    "changed request": lambda rng, _: _changed(rng, _changed(rng, _REQUEST)),
    "header without end": lambda rng, _: _REQUEST[:40] + b"X: " + rng.randbytes(rng.randrange(1 << 16)).hex().encode(),
    "body without end": lambda rng, _: _REQUEST.replace(b"37", b"%d" % int(2 ** rng.uniform(6, 80))),
    "misshapen chunks": lambda rng, _: (
        _REQUEST.replace(b"Content-Length: 37", b"Transfer-Encoding: chunked") + rng.randbytes(rng.randrange(99))
    ),
    "other path": lambda rng, _: b"GET /" + rng.randbytes(rng.randrange(60)).hex().encode() + b" HTTP/1.1\r\n\r\n",
}
"""What somebody says to an HTTP port."""


def _request(rng: random.Random, services: Sequence[str]) -> list[bytes]:
    return encode(rng.choice([Kind.REQUEST, Kind.ONE_WAY]), rng.choice(services), 2**40, rng.choice(_NONSENSE))


MEMBERS: dict[str, Callable[[random.Random, Sequence[str]], list[bytes]]] = {
    "random frames": lambda rng, _: [rng.randbytes(rng.randrange(4096)) for _ in range(rng.randrange(1, 5))],
    "cut message": lambda rng, services: [(head := _request(rng, services)[0])[: rng.randrange(len(head))]],
    "changed message": lambda rng, services: [_changed(rng, _request(rng, services)[0])],
    "wrong number of frames": lambda rng, services: rng.choice(
        [[*_request(rng, services), b"more"], encode(Kind.REQUEST, PING, 1, bytes(2**20 + 1))[:1], [b""] * 3]
    ),
    "deep nesting": lambda rng, _: [b"\x81" * rng.randrange(1, 5000)],
    "nonsense request": _request,
    "nonsense answer": lambda rng, _: encode(
        rng.choice([Kind.REPLY, Kind.REFUSAL, Kind.FAILURE, Kind.GOODBYE]),
        "",
        rng.choice([0, 2**40, -1]),
        rng.choice(_NONSENSE),
    ),
    "frame that is too long": lambda rng, _: [bytes((2 << 20) + 1 if rng.random() < 0.1 else 2 << 20)],
}
"""What a member says that it should not, by the services that it knows."""


def mechanism_of(address: tuple[str, int]) -> str:
    """How a ZeroMQ port wants others to show who they are; `HTTP`; empty: it is no port of ours, or none of this process any more."""
    with contextlib.suppress(OSError):
        # With another mechanism behind it some say nothing to a greeting.
        for said in (greeting("NULL")[:12], b"GET /live HTTP/1.0\r\n\r\n"):
            with socket.create_connection(address, _CONNECT_SECONDS) as probe:
                probe.settimeout(_SAY_SECONDS)
                probe.sendall(said)
                heard = b""
                with contextlib.suppress(TimeoutError, ConnectionResetError):
                    heard = probe.makefile("rb").read(GREETING)
            if heard.startswith(b"HTTP/1"):
                return "HTTP"
            if len(heard) == GREETING and (heard[0], heard[9]) == (0xFF, 0x7F):
                return heard[12:32].rstrip(b"\0").decode()
    return ""


def ports_of(pid: int) -> list[tuple[str, int]]:
    """The ports of a process that are dsjax's own."""
    addresses = [(host, port) for port, host in sorted(listening_addresses(pid).items())]
    return [address for address in addresses if mechanism_of(address)]
