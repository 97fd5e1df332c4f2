"""Options and environment variables of vLLM, SGLang and earlier dsjax versions, from `configs/engines/other-engines.csv`.

A row's verdict is one of: `accepted`: the command line translates the option to dsjax's; `see`: the error message names dsjax's option;
`variable`: an environment variable, which gives a warning; anything else: text for the message, which the note explains.
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
"""Maps another engine's value and the dsjax options given so far (name → value) to dsjax's value; raises `ValueError` if it has none."""


class Row(NamedTuple):
    """Translation of one option of another engine."""

    option: str  # its name; `*` matches any text, `?` one letter
    verdict: str
    here: str  # dsjax's option and text that follows it
    # translation of the value: pairs `theirs=ours`, a name in `TRANSLATIONS`, or empty for an unchanged value
    value: str
    note: str  # differences

    @property
    def ours(self) -> str:
        """Name of dsjax's option; empty if there is none."""
        return self.here.partition(" ")[0]


@functools.cache
def rows() -> dict[str, Row]:
    """Return all rows by `option`."""
    text = bundled_text("engines", "other-engines.csv")
    return {row["option"]: Row(**row) for row in csv.DictReader(text.splitlines())}


def _set_axis(name: str) -> Translation:
    """Return a translation that sets one axis of `--mesh` and keeps the others."""

    def set_axis(text: str, given: Mapping[str, str]) -> str:
        mesh, size = given.get("--mesh", name + "=1").replace(" ", ""), str(int(text))
        pairs = [pair.partition("=") for pair in mesh.split(",")]
        axes = {axis: axis_size for axis, _, axis_size in pairs}
        if len(axes) < len(pairs) or not all(axes.values()):
            return mesh  # invalid; parsing --mesh reports it
        return ",".join(f"{axis}={axis_size}" for axis, axis_size in (axes | {name: size}).items())

    return set_axis


def _coordinator(given: Mapping[str, str]) -> tuple[str, int]:
    return split_address(given.get("--coordinator-address", "127.0.0.1:8476"))


def _page_size(given: Mapping[str, str]) -> int:
    """Return the tokens per page: as given, or the given model's default."""
    if "--page-size" in given:
        return int(given["--page-size"])
    from dsjax.checkpoint.hub import resolve_config
    from dsjax.config import load_config

    return default_page(load_config(resolve_config(given["--model"], revision=given.get("--revision"))))


TRANSLATIONS: dict[str, Translation] = {
    **{axis: _set_axis(axis) for axis in ("dp", "ep", "pp", "tp")},
    "pages": lambda text, given: str(int(text) * _page_size(given)),
    "GiB": lambda text, given: str(round(float(text) * 2**30)),
    "host": lambda text, given: join_address(text, _coordinator(given)[1]),
    "port": lambda text, given: join_address(_coordinator(given)[0], int(text)),
}


def accepted(name: str, known: Container[str]) -> Row | None:
    """Return the row of an option that the command accepts as an alias, else None. known: the command's own options."""
    row = None if name in known else rows().get(name)
    return row if row and row.verdict == "accepted" and row.ours in known else None


def translate(row: Row, text: str, given: dict[str, str]) -> str:
    """Return dsjax's value for another engine's value, and add it to `given`.

    Raises:
        UserError: the value has no counterpart.
    """
    try:
        if not text:
            raise ValueError
        if "=" in row.value:
            given[row.ours] = dict(pair.split("=") for pair in row.value.split())[text.lower()]
        else:
            given[row.ours] = TRANSLATIONS[row.value](text, given) if row.value else text
    except UserError:  # the model whose page size is needed cannot be read
        raise
    except (KeyError, ValueError, OverflowError):
        note = f": {row.note}" if row.note else ""
        raise UserError(
            f"{row.option} {text or 'without a value'} has no counterpart in dsjax; give {row.here}{note}"
        ) from None
    return given[row.ours]


def advice(words: Sequence[str], known: Iterable[str]) -> list[str]:
    """Return a line of advice for each option of another engine or an earlier dsjax version whose counterpart the command has.

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
    """Return a warning for each of other engines' environment variables that is set while the command's option for it is not given.

    words: as typed. known: the command's own options.
    """
    typed, known = {word.partition("=")[0] for word in words}, set(known)
    return [
        f"{row.option} is set, but dsjax does not read it; give {row.ours}, or unset it"
        for row in rows().values()
        if row.verdict == "variable"
        and environment.get(row.option, "").strip().lower() not in ("", "0", "false")
        and row.ours in known
        and not typed & {row.ours, row.ours.replace("--", "--no-", 1)}
    ]
