"""Errors that the user can fix.

Every message says what was found, what was expected and what to do. The command line prints a `UserError` without a
traceback; any other exception is a bug and keeps its traceback.
"""

from collections.abc import Iterable


class UserError(ValueError):
    """User input (a flag, a file, a request) that cannot be used as given."""


def check_fields(what: str, given: Iterable[str], fields: Iterable[str], required: Iterable[str]) -> None:
    """Check that a user's file has all required fields and no unknown ones.

    Raises:
        UserError: fields are missing or unknown. The message names `what`, these fields and all valid fields.
    """
    given, fields = set(given), list(fields)
    missing = [name for name in required if name not in given]
    unknown = sorted(given - set(fields))
    if missing or unknown:
        wrong = [f"{word} {', '.join(names)}" for word, names in (("missing", missing), ("unknown", unknown)) if names]
        raise UserError(f"{what}: {'; '.join(wrong)}; the fields are {', '.join(fields)}")


def why_unreadable(error: Exception) -> str:
    """Return why a text file cannot be read, without its name, which the caller's message contains."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    return getattr(error, "strerror", None) or str(error)


class ConfigError(UserError):
    """A model configuration that is unknown, incomplete, or contradicts itself. The message names the field."""


class ChangeUnderWayError(UserError):
    """A mesh change was requested while another one is in progress."""
