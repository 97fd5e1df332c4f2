"""Options that are JSON objects: the command line's text and a dictionary mean the same, and what is wrong is named with an example."""

from dataclasses import dataclass

import pytest

from dsjax.engine.contract.json_option import is_integer, parse_json_option, wrong_field
from dsjax.errors import UserError

EXAMPLE = '{"size": 3}'


@dataclass(frozen=True)
class Sizes:
    size: int = 1
    name: str = "small"


def parse(given, **options) -> Sizes:
    return parse_json_option(Sizes, given, "--sizes", EXAMPLE, **options)


def test_text_and_a_dictionary_mean_the_same():
    assert parse('{"size": 3}') == parse({"size": 3}) == Sizes(3)
    assert parse("{}") == Sizes()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{size: 3}", r"--sizes is not JSON \(.*\); expected an object such as \{"),
        ("[3]", r"--sizes is \[3\]; expected an object"),
        (None, "--sizes is None; expected an object"),
        ({"size": 3, "width": 4, "depth": 5}, "unknown field depth, width; the fields are size, name"),
        ({"size": 3}, "--sizes has no name; expected an object"),
    ],
)
def test_what_is_wrong_is_named_with_what_would_fit(given, message):
    with pytest.raises(UserError, match=message):
        parse(given, required=("name",))


def test_true_is_no_integer():
    assert [is_integer(value) for value in (3, -1, True, 3.0, "3")] == [True, True, False, False, False]


def test_a_wrong_value_is_shown_as_json_has_it_and_any_other_object_as_python_has():
    assert str(wrong_field("--sizes", "size", True, "a number")) == "--sizes has size true; expected a number"
    assert 'has size "1+2j"'.replace("1+2j", "(1+2j)") in str(wrong_field("--sizes", "size", 1 + 2j, "a number"))
