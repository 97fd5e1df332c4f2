"""Files that `dsjax dryrun` and `dsjax bench` write for a plan."""

from pathlib import Path
from typing import TypeVar

import msgspec

from dsjax.errors import UserError, why_unreadable

Kind = TypeVar("Kind")


def read_json(flag: str, path: str | Path, kind: type[Kind], command: str) -> Kind:
    """A JSON file that `command` wrote, as a `msgspec.Struct`. Fields that the struct does not have are left out.

    Raises:
        UserError: it cannot be read, or a field is missing, of another type or out of range. flag: the option that named the file.
    """
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=kind)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
        raise UserError(f"{flag} {path}: {why_unreadable(error)}; expected a file that `{command}` wrote") from error
