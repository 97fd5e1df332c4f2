"""TOML files that a name or a path stands for: those of a folder of `configs/`, and the user's."""

import importlib.resources
import math
import os
import tomllib
from pathlib import Path
from typing import Any

from dsjax.errors import UserError, why_unreadable

_WORDS = {str: "text", int: "a whole number", float: "a number", list: "a list", dict: "a table", bool: "true or false"}


def bundled_names(folder: str) -> tuple[str, ...]:
    """Names of the files of `configs/FOLDER`."""
    names = (entry.name for entry in (importlib.resources.files("configs") / folder).iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def read_toml(what: str, folder: str, name_or_path: str | Path) -> dict[str, Any]:
    """Read a file of `configs/FOLDER` by its name, or one of the user's by its path. what: such as `cluster`, for messages.

    Raises:
        UserError: no such file, or not TOML.
    """
    key, file = str(name_or_path), Path(os.path.expanduser(name_or_path))
    if key in bundled_names(folder):
        file = importlib.resources.files("configs") / folder / f"{key}.toml"
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{what} {key!r} is not valid TOML: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(bundled_names(folder))
        raise UserError(
            f"no {what} {key!r} ({why_unreadable(error)}); expected a TOML file, or one of {names}"
        ) from error


def check_kind(what: str, name: str, value: Any, kind: type) -> None:
    """Make sure that a field's value is of a kind; a whole number is a float too.

    Raises:
        UserError: it is not. what: the file, for the message.
    """
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, (int, float) if kind is float else kind):
        raise UserError(f"{what}: {name} is {value!r}, expected {_WORDS[kind]}")


def check_above_zero(what: str, name: str, value: Any) -> float:
    """Return a field's value as a float. what: the file, for the message.

    Raises:
        UserError: it is not a finite number above 0.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(f"{what}: {name} is {value!r}, expected a number above 0")
    return float(value)
