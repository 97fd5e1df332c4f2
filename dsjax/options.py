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
        metadata: `choices`; `flag`, if it is not the field's name; `alias`, another flag;
            `switch`: a bool without a `--no-` form; `envvar`; `metavar`, such as `JSON`; `classes`: Python callers may pass a class
            instead of a choice (without `choices` the option has no flag); `least`, `above`, `most`: bounds of numbers, checked on
            construction; `min`: the smallest number that the command line accepts, shown in `--help`; `show_default`: the default that
            `--help` shows, if it is not the field's; `of_host`: an engine option that changes which commands an executor gets but not
            how it runs them, or that belongs to another engine (true of all of `Group.HOSTS`).
    """
    return dataclasses.field(default=default, metadata={"help": help, "group": group, **metadata})


advanced = functools.partial(option, advanced=True)
"""An `option` that only `--help-all` shows."""


_KINDS = {bool: "True or False", int: "an integer", float: "a number", str: "text", type: "a class"}
"""Types of option values that `Checked` checks, in words."""
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
    facts = field.metadata
    kinds = set(get_args(hint)) if isinstance(hint, UnionType) else {hint}
    is_class = facts.get("classes") and isinstance(value, type)  # its base class is checked where it is used
    if is_class or (value is None and NoneType in kinds):
        return
    [kind, *others] = kinds - {NoneType}
    if others or kind not in _KINDS:
        return
    if "choices" in facts:
        is_right, expected = value in facts["choices"], f"one of {', '.join(facts['choices'])}"
    else:
        bounds = [(holds, facts[name], word) for name, holds, word in _BOUNDS if name in facts]
        expected = " ".join([_KINDS[kind], " and ".join(f"{word} {bound:,}" for _, bound, word in bounds)]).rstrip()
        types = (int, float) if kind is float else kind
        is_right = isinstance(value, types) and isinstance(value, bool) is (kind is bool)
        is_right = is_right and all(holds(value, bound) for holds, bound, _ in bounds)
    if not is_right:
        raise OptionError(f"{flag_of(field)} is {value!r}, expected {expected}")


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
    if (
        not path
        or os.path.isdir(path)
        or not os.path.isdir(folder)
        or not os.access(path if os.path.exists(path) else folder, os.W_OK)
    ):
        raise OptionError(f"{flag} is {path!r}, where no file can be written; choose another")


def check_url(flag: str, url: str, example: str = "http://HOST:PORT") -> None:
    """Check that a URL is a valid server address, without connecting to the server.

    Raises:
        OptionError: not an http URL, no host, or an invalid host or port.
    """
    why = _why_no_url(url)
    if why:
        raise OptionError(f"{flag} is {url!r}: {why}; expected an address such as {example}")


def _why_no_url(url: str) -> str | None:
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
