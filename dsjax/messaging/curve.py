"""CURVE keys derived from the cluster key and a role, and the ZAP handler (ZeroMQ's authentication) that admits them.

Every process of a deployment can derive every role's keys. Roles guard against the wrong kind of process, not against a compromised one.
"""

import hmac
from collections.abc import Callable, Sequence

import zmq
from zmq.utils import z85

from dsjax.errors import UserError
from dsjax.messaging.cluster_key import ClusterKey

ROLES = ("member", "attention", "decode")
"""Roles of connecting processes: a group member, an AFD attention side at its experts, a decode side at its prefill side."""
LISTENER = "listener"
"""Role of the process that accepts connections."""

Verifier = Callable[[bytes, Sequence[bytes]], str | None]
"""`verify(mechanism, credentials)`: returns the user these credentials belong to; None rejects them."""


def check_libzmq() -> None:
    """Raise a `UserError` if libzmq is too old or lacks CURVE."""
    if zmq.zmq_version_info() < (4, 3, 5) or not zmq.has("curve"):
        raise UserError(f"libzmq is {zmq.zmq_version()}, expected 4.3.5 or later with CURVE; pip install 'pyzmq>=26'")


def key_pair(key: ClusterKey, role: str) -> tuple[bytes, bytes]:
    """Return a role's public and secret key, in Z85."""
    secret = z85.encode(key.mac("curve " + role))
    return zmq.curve_public(secret), secret


def listen_with_curve(socket: zmq.Socket, key: ClusterKey, domain: str) -> None:
    """Make a socket accept only peers that hold the cluster key."""
    socket.curve_publickey, socket.curve_secretkey = key_pair(key, LISTENER)
    socket.curve_server = True
    require_zap(socket, domain)


def connect_with_curve(socket: zmq.Socket, key: ClusterKey, role: str) -> None:
    """Make a socket authenticate as a member of the deployment, and connect only to other members."""
    socket.curve_publickey, socket.curve_secretkey = key_pair(key, role)
    socket.curve_serverkey = key_pair(key, LISTENER)[0]


def require_zap(socket: zmq.Socket, domain: str) -> None:
    """Have the ZAP handler check every connection. Without a domain, libzmq skips the handler and admits everyone."""
    socket.zap_domain = domain.encode()
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def role_verifier(key: ClusterKey) -> Verifier:
    """Return a verifier that admits the roles of a deployment; the role becomes the connection's user."""
    role_by_public_key = {z85.decode(key_pair(key, role)[0]): role for role in ROLES}

    def verify(mechanism: bytes, credentials: Sequence[bytes]) -> str | None:
        is_curve = mechanism == b"CURVE" and len(credentials) == 1
        return role_by_public_key.get(credentials[0]) if is_curve else None

    return verify


def ticket_verifier(ticket: bytes) -> Verifier:
    """Return a verifier that admits peers whose PLAIN password is the ticket, as the user `link`."""

    def verify(mechanism: bytes, credentials: Sequence[bytes]) -> str | None:
        is_plain = mechanism == b"PLAIN" and len(credentials) == 2
        return "link" if is_plain and hmac.compare_digest(credentials[1], ticket) else None

    return verify


class ZapHandler:
    """Answers libzmq's authentication requests, by the domain of the listening socket.

    socket: polled by the messaging thread, which calls `answer`. verifiers: by domain; any thread may add one.
    """

    def __init__(self, context: zmq.Context):
        self.verifiers: dict[str, Verifier] = {}
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        """Answer one request."""
        version, request_id, domain, _, _, mechanism, *credentials = self.socket.recv_multipart()
        verify = self.verifiers.get(domain.decode(errors="replace"))
        user = None if verify is None else verify(mechanism, credentials)
        status, text = (b"400", b"not a member of this deployment") if user is None else (b"200", b"")
        self.socket.send_multipart([version, request_id, status, text, (user or "").encode(), b""])
