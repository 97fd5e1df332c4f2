"""`JsonOption`: an option that is a JSON object, such as `--speculative-config`: parsing, validation and error messages."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from dsjax.errors import UserError

Option = TypeVar("Option", bound="JsonOption")


class JsonOption:
    """Base class of the frozen dataclasses of such options. Each checks its values when it is created.

    flag: the command-line option. example: a valid value. required: fields that must be given.
    """

    flag: ClassVar[str]
    example: ClassVar[str]
    required: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def parse(cls: type[Option], given: str | Mapping[str, Any]) -> Option:
        """Parse JSON text from the command line, or a dictionary of fields, as `LLM` takes it.

        Raises:
            UserError: not a JSON object, an unknown field, a missing `required` field, or an invalid value.
        """
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{cls.flag} is not JSON ({error}); expected an object such as {cls.example}"
                ) from error
        if not isinstance(given, Mapping):
            raise UserError(f"{cls.flag} is {given!r}; expected an object such as {cls.example}")
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(map(str, given.keys() - set(known)))
        if unknown:
            raise UserError(f"{cls.flag} has the unknown field {', '.join(unknown)}; the fields are {', '.join(known)}")
        for name in cls.required:
            if name not in given:
                raise UserError(f"{cls.flag} has no {name}; expected an object such as {cls.example}")
        return cls(**given)

    def check(self, is_right: bool, name: str, expected: str) -> None:
        """Raise a `UserError` with the field's name, its value and the expected one, unless `is_right`."""
        if not is_right:
            value = json.dumps(getattr(self, name), default=repr)
            raise UserError(f"{self.flag} has {name} {value}; expected {expected}")

    def check_integers(self, *names: str, least: int) -> None:
        """`check` that fields are integers of at least `least`."""
        for name in names:
            value = getattr(self, name)
            self.check(is_integer(value) and value >= least, name, f"an integer of at least {least}")

    def check_flags(self, *names: str) -> None:
        """`check` that fields are true or false."""
        for name in names:
            self.check(isinstance(getattr(self, name), bool), name, "true or false")


def is_integer(value: Any) -> bool:
    """Return whether a value is an integer. JSON's true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)
