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
    """An option given in a file or on the command line."""

    row: Row | None  # the row of another engine's name; None for dsjax's names
    ours: str  # dsjax's name
    value: Any  # as given, later translated
    key: str = ""  # its key in the file
    words: list[str] = field(default_factory=list)  # its words on the command line

    @property
    def is_composed(self) -> bool:
        """Whether the option sets a part of another option's value."""
        return self.row is not None and self.row.value in _COMPOSED

    @property
    def order(self) -> int:
        """Order of translation: later translations read the results of earlier ones."""
        if self.is_composed:
            return 1
        return 2 if self.row is not None and self.row.value in _SIZED else 0


def translate_words(words: Sequence[str], options: Mapping[str, Any], context: Any) -> list[str]:
    """Replace other engines' option names with dsjax's, and set the context's defaults from `--config`.

    The last value given for an option wins; options that set part of a value, such as `--tp`, are combined.

    Args:
        words: as typed. options: the command's options, by name.

    Raises:
        UserError: a value has no counterpart in dsjax, or the file cannot be used.
    """
    end = words.index("--") if "--" in words else len(words)
    typed = _parse(words[:end], options)
    path = next((given.value for given in reversed(typed) if given.ours == "--config" and given.value), None)
    from_file = [] if path is None else _read(path, options)
    values = {name: str(option.default) for name, option in options.items() if option.default is not None}
    for given in sorted(
        [*from_file, *typed], key=lambda given: given.order
    ):  # stable, so the file's options come first
        _translate(given, options[given.ours] if given.key else None, values, path)
    if from_file:
        context.default_map = {}
        for given in from_file:
            _set_default(given, options[given.ours], context, path)
    # The last occurrence of an option whose parts are set one by one has the combined value.
    composed = {given.ours: given.words for given in typed if given.is_composed}
    others = (given.words for given in typed if not given.is_composed)
    return [*itertools.chain(*others, *composed.values()), *words[end:]]


def _parse(words: Sequence[str], options: Mapping[str, Any]) -> list[_Given]:
    """Parse the words of a command line into options and other words, with other engines' names replaced."""
    parsed = []
    remaining = iter(words)
    for word in remaining:
        name, sign, text = word.partition("=")
        row = accepted(name, options)
        option = options.get(row.ours if row else name)
        takes_value = option is not None and option.param_type_name == "option" and not option.is_flag
        next_word = list(itertools.islice(remaining, 1)) if takes_value and not sign else []
        if row is not None and not takes_value and not sign:
            parsed.append(_Given(None, row.ours, "", words=[row.ours]))
        elif takes_value:
            parsed.append(_Given(row, row.ours if row else name, (next_word or [text])[0], words=[word, *next_word]))
        else:
            parsed.append(_Given(None, word, "", words=[word]))
    return parsed


def _translate(given: _Given, option: Any, values: dict[str, str], path: str | None) -> None:
    """Translate another engine's value, and record it in `values`. option: the option of a key in the file at `path`."""
    if given.row is not None and not (given.key and option.is_flag):
        try:
            given.value = translate(given.row, _text(given.value) if given.key else given.value, values)
        except ValueError as error:
            if not given.key:
                raise
            raise UserError(f"--config {path}: {given.key}: {error}") from error
        given.words = [given.ours, given.value]
    elif isinstance(given.value, str | int | float) and given.value != "":
        values[given.ours] = str(given.value)


def _set_default(given: _Given, option: Any, context: Any, path: str | None) -> None:
    """Set a default of the command from a key of the file."""
    try:
        value = _value(option, given.value, given.ours in option.secondary_opts)
        option.process_value(context, value)
    except (ValueError, typer.BadParameter) as error:
        raise UserError(f"--config {path}: {given.key}: {getattr(error, 'message', error)}") from error
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
        raise UserError(f"--config {path} is not valid YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return []
    if not isinstance(content, dict):
        raise UserError(f"--config {path} has a {type(content).__name__}; expected lines such as max-num-seqs: 64")
    by_option: dict[str, _Given] = {}
    for key, value in content.items():
        name = "--" + str(key).replace("_", "-")
        row = accepted(name, options)
        ours = row.ours if row else name
        option = options.get(ours)
        if option is None or ours in ("--config", "--help", "--help-all"):
            why = "; ".join(advice([name], options)) or "--help-all lists them"
            raise UserError(f"--config {path}: {key} is not an option of this command; {why}")
        given = _Given(row, ours, _as_written(value, texts.get(str(key), value)), key=str(key))
        other = by_option.setdefault(name if given.is_composed else option.name, given)
        if other is not given:
            raise UserError(f"--config {path}: {other.key} and {key} are the same option; remove one")
    return list(by_option.values())


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
        return [_text(item) for item in (value if isinstance(value, list) else [value])]
    return _text(value)


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool | list | dict):
        raise ValueError(f"found {json.dumps(value, default=str)}, expected a string or a number")
    return str(value)
