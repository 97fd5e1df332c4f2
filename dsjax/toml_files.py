"""Read TOML files, either bundled in `configs/` or the user's own, and check their fields."""

import importlib.resources
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from dsjax.errors import UserError, check_fields, why_unreadable

Kind = TypeVar("Kind")
AboveZero = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]
Count = Annotated[int, msgspec.Meta(ge=1)]


def bundled_text(*path: str) -> str:
    """Read a file of `configs`."""
    return importlib.resources.files("configs").joinpath(*path).read_text(encoding="utf-8")


def bundled_names(folder: str) -> tuple[str, ...]:
    """Return the names of the TOML files in `configs/FOLDER`, without suffix."""
    names = (entry.name for entry in (importlib.resources.files("configs") / folder).iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def read_toml(what: str, folder: str, name_or_path: str | Path) -> dict[str, Any]:
    """Read a bundled file of `configs/FOLDER` by name, or a user's file by path. what: kind of file for messages, such as `cluster`.

    Raises:
        UserError: the file does not exist or is not valid TOML.
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


def convert(what: str, values: Any, kind: type[Kind]) -> Kind:
    """Convert the fields of a file to a dataclass or a `msgspec.Struct`. what: the file, for messages.

    Raises:
        UserError: a field is missing, unknown, of the wrong type or out of range; the message has its value and the expectation.
    """
    if isinstance(values, dict):
        fields = msgspec.inspect.type_info(kind).fields
        check_fields(what, values, [field.name for field in fields], [field.name for field in fields if field.required])
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).rstrip("`").partition(" - at `$.")
        value = values
        for name in filter(None, re.split(r"[.\[\]]+", path)):
            value = value[int(name)] if isinstance(value, list) else value.get(name, value)
        where = f"{path} is {value!r}, " if path else ""
        raise UserError(f"{what}: {where}{reason[0].lower()}{reason[1:]}") from error
