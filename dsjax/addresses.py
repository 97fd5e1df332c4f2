"""Parse and format `HOST:PORT` addresses, and resolve them to socket endpoints."""

from __future__ import annotations

import ipaddress
import socket

from dsjax.errors import UserError


def split_address(text: str, what: str = "the address") -> tuple[str, int]:
    """Split `HOST:PORT` into host and port. An IPv6 address is in brackets. what: name of the address in the error message.

    Raises:
        UserError: `text` is not `HOST:PORT`.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise UserError(f"{what} is {text!r}, expected HOST:PORT, such as 10.0.0.1:8476")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """Return `HOST:PORT`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def zmq_endpoint(host: str, port: int) -> str:
    """Resolve a host and return its ZeroMQ endpoint; port 0 selects a free port.

    Raises:
        OSError: the host name cannot be resolved.
    """
    return zmq_endpoints(host, port)[0]


def zmq_endpoints(host: str, port: int) -> list[str]:
    """Resolve a host and return an endpoint for each of its addresses, in the system's order of preference.

    Raises:
        OSError: the host name cannot be resolved.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"{host!r} can be no name of a host") from error
    addresses = dict.fromkeys(address[0] for *_, address in found)
    return [f"tcp://{f'[{one}]' if ':' in one else one}:{port or '*'}" for one in addresses]


def is_loopback(host: str) -> bool:
    """Return whether every address of a host is a loopback address."""
    try:
        resolved = (
            {address[0] for *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)} if host else set()
        )
    except (OSError, UnicodeError):
        return False
    return bool(resolved) and all(ipaddress.ip_address(one.partition("%")[0]).is_loopback for one in resolved)
