"""Options as dataclass fields with metadata, which the command line shows and `Checked` validates on construction."""

import dataclasses
import functools
import ipaddress
import operator
import os
import re
import urllib.parse
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, get_args, get_type_hints

from dsjax.errors import UserError


class OptionError(UserError):
    """An option with an invalid value, or in conflict with another option."""


class Group(StrEnum):
    """Headings of an engine's options in `--help`."""

    MODEL = "Model"
    QUANTIZATION = "Quantization"
    MESH = "Parallelism"
    HOSTS = "Several hosts"
    EXPERTS = "Experts"
    CACHE = "Memory and cache"
    SCHEDULING = "Scheduling"
    SPECULATION = "Speculative decoding"
    SIDES = "Prefill/decode disaggregation and AFD"
    KERNELS = "Kernels and numerics"


def option(default: Any, help: str, group: str | None = None, **metadata: Any) -> Any:
    """A field that is a command-line option.

    Args:
        default: value if the option is not given.
        help: a line for `--help`.
        group: heading in `--help`; None: the dataclass's.
        metadata: optional keys.
            Checks on construction: `choices`; `least`, `above`, `most`: bounds of a number; `classes`: Python callers may pass a class
                instead of a choice (without `choices` the option has no flag).
            Command line: `flag`, if it is not the field's name; `alias`: another flag; `switch`: a bool without a `--no-` form; `envvar`;
                `metavar`, such as `JSON`; `min`: the smallest number accepted; `show_default`, if it is not the field's default.
            Engine options: `host_only`: the option changes which commands an executor gets but not how it runs them, or it belongs to
                another engine (true of all of `Group.HOSTS`).
    """
    return dataclasses.field(default=default, metadata={"help": help, "group": group, **metadata})


advanced = functools.partial(option, advanced=True)
"""An `option` that only `--help-all` shows."""


_TYPE_NAMES = {bool: "True or False", int: "an integer", float: "a number", str: "text", type: "a class"}
"""Types of option values that `Checked` checks → their names in messages."""
_BOUNDS = (("least", operator.ge, "of at least"), ("above", operator.gt, "above"), ("most", operator.le, "of at most"))


class Checked:
    """Checks a dataclass's fields against their types and the choices and bounds that they declare.

    Paths, lists and values that may be JSON are checked where they are read.
    """

    def __post_init__(self):
        hints = _hints(type(self))
        for field in dataclasses.fields(self):
            _check(field, hints[field.name], getattr(self, field.name))


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _check(field: dataclasses.Field, hint: Any, value: Any) -> None:
    """Raise `OptionError` if the value is invalid for the field. hint: the field's annotation."""
    metadata = field.metadata
    types = set(get_args(hint)) if isinstance(hint, UnionType) else {hint}
    is_class = metadata.get("classes") and isinstance(value, type)  # its base class is checked where it is used
    if is_class or (value is None and NoneType in types):
        return
    [expected_type, *others] = types - {NoneType}
    if others or expected_type not in _TYPE_NAMES:
        return
    if "choices" in metadata:
        is_valid = value in metadata["choices"]
        expected = f"one of {', '.join(metadata['choices'])}"
    else:
        bounds = [(holds, metadata[name], words) for name, holds, words in _BOUNDS if name in metadata]
        is_valid = _has_type(value, expected_type) and all(holds(value, bound) for holds, bound, _ in bounds)
        expected = " and ".join(f"{words} {bound:,}" for _, bound, words in bounds)
        expected = f"{_TYPE_NAMES[expected_type]} {expected}".rstrip()
    if not is_valid:
        raise OptionError(f"{flag_of(field)} is {value!r}, expected {expected}")


def _has_type(value: Any, expected: type) -> bool:
    """Whether a value has a type; an integer is also a float, and a bool is not a number."""
    types = (int, float) if expected is float else expected
    return isinstance(value, types) and isinstance(value, bool) == (expected is bool)


def flag_of(field: dataclasses.Field) -> str:
    """Return the field's flag, by default `--name-of-the-field`."""
    return field.metadata.get("flag") or f"--{field.name.replace('_', '-')}"


def check_place(flag: str, path: str | None) -> None:
    """Check that a results file can be written, before the work starts. None and `-` need no file.

    Raises:
        OptionError: the name is empty, the folder does not exist, or the file is not writable.
    """
    if path is None or path == "-":
        return
    folder = os.path.dirname(path) or "."
    target = path if os.path.exists(path) else folder
    if not path or os.path.isdir(path) or not os.path.isdir(folder) or not os.access(target, os.W_OK):
        raise OptionError(f"{flag} is {path!r}, where no file can be written; choose another")


def check_url(flag: str, url: str, example: str = "http://HOST:PORT") -> None:
    """Check that a URL is a valid server address, without connecting to the server.

    Raises:
        OptionError: not an http URL, no host, or an invalid host or port.
    """
    problem = _url_problem(url)
    if problem is not None:
        raise OptionError(f"{flag} is {url!r}: {problem}; expected an address such as {example}")


def _url_problem(url: str) -> str | None:
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        return str(error)
    if parts.scheme not in ("http", "https"):
        return "it does not begin with http:// or https://"
    if not host:
        return "it has no host"
    if any(sign.isspace() for sign in url):
        return "it has a space"
    if port == 0:
        return "no server has port 0"
    if re.fullmatch(r"[0-9.]+", host):
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            return f"{host} is no IPv4 address"
    return None
