"""The errors that are the user's to mend.

Every message says what was found, what was expected and what to do. The command line prints a `UserError` without a
traceback; any other exception is a fault of the program and keeps its traceback.
"""

from collections.abc import Iterable


class UserError(ValueError):
    """Something the user gave (a flag, a file, a request) cannot be used as it is."""


def check_fields(what: str, given: Iterable[str], fields: Iterable[str], required: Iterable[str]) -> None:
    """Make sure that a file of the user's has the fields that it needs, and no others.

    Raises:
        UserError: `what`, with the fields that are missing, those that are unknown, and all that there are.
    """
    given, fields = set(given), list(fields)
    missing = [name for name in required if name not in given]
    unknown = sorted(given - set(fields))
    if missing or unknown:
        wrong = [f"{word} {', '.join(names)}" for word, names in (("missing", missing), ("unknown", unknown)) if names]
        raise UserError(f"{what}: {'; '.join(wrong)}; the fields are {', '.join(fields)}")


def why_unreadable(error: Exception) -> str:
    """Why a text file cannot be read, without its name, which the message around it has."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    return getattr(error, "strerror", None) or str(error)


class ConfigError(UserError):
    """A model configuration that is unknown, incomplete, or contradicts itself. The message names the field."""


class ChangeUnderWayError(UserError):
    """Another mesh was asked for while the mesh is being changed."""
