"""`JsonOption`: an option that is a JSON object, such as `--speculative-config`: how it is read, and what is said of wrong ones."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from dsjax.errors import UserError

Option = TypeVar("Option", bound="JsonOption")


class JsonOption:
    """What the frozen dataclasses of such options have alike. Each checks its values when it is made.

    flag: the option on the command line. example: a value that it can have there. required: fields that must be given.
    """

    flag: ClassVar[str]
    example: ClassVar[str]
    required: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def parse(cls: type[Option], given: str | Mapping[str, Any]) -> Option:
        """Make the option from the JSON text of the command line, or from a dictionary with its fields, as `LLM` takes it.

        Raises:
            UserError: no JSON object, an unknown field, one missing that is `required`, or a value that cannot be.
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
        """Raise a `UserError` with a field's name, its value and what was expected, unless the value is right."""
        if not is_right:
            value = json.dumps(getattr(self, name), default=repr)
            raise UserError(f"{self.flag} has {name} {value}; expected {expected}")

    def check_integers(self, *names: str, least: int) -> None:
        """`check` that fields are integers of at least this."""
        for name in names:
            value = getattr(self, name)
            self.check(is_integer(value) and value >= least, name, f"an integer of at least {least}")

    def check_flags(self, *names: str) -> None:
        """`check` that fields are true or false."""
        for name in names:
            self.check(isinstance(getattr(self, name), bool), name, "true or false")


def is_integer(value: Any) -> bool:
    """Say whether a value is an integer; JSON's true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)
