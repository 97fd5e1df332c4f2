"""What a command is given: by our options, by other engines' names for them, and by a file of options (`--config`)."""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from dsjax.cli.other_engines import accepted, rows, translate
from dsjax.errors import UserError, why_unreadable


def our_words(words: Sequence[str], options: Mapping[str, Any], context: Any) -> list[str]:
    """Put our names in place of other engines'; what a `--config` has becomes the context's defaults.

    Args:
        words: as typed. options: of the command, by their names.

    Raises:
        UserError: a value that has no counterpart here, or a file that cannot be used.
    """
    end = words.index("--") if "--" in words else len(words)
    own, typed, theirs = [], {}, []
    rest = iter(words[:end])
    for word in rest:
        name, sign, text = word.partition("=")
        row = accepted(name, options)
        option = options.get(row.ours if row else name)
        takes_value = option is not None and option.param_type_name == "option" and not option.is_flag
        behind = list(itertools.islice(rest, 1)) if takes_value and not sign else []
        text = behind[0] if behind else text
        if row is not None and (takes_value or not sign):
            theirs.append((row, text))
            continue
        own += [word, *behind]
        if takes_value and text:
            typed[name] = text
    given = {name: str(one.default) for name, one in options.items() if one.default is not None}
    if "--config" in typed:
        context.default_map = read_config(typed["--config"], options, given, context)
    given |= typed
    ours = {}
    for row, text in sorted(theirs, key=lambda one: list(rows()).index(one[0].option)):
        ours[row.ours] = [] if options[row.ours].is_flag else [translate(row, text, given)]
    return [*own, *(word for name, value in ours.items() for word in (name, *value)), *words[end:]]


def read_config(path: str, options: Mapping[str, Any], given: dict[str, str], context: Any) -> dict[str, Any]:
    """Read a YAML file of options by their names, ours or other engines', with dashes or underscores.

    Args:
        path: of the file. options: of the command, by their names. given: gets the values, by our names. context: of the command.

    Returns:
        Values by the names of the command's parameters.

    Raises:
        UserError: it cannot be read, or a key or the type of a value is wrong.
    """
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path} cannot be read: {why_unreadable(error)}") from error
    except yaml.YAMLError as error:
        raise UserError(f"--config {path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UserError(f"--config {path} has a {type(content).__name__}; expected lines such as max-num-seqs: 64")
    values = {"--" + str(key).replace("_", "-"): (key, value) for key, value in content.items()}
    order, found = list(rows()), {}
    for name in sorted(values, key=lambda name: order.index(name) if name in order else -1):
        key, value = values[name]
        row = accepted(name, options)
        own = row.ours if row else name
        option = options.get(own)
        if option is None or own in ("--config", "--help", "--help-all"):
            raise UserError(f"--config {path}: {key} is no option of this command; --help-all lists them")
        try:
            if row and not option.is_flag:
                value = translate(row, _text(value), given)
            found[option.name] = value = _value(option, value, own in option.secondary_opts)
            option.process_value(context, value)
        except (ValueError, typer.BadParameter) as error:
            raise UserError(f"--config {path}: {key}: {getattr(error, 'message', error)}") from error
        given[own] = str(value)
    return found


def _value(option: Any, value: Any, negated: bool) -> Any:
    """A key's value as the command line would have it. negated: the key is an option's `--no-` form."""
    if option.is_flag:
        if not isinstance(value, bool):
            raise ValueError(f"found {value!r}, expected true or false")
        return value is not negated
    if option.metavar == "JSON" and isinstance(value, dict | list):
        return json.dumps(value)
    if option.multiple:
        return [_text(one) for one in (value if isinstance(value, list) else [value])]
    return _text(value)


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool | list | dict):
        raise ValueError(f"found {json.dumps(value)}, expected a text or a number")
    return str(value)
