"""`ClusterKey`: the secret shared by all processes of a deployment, given by the user or generated; `Credentials`: how they use it.

See docs/security.md for what it protects.
"""

import contextlib
import functools
import hashlib
import hmac
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from dsjax.addresses import is_loopback
from dsjax.errors import UserError, why_unreadable
from dsjax.owned_folder import DistrustedError, OwnedFolder, open_file, write_whole

_log = logging.getLogger(__name__)

FLAG = "--cluster-key-file"
VARIABLE = "DSJAX_CLUSTER_KEY"
LEAST_CHARACTERS = 32
_MOST_CHARACTERS = 4096
_NAME = "cluster-key"
_HOW = "openssl rand -hex 32 makes one"


class ClusterKey:
    """The secret. `str` and `repr` do not show it, and it cannot be pickled.

    source: a file or the environment variable, for messages. is_local: it was generated for this user, for the loopback interface only.
    """

    __slots__ = ("_secret", "is_local", "source")

    def __init__(self, text: str, source: str, *, is_local: bool = False):
        key = text.strip()
        if not key:
            raise UserError(
                f"the cluster key of {source} is empty; give at least {LEAST_CHARACTERS} characters ({_HOW})"
            )
        if key.split() != [key]:
            raise UserError(
                f"the cluster key of {source} has spaces or several lines; expected one line without spaces"
            )
        if not LEAST_CHARACTERS <= len(key) <= _MOST_CHARACTERS:
            raise UserError(
                f"the cluster key of {source} has {len(key):,} characters, expected {LEAST_CHARACTERS} to {_MOST_CHARACTERS:,} ({_HOW})"
            )
        try:
            self._secret = hashlib.sha256(key.encode()).digest()
        except UnicodeEncodeError:  # a variable may hold any bytes
            raise UserError(f"the cluster key of {source} is no text in UTF-8; give another ({_HOW})") from None
        self.source, self.is_local = source, is_local

    def mac(self, purpose: str, *parts: bytes) -> bytes:
        """Return the HMAC-SHA256 of a purpose and parts. Each part is prefixed with its length, so different lists never encode alike."""
        message = b"".join(len(part).to_bytes(4, "little") + part for part in (purpose.encode(), *parts))
        return hmac.digest(self._secret, message, "sha256")

    def __repr__(self) -> str:
        return f"ClusterKey(source={self.source!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a cluster key is not written down")


def given_key(file: str | None, environment: Mapping[str, str] = os.environ) -> ClusterKey | None:
    """Return the key from a file or else the environment, or None if neither is given. Raises `UserError` if it cannot be used."""
    if file is not None:
        return _read_given(file)
    if VARIABLE in environment:
        return ClusterKey(environment[VARIABLE], f"the environment variable {VARIABLE}")
    return None


def _read_given(file: str) -> ClusterKey:
    try:
        with open(file, encoding="utf-8") as opened:
            status = os.fstat(opened.fileno())
            text = opened.read(_MOST_CHARACTERS + 2)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{FLAG}: {file!r} cannot be read: {why_unreadable(error)}") from error
    if stat.S_ISREG(status.st_mode) and status.st_mode & stat.S_IROTH:
        _log.warning("Every user of this host can read the cluster key in %s; chmod o= %s.", file, file)
    return ClusterKey(text, f"the file {file}")


def local_key(environment: Mapping[str, str] = os.environ) -> ClusterKey:
    """Return this user's key on this host, generating it if missing. Processes that start at the same time get the same key.

    Raises:
        UserError: no folder can hold the key, or the existing file is no key that only this user can read.
    """
    reasons = []
    for folder in _folders(environment):
        try:
            with contextlib.closing(OwnedFolder(Path(folder), private=True)) as owned, owned.opened() as descriptor:
                return _key_in(folder, descriptor)
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror or error}")
    why = "; ".join(reasons) or "there is no HOME, and no folder for temporary files"
    raise UserError(
        f"no cluster key can be kept for this user ({why}); give one with {FLAG} FILE or {VARIABLE} ({_HOW})"
    )


def _folders(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the folders that may hold the key, in order of preference. The caller must check who owns them."""
    if runtime := environment.get("XDG_RUNTIME_DIR"):
        yield os.path.join(runtime, "dsjax")
    home = os.path.expanduser("~") if environment is os.environ else environment.get("HOME", "")
    cache = environment.get("XDG_CACHE_HOME") or (os.path.join(home, ".cache") if os.path.isabs(home) else "")
    if os.path.isabs(cache):
        with contextlib.suppress(OSError):
            os.makedirs(cache, mode=0o700, exist_ok=True)
        yield os.path.join(cache, "dsjax-cluster")
    with contextlib.suppress(FileNotFoundError):  # no writable folder for temporary files
        yield os.path.join(tempfile.gettempdir(), f"dsjax-{os.geteuid()}")


def _key_in(folder: str, descriptor: int) -> ClusterKey:
    path = os.path.join(folder, _NAME)
    try:
        try:
            opened = open_file(_NAME, descriptor, private=True)
        except FileNotFoundError:
            text = f"{secrets.token_hex(32)}\n".encode()
            write_whole(descriptor, _NAME, f"{_NAME}.{secrets.token_hex(8)}", [text], once=True)
            opened = open_file(_NAME, descriptor, private=True)
    except DistrustedError as error:
        raise UserError(
            f"{path} is no file that only this user can read ({error.strerror}); delete it, or give another key with {FLAG} FILE or "
            f"{VARIABLE}"
        ) from error
    with os.fdopen(opened, encoding="ascii") as file:
        try:
            return ClusterKey(file.read(_MOST_CHARACTERS + 2), f"the file {path}", is_local=True)
        except ValueError as error:  # a UserError, or not text
            raise UserError(f"{path} holds no cluster key; delete it, and a new one is made") from error


@dataclass(frozen=True)
class Credentials:
    """Credentials for connecting to other processes."""

    key: ClusterKey
    encrypt_bulk: bool = False  # whether links are encrypted too; control messages always are

    def check_host(self, host: str) -> None:
        """Raise a `UserError` if a host may not be used: a key generated for this user is for the loopback interface only."""
        if self.key.is_local and not is_loopback(host):
            raise needs_key(host)


def read_credentials(cluster_key_file: str | None, *hosts: str, encrypt_bulk: bool = False) -> Credentials:
    """Read the key, or generate one for this user if all hosts are on the loopback interface.

    cluster_key_file: None if the key is in the environment or not given. hosts: the known names or addresses that this process listens
    on or connects to.

    Raises:
        UserError: a host is beyond loopback and no key was given, or the file cannot be used.
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
    """Return this user's credentials for the loopback interface."""
    return Credentials(local_key())


def needs_key(host: str) -> UserError:
    """Return the error for a host beyond the loopback interface without a key."""
    return UserError(
        f"{host or 'an address that is not known yet'} is beyond the loopback interface, where processes must share a key: give all of "
        f"them the same one with {FLAG} FILE or in the environment variable {VARIABLE}, at least "
        f"{LEAST_CHARACTERS} characters ({_HOW})"
    )
