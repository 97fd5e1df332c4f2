"""`Credentials`: by what a process shows that it belongs to its deployment; `CredentialOptions`: where the user says they are."""

from __future__ import annotations

import functools
import ipaddress
import socket
from dataclasses import dataclass

from dsjax.errors import UserError
from dsjax.hosts import cluster_key, tls
from dsjax.hosts.cluster_key import ClusterKey, given_key, local_key
from dsjax.hosts.tls import ClusterTls


@dataclass(frozen=True)
class Credentials:
    """What every connection between processes begins with.

    Attributes:
        key: the cluster key. tls: certificates; None: connections are not encrypted.
    """

    key: ClusterKey
    tls: ClusterTls | None = None

    def check_host(self, host: str) -> None:
        """Make sure that a host may be listened at, or connected to: a key that was made for this user serves the loopback interface alone.

        Raises:
            UserError: it may not.
        """
        if self.key.is_local and not is_loopback(host):
            raise needs_key(host)


@dataclass(frozen=True)
class CredentialOptions:
    """The options of the same names, which are names of files and no secrets.

    Raises:
        UserError: certificates are given in part.
    """

    cluster_key_file: str | None = None
    cluster_tls_cert: str | None = None
    cluster_tls_key: str | None = None
    cluster_tls_ca: str | None = None

    def __post_init__(self):
        missing = [flag for flag, file in zip(tls.FLAGS, self._tls_files, strict=True) if file is None]
        if 0 < len(missing) < len(tls.FLAGS):
            raise UserError(f"{' and '.join(missing)} missing: give all of {', '.join(tls.FLAGS)}, or none of them")

    @property
    def _tls_files(self) -> tuple[str | None, str | None, str | None]:
        return self.cluster_tls_cert, self.cluster_tls_key, self.cluster_tls_ca

    def read(self, *hosts: str) -> Credentials:
        """Read the files, or make a key for this user where all hosts are the loopback interface.

        hosts: names or addresses that this process listens at and connects to, as far as they are known.

        Raises:
            UserError: a host is beyond loopback and no key was given; or a file cannot be used.
        """
        key = given_key(self.cluster_key_file)
        if key is None:
            beyond = next((host for host in hosts if not is_loopback(host)), None)
            if beyond is not None:
                raise needs_key(beyond)
            key = local_key()
        return Credentials(key, ClusterTls(*self._tls_files) if self.cluster_tls_cert is not None else None)


@functools.cache
def local_credentials() -> Credentials:
    """The credentials of this user on the loopback interface."""
    return Credentials(local_key())


def needs_key(host: str) -> UserError:
    """Say that a host beyond loopback needs a key."""
    return UserError(
        f"{host or 'an address that is not known yet'} is beyond the loopback interface, where processes must share a key: give all of "
        f"them the same one with {cluster_key.FLAG} FILE or in the environment variable {cluster_key.VARIABLE}, at least "
        f"{cluster_key.LEAST_CHARACTERS} characters (openssl rand -hex 32 makes one)"
    )


def is_loopback(host: str) -> bool:
    """Whether a name or an address leads to the loopback interface, whatever it is resolved to."""
    try:
        resolved = (
            {address[0] for *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)} if host else set()
        )
    except (OSError, UnicodeError):
        return False
    return bool(resolved) and all(ipaddress.ip_address(one.partition("%")[0]).is_loopback for one in resolved)
