"""`dsjax/options.py`: options are checked against their types, choices and bounds where a dataclass of them is made."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from dsjax.options import Checked, OptionError, check_place, option


@dataclass(frozen=True)
class Oven(Checked):
    """Options of every kind."""

    on: bool = option(False, "")
    trays: int = option(1, "", least=1, most=20_000)
    heat: float | None = option(None, "", above=0)
    mode: str = option("bake", "", choices=("bake", "grill"), classes=True)
    name: str = option("a", "", flag="--called")
    maker: type | None = option(None, "", classes=True)
    recipe: Path | None = option(None, "")
    extra: str | dict | None = option(None, "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on": 1}, "--on is 1, expected True or False"),
        ({"trays": True}, "--trays is True, expected an integer of at least 1 and of at most 20,000"),
        ({"trays": 0}, "--trays is 0, expected an integer of at least 1"),
        ({"trays": 20_001}, "--trays is 20001, expected"),
        ({"trays": 2.0}, "--trays is 2.0, expected an integer"),
        ({"trays": None}, "--trays is None, expected an integer"),
        ({"heat": 0}, "--heat is 0, expected a number above 0"),
        ({"heat": float("nan")}, "--heat is nan, expected a number above 0"),
        ({"heat": "hot"}, "--heat is 'hot', expected a number"),
        ({"mode": "fry"}, "--mode is 'fry', expected one of bake, grill"),
        ({"name": b"a"}, "--called is b'a', expected text"),
        ({"maker": "me"}, "--maker is 'me', expected a class"),
    ],
)
def test_a_value_of_another_type_or_beyond_its_bounds_is_named_with_what_was_expected(options, message):
    with pytest.raises(OptionError) as refused:
        Oven(**options)
    assert str(refused.value).startswith(message)


def test_whole_numbers_are_numbers_a_class_may_stand_for_a_choice_and_json_is_read_elsewhere():
    Oven(on=True, trays=20_000, heat=180, mode=Oven, maker=Oven, recipe="a.md", extra={"a": 1})


def test_a_file_is_refused_where_it_may_not_be_written_though_its_folder_may(tmp_path, monkeypatch):
    there = tmp_path / "there.json"
    there.touch()
    check_place("--json", str(there))
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != there)  # tests may run as root
    with pytest.raises(OptionError, match=r"--json is .*there.json', where no file can be written"):
        check_place("--json", str(there))
    check_place("--json", str(tmp_path / "new.json"))
