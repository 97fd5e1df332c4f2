"""`ClusterTls` and `TlsStream`: TLS 1.3 between the processes of a deployment, each of which shows a certificate of the same authority."""

from __future__ import annotations

import hashlib
import socket
import ssl
import threading
from collections.abc import Callable
from typing import NoReturn

from dsjax.errors import UserError, why_unreadable

FLAGS = ("--cluster-tls-cert", "--cluster-tls-key", "--cluster-tls-ca")
_RECORDS = 1 << 18
"""Bytes that are encrypted at once, and read from a socket at once."""


class ClusterTls:
    """The certificate of this process, its key, and the authority that all certificates of the deployment come from.

    Names in certificates are not compared with addresses: whoever has a certificate of the authority and the cluster key is a member.

    Args:
        certificate: file with this process's certificate, and any between it and the authority's. key: file with its private key, not
            encrypted. authority: file with the authority's certificate.

    Raises:
        UserError: a file cannot be read, or they do not go together.

    Attributes:
        fingerprint: SHA-256 of this process's certificate, which its proofs of the cluster key contain.
    """

    def __init__(self, certificate: str, key: str, authority: str):
        self.fingerprint = _fingerprint(certificate)
        self._server = _context(ssl.PROTOCOL_TLS_SERVER, certificate, key, authority)
        self._server.num_tickets = 0  # nobody resumes a session
        self._client = _context(ssl.PROTOCOL_TLS_CLIENT, certificate, key, authority)

    def stream(self, connection: socket.socket, *, is_listener: bool, before_wait: Callable[[], None]) -> TlsStream:
        """Agree on TLS over a connection.

        before_wait: is called before each wait for the other side; it bounds the time of the next one.

        Raises:
            ssl.SSLError, OSError, EOFError: the other side speaks no TLS 1.3, shows no certificate of the authority, or has gone.
        """
        return TlsStream(connection, self._server if is_listener else self._client, is_listener, before_wait)


class TlsStream:
    """TLS over a connection. One thread may read while another one writes, which Python's own `SSLSocket` does not promise."""

    def __init__(
        self, connection: socket.socket, context: ssl.SSLContext, is_listener: bool, before_wait: Callable[[], None]
    ):
        self._connection = connection
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._to_send, server_side=is_listener)
        self._lock, self._writing = threading.Lock(), threading.Lock()
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                before_wait()
                self._flush()
                self._fill()
                if self._received.eof:
                    raise EOFError from None
            except ssl.SSLError:
                self._flush()  # it tells the other side why
                raise
        self._flush()
        self.peer_fingerprint = hashlib.sha256(self._tls.getpeercert(True)).digest()

    def recv_into(self, view: memoryview) -> int:
        """Wait for bytes, and give how many have come; 0 where the other side has ended."""
        while True:
            with self._lock:
                try:
                    return self._tls.read(len(view), view)
                except ssl.SSLWantReadError:
                    pass
                except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                    return 0
            self._fill()

    def sendall(self, data: bytes | memoryview) -> None:
        """Send bytes."""
        view = memoryview(data)
        with self._writing:
            for start in range(0, len(view), _RECORDS):
                with self._lock:
                    self._tls.write(view[start : start + _RECORDS])
                self._flush()

    def _fill(self) -> None:
        data = self._connection.recv(_RECORDS)
        with self._lock:
            if data:
                self._received.write(data)
            else:
                self._received.write_eof()

    def _flush(self) -> None:
        with self._lock:
            data = self._to_send.read()
        if data:
            self._connection.sendall(data)


def _context(protocol: int, certificate: str, key: str, authority: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(certificate, key, password=_refuse_password)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise UserError(
            f"{FLAGS[0]} {certificate} and {FLAGS[1]} {key} cannot be used: {_why(error)}; expected a certificate and its key in PEM"
        ) from error
    try:
        context.load_verify_locations(authority)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{FLAGS[2]} {authority} cannot be used: {_why(error)}; expected a certificate in PEM"
        ) from error
    return context


def _refuse_password() -> NoReturn:
    raise ValueError("the private key is encrypted, and there is nobody to ask for its password")


def _fingerprint(certificate: str) -> bytes:
    try:
        with open(certificate, encoding="ascii") as file:
            text = file.read()
        begin, end = text.index(ssl.PEM_HEADER), text.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(text[begin:end])).digest()
    except (OSError, ValueError) as error:
        why = why_unreadable(error) if isinstance(error, OSError) else "it holds no certificate in PEM"
        raise UserError(f"{FLAGS[0]} {certificate} cannot be used: {why}") from error


def _why(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
