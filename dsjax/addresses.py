"""`HOST:PORT` as text, and as what sockets want."""

from __future__ import annotations

import ipaddress
import socket

from dsjax.errors import UserError


def split_address(text: str, what: str = "the address") -> tuple[str, int]:
    """Split `HOST:PORT` into host and port. An IPv6 address is in brackets.

    Raises:
        UserError: it is something else. what: names it in the message.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise UserError(f"{what} is {text!r}, expected HOST:PORT, such as 10.0.0.1:8476")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """Give `HOST:PORT`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def zmq_endpoint(host: str, port: int) -> str:
    """Resolve a host, and give the endpoint at which libzmq listens or to which it connects; port 0 takes a free one.

    Raises:
        OSError: the name is not known.
    """
    try:
        [(*_, address), *_] = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"{host!r} can be no name of a host") from error
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"tcp://{host}:{port or '*'}"


def is_loopback(host: str) -> bool:
    """Whether a name or an address leads to the loopback interface, whatever it is resolved to."""
    try:
        resolved = (
            {address[0] for *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)} if host else set()
        )
    except (OSError, UnicodeError):
        return False
    return bool(resolved) and all(ipaddress.ip_address(one.partition("%")[0]).is_loopback for one in resolved)
