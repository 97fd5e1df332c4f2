"""Options given to a command: under dsjax's names, under other engines' names, or in a file (`--config`)."""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from dsjax.cli.other_engines import Row, accepted, advice, translate
from dsjax.errors import UserError, why_unreadable

_COMPOSED, _SIZED = ("dp", "ep", "pp", "tp", "host", "port"), ("pages",)
"""Translations that set part of a value, and those that need the page size. They run after all others, in this order."""


@dataclass(eq=False)
class _Given:
    """An option given in a file or on the command line.

    Attributes:
        row: the row of another engine's name; None for dsjax's names. ours: dsjax's name. value: as given, later translated.
        key: its key in the file. words: its words on the command line.
    """

    row: Row | None
    ours: str
    value: Any
    key: str = ""
    words: list[str] = field(default_factory=list)

    @property
    def turn(self) -> int:
        """Order of translation: later translations read the results of earlier ones."""
        kind = self.row.value if self.row else ""
        return 1 if kind in _COMPOSED else 2 if kind in _SIZED else 0


def our_words(words: Sequence[str], options: Mapping[str, Any], context: Any) -> list[str]:
    """Replace other engines' option names with dsjax's, and set the context's defaults from `--config`.

    The last value given for an option wins; options that set part of a value, such as `--tp`, are combined.

    Args:
        words: as typed. options: the command's options, by name.

    Raises:
        UserError: a value has no counterpart in dsjax, or the file cannot be used.
    """
    end = words.index("--") if "--" in words else len(words)
    typed = []
    rest = iter(words[:end])
    for word in rest:
        name, sign, text = word.partition("=")
        row = accepted(name, options)
        option = options.get(row.ours if row else name)
        takes_value = option is not None and option.param_type_name == "option" and not option.is_flag
        behind = list(itertools.islice(rest, 1)) if takes_value and not sign else []
        if row is not None and not takes_value and not sign:
            typed.append(_Given(None, row.ours, "", words=[row.ours]))
        elif takes_value:
            typed.append(_Given(row, row.ours if row else name, (behind or [text])[0], words=[word, *behind]))
        else:
            typed.append(_Given(None, word, "", words=[word]))
    path = next((one.value for one in reversed(typed) if one.ours == "--config" and one.value), None)
    file = [] if path is None else _read(path, options)
    given = {name: str(one.default) for name, one in options.items() if one.default is not None}
    for one in sorted([*file, *typed], key=lambda one: one.turn):  # the file's options first, in the given order
        _translate(one, options[one.ours] if one.key else None, given, path)
    if file:
        context.default_map = {}
        for one in file:
            _enter(one, options[one.ours], context, path)
    last = {one.ours: one.words for one in typed if one.turn == 1}
    return [*itertools.chain(*(one.words for one in typed if one.turn != 1), *last.values()), *words[end:]]


def _translate(one: _Given, option: Any, given: dict[str, str], path: str | None) -> None:
    """Translate another engine's value and record it. option: the option of a key in the file at `path`."""
    if one.row is not None and not (one.key and option.is_flag):
        try:
            one.value = translate(one.row, _text(one.value) if one.key else one.value, given)
        except ValueError as error:
            if not one.key:
                raise
            raise UserError(f"--config {path}: {one.key}: {error}") from error
        one.words = [one.ours, one.value]
    elif isinstance(one.value, str | int | float) and one.value != "":
        given[one.ours] = str(one.value)


def _enter(one: _Given, option: Any, context: Any, path: str | None) -> None:
    """Set a default of the command from a key of the file."""
    try:
        value = _value(option, one.value, one.ours in option.secondary_opts)
        option.process_value(context, value)
    except (ValueError, typer.BadParameter) as error:
        raise UserError(f"--config {path}: {one.key}: {getattr(error, 'message', error)}") from error
    context.default_map[option.name] = value


def _read(path: str, options: Mapping[str, Any]) -> list[_Given]:
    """Read a YAML file of options under dsjax's or other engines' names, with dashes or underscores.

    Raises:
        UserError: the file cannot be read, has a key that is not an option, or sets one option twice.
    """
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        content, texts = yaml.safe_load(text), yaml.load(text, yaml.BaseLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path} cannot be read: {why_unreadable(error)}") from error
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"--config {path} is no YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return []
    if not isinstance(content, dict):
        raise UserError(f"--config {path} has a {type(content).__name__}; expected lines such as max-num-seqs: 64")
    found: dict[str, _Given] = {}
    for key, value in content.items():
        name = "--" + str(key).replace("_", "-")
        row = accepted(name, options)
        ours = row.ours if row else name
        option = options.get(ours)
        if option is None or ours in ("--config", "--help", "--help-all"):
            why = "; ".join(advice([name], options)) or "--help-all lists them"
            raise UserError(f"--config {path}: {key} is no option of this command; {why}")
        one = _Given(row, ours, _as_written(value, texts.get(str(key), value)), key=str(key))
        other = found.setdefault(option.name if one.turn != 1 else name, one)
        if other is not one:
            raise UserError(f"--config {path}: {other.key} and {key} are one option; leave one of them out")
    return list(found.values())


def _as_written(value: Any, text: Any) -> Any:
    """Return a key's value, with numbers and dates as written: 010 and 1.10 may be names. text: the value parsed as untyped text."""
    if isinstance(value, list):
        return [_as_written(*pair) for pair in zip(value, text, strict=True)]
    return value if value is None or isinstance(value, bool | dict) else text


def _value(option: Any, value: Any, negated: bool) -> Any:
    """Return a key's value in the form the command line would give. negated: the key is an option's `--no-` form."""
    if option.is_flag:
        if not isinstance(value, bool):
            raise ValueError(f"found {value}, expected true or false")
        return value is not negated
    if option.metavar == "JSON" and isinstance(value, dict | list):
        return json.dumps(value, default=str)
    if option.multiple:
        return [_text(one) for one in (value if isinstance(value, list) else [value])]
    return _text(value)


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool | list | dict):
        raise ValueError(f"found {json.dumps(value, default=str)}, expected a text or a number")
    return str(value)
