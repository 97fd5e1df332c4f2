"""Checks of single configuration values. Each message has the field, the value found and the accepted values."""

import sys
from collections.abc import Collection, Mapping
from typing import Any

from dsjax.errors import ConfigError


def reject(name: str, value: Any, accepted: str) -> ConfigError:
    """Return the error for field `name`, for the caller to raise. `accepted` completes "accepted is …"."""
    return ConfigError(f"config field `{name}`: found {value!r}, accepted is {accepted}")


def required(raw: Mapping[str, Any], name: str, within: str = "") -> Any:
    """Return `raw[name]`; raise `ConfigError` if the key is missing (a null value is not missing).

    within: the name of the object `raw`, with a trailing dot, for the message.
    """
    if name not in raw:
        raise ConfigError(f"config field `{within}{name}`: not found in config.json, it must be given")
    return raw[name]


def check_integer(name: str, value: Any, least: int) -> int:
    """Return `value` if it is an integer (no bool, no float) of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise reject(name, value, f"an integer of at least {least}")
    return value


def check_number(name: str, value: Any, least: float, above: bool = False) -> float:
    """Return `value` as float if it is a finite number of at least `least` (`above`: greater than `least`)."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Reject integers too large for a float, like infinity.
    if not is_number or not least <= value <= sys.float_info.max or (above and value == least):
        raise reject(name, value, f"a finite number {'above' if above else 'of at least'} {least:g}")
    return float(value)


def check_boolean(name: str, value: Any) -> bool:
    """Return `value` if it is a bool."""
    if not isinstance(value, bool):
        raise reject(name, value, "true or false")
    return value


def check_choice(name: str, value: Any, choices: Collection[str], why: str = "") -> str:
    """Return `value` if it is one of `choices`; `why` is added to the message."""
    if not isinstance(value, str) or value not in choices:
        raise reject(name, value, " or ".join(f'"{choice}"' for choice in choices) + why)
    return value


def check_mapping(name: str, value: Any) -> Mapping[str, Any]:
    """Return `value` if it is a JSON object."""
    if not isinstance(value, Mapping):
        raise reject(name, value, "a JSON object")
    return value
