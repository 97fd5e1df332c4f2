"""`Credentials`: how a process shows that it belongs to its deployment."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from dsjax.addresses import is_loopback
from dsjax.errors import UserError
from dsjax.messaging import cluster_key
from dsjax.messaging.cluster_key import ClusterKey, given_key, local_key


@dataclass(frozen=True)
class Credentials:
    """What connections between processes are made with. encrypt_bulk: whether links encrypt too; control messages always are."""

    key: ClusterKey
    encrypt_bulk: bool = False

    def check_host(self, host: str) -> None:
        """Check that a host may be used, or raise a `UserError`: a key made for this user serves the loopback interface alone."""
        if self.key.is_local and not is_loopback(host):
            raise needs_key(host)


def read_credentials(cluster_key_file: str | None, *hosts: str, encrypt_bulk: bool = False) -> Credentials:
    """Read the key, or make one for this user where all hosts are the loopback interface.

    cluster_key_file: None: the key is in the environment, or nowhere. hosts: names or addresses that this process listens at and connects
    to, as far as they are known.

    Raises:
        UserError: a host is beyond loopback and no key was given; or the file cannot be used.
    """
    key = given_key(cluster_key_file)
    if key is None:
        beyond = next((host for host in hosts if not is_loopback(host)), None)
        if beyond is not None:
            raise needs_key(beyond)
        key = local_key()
    return Credentials(key, encrypt_bulk)


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
