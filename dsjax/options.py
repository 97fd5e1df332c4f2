"""Options as dataclasses: fields that say what they are, which a command line shows and which are checked when one is made."""

import dataclasses
import functools
import ipaddress
import os
import re
import urllib.parse
from enum import StrEnum
from typing import Any

from dsjax.errors import UserError


class OptionError(UserError):
    """An option that cannot be, or not beside another."""


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
        default: its value when it is not given.
        help: a line for `--help`.
        group: its heading in `--help`; None: its dataclass's.
        metadata: `choices`; `flag`, where it is not the field's name; `alias`, another flag;
            `switch`: a bool that has no `--no-` form; `envvar`; `metavar`, such as `JSON`; `classes`: Python callers may give a class in
            place of a choice (without `choices` the option has no flag); `least`, `above`, `most`: bounds of numbers, checked when the
            dataclass is made; `min`: the least number that the command line takes, which `--help` shows; `show_default`: the default that
            `--help` shows, if it is not the field's; `of_host`: an engine's option that changes which commands an executor gets and not
            what it makes of them, or that belongs to another engine; all of `Group.HOSTS` are such.
    """
    return dataclasses.field(default=default, metadata={"help": help, "group": group, **metadata})


advanced = functools.partial(option, advanced=True)
"""An `option` that only `--help-all` shows."""


class Checked:
    """Checks a dataclass's fields against the choices and bounds that they declare."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, facts = getattr(self, field.name), field.metadata
            if value is None:
                continue
            if "choices" in facts and value not in facts["choices"]:
                raise OptionError(f"{flag_of(field)} is {value!r}, expected one of {', '.join(facts['choices'])}")
            if "least" in facts and not value >= facts["least"]:
                raise OptionError(f"{flag_of(field)} is {value}, expected at least {facts['least']}")
            if "above" in facts and not value > facts["above"]:
                raise OptionError(f"{flag_of(field)} is {value}, expected more than {facts['above']}")
            if "most" in facts and value > facts["most"]:
                raise OptionError(f"{flag_of(field)} is {value}, expected at most {facts['most']:,}")


def flag_of(field: dataclasses.Field) -> str:
    """`--name-of-the-field`."""
    return field.metadata.get("flag") or f"--{field.name.replace('_', '-')}"


def check_place(flag: str, path: str | None) -> None:
    """Make sure, before the work whose results it is to have, that a file can be written; None and `-` are none.

    Raises:
        OptionError: it has no name, its folder is not there, or it may not be written.
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
    """Make sure that a URL can be the address of a server, which may not be there.

    Raises:
        OptionError: it is no http URL, it has no host, or its host or port cannot be.
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
