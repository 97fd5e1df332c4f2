"""Options that are JSON objects: the command line's text and a dictionary mean the same, and what is wrong is named with what would fit."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from dsjax.engine.contract.json_option import JsonOption
from dsjax.errors import UserError


@dataclass(frozen=True)
class Sizes(JsonOption):
    flag: ClassVar[str] = "--sizes"
    example: ClassVar[str] = '{"size": 3, "name": "small"}'
    required: ClassVar[tuple[str, ...]] = ("name",)
    name: object
    size: object = 1
    strict: object = False

    def __post_init__(self):
        self.check(self.name != "huge", "name", "a smaller one")
        self.check_integers("size", least=1)
        self.check_flags("strict")


def test_text_and_a_dictionary_mean_the_same():
    assert Sizes.parse('{"name": "a", "size": 3}') == Sizes.parse({"size": 3, "name": "a"}) == Sizes("a", 3)
    assert Sizes.parse({"name": "a", "strict": True}) == Sizes("a", 1, True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{size: 3}", r"--sizes is not JSON \(.*\); expected an object such as \{"),
        ("[3]", r"--sizes is \[3\]; expected an object"),
        ({"size": 3, "width": 4, "depth": 5}, "unknown field depth, width; the fields are name, size, strict"),
        ({"size": 3}, "--sizes has no name; expected an object"),
        ({"name": "huge"}, '--sizes has name "huge"; expected a smaller one'),
        ({"name": "a", "size": 0}, "--sizes has size 0; expected an integer of at least 1"),
        ({"name": "a", "size": True}, "--sizes has size true; expected an integer"),
        ({"name": "a", "strict": 1}, "--sizes has strict 1; expected true or false"),
    ],
)
def test_what_is_wrong_is_named_with_what_would_fit(given, message):
    with pytest.raises(UserError, match=message):
        Sizes.parse(given)
