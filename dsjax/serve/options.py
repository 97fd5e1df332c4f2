"""`ServeOptions`: what `dsjax serve` can be told about HTTP, checked when made."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsjax.errors import UserError, why_unreadable

REASONING_PARSERS = ("auto", "deepseek_r1", "none")
TOOL_CALL_PARSERS = ("auto", "deepseek_v3", "deepseek_v31", "none")


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of the server, beside the engine's.

    Attributes:
        api_keys: any of them opens everything but the admin endpoints; without any, all of that is open to everybody.
        admin_api_key: opens everything; None: admin endpoints are closed to all.
        max_queued_requests, max_queued_tokens: what may wait for a slot over all ranks; None: no limit.
        max_body_bytes: largest body of a request.
        request_timeout: seconds in which a request's head, and then its body, must have arrived.
        step_timeout: seconds after which a step is taken for a hang; 0: never.
        reasoning_parser, tool_call_parser: how answers are taken apart; `auto` looks at the model's template.
        disable_any_whitespace: JSON has no blanks between its parts unless a request says otherwise.
        profile_dir: where `/start_profile` writes; None: there is no profiling.
    """

    api_keys: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    admin_api_key: str | None = dataclasses.field(default=None, repr=False)
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    max_body_bytes: int = 16 * 1024 * 1024
    request_timeout: float = 60.0
    step_timeout: float = 300.0
    reasoning_parser: str = "auto"
    tool_call_parser: str = "auto"
    disable_any_whitespace: bool = False
    profile_dir: str | None = None

    def __post_init__(self):
        for key in (*self.api_keys, *([self.admin_api_key] if self.admin_api_key is not None else [])):
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise UserError(
                    "an API key is empty or has characters that no HTTP header carries; use printable ASCII without blanks"
                )
        if self.admin_api_key in self.api_keys:
            raise UserError("--admin-api-key is also an --api-key, so every client would be an admin; choose another")
        for name, known in (("reasoning_parser", REASONING_PARSERS), ("tool_call_parser", TOOL_CALL_PARSERS)):
            if getattr(self, name) not in known:
                flag = f"--{name.replace('_', '-')}"
                raise UserError(f"{flag} is {getattr(self, name)!r}, expected one of {', '.join(known)}")

    def to_json(self) -> dict[str, Any]:
        """For `/server_info`: of keys only how many there are."""
        shown = dataclasses.asdict(self)
        keys, admin = shown.pop("api_keys"), shown.pop("admin_api_key")
        return {**shown, "num_api_keys": len(keys), "has_admin_api_key": admin is not None}


def read_keys(given: Iterable[str], files: Iterable[Path]) -> tuple[str, ...]:
    """Keys from the command line and from files: one a line, blank lines and `#` comments left out.

    Raises:
        UserError: a file cannot be read, or holds no key: then the server would be open to all.
    """
    keys = list(given)
    for path in files:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--api-key-file {path} cannot be read: {why_unreadable(error)}") from error
        found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not found:
            raise UserError(f"--api-key-file {path} holds no key, so the server would be open to all; write one a line")
        keys += found
    return tuple(dict.fromkeys(keys))
