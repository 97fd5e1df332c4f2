"""Names of vLLM's and SGLang's options and variables, and of earlier versions of dsjax: `configs/engines/other-engines.csv`.

A row's verdict: `accepted`: the command line takes the option for ours, its value translated; `see`: the message names ours; `variable`:
of the environment, which gives a warning; others are words of a message, which the note explains.
"""

import csv
import functools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from dsjax.addresses import join_address, split_address
from dsjax.engine.setup.side_options import default_page
from dsjax.errors import UserError
from dsjax.toml_files import bundled_text

Translation = Callable[[str, Mapping[str, str]], str]
"""From a value of theirs, and the values given so far by the names of our options, to a value of ours; `ValueError` where it has none."""


class Row(NamedTuple):
    """What an option of theirs is.

    Attributes:
        option: theirs; `*` is any text, `?` a letter. here: ours, and what stands behind it. note: what differs.
        value: how a value is translated: pairs `theirs=ours`, a name of `TRANSLATIONS`, or empty: as it is.
    """

    option: str
    verdict: str
    here: str
    value: str
    note: str

    @property
    def ours(self) -> str:
        """The name of our option; empty where there is none."""
        return self.here.partition(" ")[0]


@functools.cache
def rows() -> dict[str, Row]:
    """All rows by `option`."""
    text = bundled_text("engines", "other-engines.csv")
    return {row["option"]: Row(**row) for row in csv.DictReader(text.splitlines())}


def _axis(name: str) -> Translation:
    """Set an axis of `--mesh`, and leave the others."""

    def value(text: str, given: Mapping[str, str]) -> str:
        mesh, size = given.get("--mesh", name + "=1").replace(" ", ""), str(int(text))
        pairs = [pair.partition("=") for pair in mesh.split(",")]
        axes = {axis: size for axis, _, size in pairs}
        if len(axes) < len(pairs) or not all(axes.values()):
            return mesh  # which is refused for what it is
        return ",".join(f"{axis}={size}" for axis, size in (axes | {name: size}).items())

    return value


def _coordinator(given: Mapping[str, str]) -> tuple[str, int]:
    return split_address(given.get("--coordinator-address", "127.0.0.1:8476"))


def _page(given: Mapping[str, str]) -> int:
    """Tokens of a page: as given, or the default of the given model."""
    if "--page-size" in given:
        return int(given["--page-size"])
    from dsjax.checkpoint.hub import resolve_config
    from dsjax.config import load_config

    return default_page(load_config(resolve_config(given["--model"], revision=given.get("--revision"))))


TRANSLATIONS: dict[str, Translation] = {
    **{axis: _axis(axis) for axis in ("dp", "ep", "pp", "tp")},
    "pages": lambda text, given: str(int(text) * _page(given)),
    "GiB": lambda text, given: str(round(float(text) * 2**30)),
    "host": lambda text, given: join_address(text, _coordinator(given)[1]),
    "port": lambda text, given: join_address(_coordinator(given)[0], int(text)),
}


def accepted(name: str, known: Container[str]) -> Row | None:
    """The row of an option that is taken for one of ours; None for any other. known: the command's own options."""
    row = None if name in known else rows().get(name)
    return row if row and row.verdict == "accepted" and row.ours in known else None


def translate(row: Row, text: str, given: dict[str, str]) -> str:
    """The value of our option for one of theirs, which `given` gets too.

    Raises:
        UserError: it has none.
    """
    try:
        if not text:
            raise ValueError
        if "=" in row.value:
            given[row.ours] = dict(pair.split("=") for pair in row.value.split())[text.lower()]
        else:
            given[row.ours] = TRANSLATIONS[row.value](text, given) if row.value else text
    except (KeyError, ValueError, OverflowError):
        note = f": {row.note}" if row.note else ""
        raise UserError(
            f"{row.option} {text or 'without a value'} has no counterpart here; give {row.here}{note}"
        ) from None
    return given[row.ours]


def advice(words: Sequence[str], known: Iterable[str]) -> list[str]:
    """A line for each of the words of a command line that is another engine's option, or an earlier version's, and whose counterpart the
    command has.

    words: as typed. known: the command's own options.
    """
    known, lines = set(known), {}
    for word in words:
        name = word.partition("=")[0]
        if name in known or not name.startswith("-"):
            continue
        row = rows().get(name) or next((row for row in rows().values() if fnmatchcase(name, row.option)), None)
        if row is not None and (row.ours or "--mesh") in known:
            lines[name] = f"{name} is {row.here or row.verdict}" + (f": {row.note}" if row.note else "")
    return list(lines.values())


def unread_variables(words: Sequence[str], known: Iterable[str], environment: Mapping[str, str]) -> list[str]:
    """A line for each variable of theirs that is set, and whose option the command has, but was not given.

    words: as typed. known: the command's own options.
    """
    typed, known = {word.partition("=")[0] for word in words}, set(known)
    return [
        f"{row.option} is set, and not read here: give {row.ours}, or unset it"
        for row in rows().values()
        if row.verdict == "variable"
        and environment.get(row.option, "").strip().lower() not in ("", "0", "false")
        and row.ours in known
        and not typed & {row.ours, row.ours.replace("--", "--no-", 1)}
    ]
