"""What tests of connections between processes need: credentials, certificates, and a wire that changes what passes."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from dsjax.hosts.secure_channel import SecureChannel
from dsjax.hosts.secure_listener import SecureListener
from dsjax.messaging.cluster_key import ClusterKey
from dsjax.messaging.credentials import Credentials

KEY = Credentials(ClusterKey("k" * 32, "the test"))
OTHER = Credentials(ClusterKey("o" * 32, "the other test"))


@contextlib.contextmanager
def listening(
    serve: Callable[[SecureChannel], None],
    credentials: Credentials = KEY,
    services: tuple[str, ...] = ("pages",),
    **options,
) -> Iterator[SecureListener]:
    """A listener on the loopback interface, which is closed with its connections."""
    listener = SecureListener(
        socket.create_server(("127.0.0.1", 0)), credentials, dict.fromkeys(services, serve), "test", **options
    )
    try:
        yield listener
    finally:
        listener.close(connections=True)


def address_of(listener: SecureListener) -> tuple[str, int]:
    """Where it listens."""
    return "127.0.0.1", listener.port


def make_certificates(folder: Path, *names: str, authority: str = "authority") -> dict[str, tuple[str, str, str]]:
    """Files of certificate, private key and authority for each name, which openssl makes."""

    def run(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    run("req", "-x509", *curve, "-keyout", f"{authority}.key", "-out", f"{authority}.pem", "-subj", f"/CN={authority}")
    signed = ("-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-CAcreateserial")
    for name in names:
        run("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        run("x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.pem")
    return {
        name: tuple(str(folder / file) for file in (f"{name}.pem", f"{name}.key", f"{authority}.pem")) for name in names
    }


@contextlib.contextmanager
def relay(address: tuple[str, int], change: Callable[[int, bytes], bytes]) -> Iterator[tuple[str, int]]:
    """A wire to an address: what the caller sends passes through `change(offset, bytes)`, one read at a time; the rest as it is."""
    listener = socket.create_server(("127.0.0.1", 0))
    sockets = [listener]

    def pump(one: socket.socket, other: socket.socket, change: Callable[[int, bytes], bytes]) -> None:
        offset = 0
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(change(offset, data))
                offset += len(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = listener.accept()
                there = socket.create_connection(address)
                sockets.extend((caller, there))
                threading.Thread(target=pump, args=(caller, there, change), daemon=True).start()
                threading.Thread(target=pump, args=(there, caller, lambda _, data: data), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        thread.join(60)
