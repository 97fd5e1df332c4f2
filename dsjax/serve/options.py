"""`ServeOptions`: the HTTP options of `dsjax serve`, validated on construction."""

import dataclasses
import ipaddress
import json
import os
import socket
import ssl
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsjax.errors import UserError, why_unreadable
from dsjax.options import Checked, advanced, option


@dataclass(frozen=True, kw_only=True)
class HttpOptions(Checked):
    """Limits of requests, parsers of answers, TLS and CORS."""

    max_queued_requests: int = advanced(
        65_536, "Maximum queued completions; more get status 429. 0: no limit.", min=0, least=0
    )
    max_queued_tokens: int = advanced(
        1 << 26, "Maximum queued tokens; more get status 429. 0: no limit.", min=0, least=0
    )
    max_connections: int = advanced(
        16_384, "Maximum HTTP connections, except for /health and /ready. 0: no limit.", min=0, least=0
    )
    max_body_bytes: int = advanced(16 * 1024 * 1024, "Maximum size of a request body, in bytes.", min=1024)
    request_timeout: float = advanced(60.0, "Seconds to wait for a request's headers, and then for its body.", min=0.1)
    reasoning_parser: str = option(
        "auto", "Reasoning format. auto: detect it from the chat template.", choices=("auto", "deepseek_r1", "none")
    )
    tool_call_parser: str = option(
        "auto",
        "Tool call format. auto: detect it from the chat template or prompt encoder.",
        choices=("auto", "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "kimi_k2", "none"),
    )
    disable_any_whitespace: bool = advanced(
        False, "Omit whitespace between JSON elements of structured output by default.", switch=True
    )
    profile_dir: str | None = advanced(None, "Directory for traces of /start_profile. Default: profiling is disabled.")
    allowed_origins: str | None = advanced(
        None,
        """Origins allowed by CORS, as a JSON list: '["https://chat.example"]', or '["*"]' for all.""",
        metavar="JSON",
    )
    ssl_certfile: str | None = option(None, "Path to the TLS certificate chain; enables HTTPS.")
    ssl_keyfile: str | None = option(None, "Path to the TLS private key, if separate.")

    def __post_init__(self):
        super().__post_init__()
        self.origins  # noqa: B018 - raises for invalid origins
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise UserError("--ssl-keyfile is given without --ssl-certfile; give both")
        if self.ssl_certfile is not None:
            try:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, password=lambda: "")
            except OSError as error:
                files = " and ".join(filter(None, (self.ssl_certfile, self.ssl_keyfile)))
                raise UserError(f"{files}: no certificate with its private key, without a password: {error}") from error

    @property
    def origins(self) -> list[str]:
        """The parsed `allowed_origins`."""
        try:
            origins = json.loads(self.allowed_origins or "[]")
        except ValueError:
            origins = None
        if not isinstance(origins, list) or not all(isinstance(origin, str) for origin in origins):
            raise UserError(f"--allowed-origins is {self.allowed_origins!r}, expected a JSON list of origins")
        return origins

    @property
    def tls(self) -> dict[str, str | None]:
        """uvicorn's arguments for TLS."""
        return {"ssl_certfile": self.ssl_certfile, "ssl_keyfile": self.ssl_keyfile}

    def url(self, host: str, port: int) -> str:
        """The URL of a server at this address."""
        scheme = "http" if self.ssl_certfile is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


@dataclass(frozen=True, kw_only=True)
class ServeOptions(HttpOptions):
    """All server options except the engine's."""

    # keys for all endpoints except the admin endpoints; empty: no key is needed
    api_keys: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    # key for all endpoints; None: admin endpoints are closed
    admin_api_key: str | None = dataclasses.field(default=None, repr=False)
    step_timeout: float = 300.0  # seconds after which a step counts as a hang; 0: never

    def __post_init__(self):
        super().__post_init__()
        for key in (*self.api_keys, *([self.admin_api_key] if self.admin_api_key is not None else [])):
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise UserError(
                    "an API key is empty or has characters that no HTTP header carries; use printable ASCII without blanks"
                )
        if self.admin_api_key in self.api_keys:
            raise UserError("--admin-api-key is also an --api-key, so every client would be an admin; choose another")

    def to_json(self) -> dict[str, Any]:
        """Return the options for `/server_info`, with the number of keys in place of the keys."""
        fields = dataclasses.asdict(self)
        keys, admin = fields.pop("api_keys"), fields.pop("admin_api_key")
        return {**fields, "num_api_keys": len(keys), "has_admin_api_key": admin is not None}


KEY_VARIABLE, ADMIN_KEY_VARIABLE = "DSJAX_API_KEY", "DSJAX_ADMIN_API_KEY"


def check_key_variables(variables: Mapping[str, str] = os.environ) -> None:
    """Check that no API key variable is set but empty: the command line would treat it as unset.

    Raises:
        UserError: a variable is set but empty.
    """
    for name in (KEY_VARIABLE, ADMIN_KEY_VARIABLE):
        if name in variables and not variables[name].strip():
            raise UserError(
                f"the environment variable {name} is set and empty, which would leave out the key that somebody meant to give; "
                "give it a key, or unset it"
            )


def is_loopback(address: str) -> bool:
    """Return whether an IP address is reachable only from its own machine."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback


def check_listener(listener: socket.socket, keys: Sequence[str], allow_unauthenticated: bool) -> None:
    """Close the listening socket and raise `UserError` if other machines can reach it without a key.

    Raises:
        UserError: the address is not loopback, and there is neither a key nor `--allow-unauthenticated`.
    """
    address = listener.getsockname()[0]
    if not keys and not allow_unauthenticated and not is_loopback(address):
        listener.close()
        raise UserError(
            f"{address} can be reached from other machines, and no key was given, so everybody there could use this server; give "
            f"--api-key-file FILE, --api-key or the environment variable {KEY_VARIABLE}, listen on 127.0.0.1, or allow it with "
            "--allow-unauthenticated"
        )


def read_keys(keys_given: Iterable[str], files: Iterable[Path]) -> tuple[str, ...]:
    """Read keys from the command line and from files with one key per line; blank lines and `#` comments are skipped.

    Raises:
        UserError: a file cannot be read, or holds no key, which would leave the server open to all.
    """
    keys = list(keys_given)
    for path in files:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--api-key-file {path} cannot be read: {why_unreadable(error)}") from error
        keys_of_file = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not keys_of_file:
            raise UserError(f"--api-key-file {path} holds no key, so the server would be open to all; write one a line")
        keys += keys_of_file
    return tuple(dict.fromkeys(keys))
