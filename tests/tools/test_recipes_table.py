"""The published recipes: every option of them is written, or there is a reason; and the page says what is written today."""

import dataclasses
import shlex

from typer.testing import CliRunner

from dsjax.cli.main import app
from dsjax.engine.experts.eplb import EplbConfig
from tools.recipes_table import PAGE, command, page, planned, problems, read_command, recipes, rows


def test_every_option_that_differs_has_a_reason_and_no_reason_is_left_over():
    assert problems() == []


def test_the_page_says_what_is_written_today():
    """The page has every layout, option, value and place, so it is the test of each of them."""
    assert PAGE.read_text(encoding="utf-8") == page(), "python tools/recipes_table.py"


def test_the_command_on_the_page_writes_the_script_whose_values_are_compared(tmp_path):
    for name in ("tensorrt-llm-gb200-36", "vllm-h20-32"):
        recipe, path = recipes()[name], tmp_path / f"{name}.sh"
        line = command(recipe)
        assert f"```\n{line}\n```" in PAGE.read_text(encoding="utf-8")
        result = CliRunner().invoke(app, ["plan", "recipe", str(path), *shlex.split(line)[2:]])
        assert result.exit_code == 0, result.output
        script = path.read_text(encoding="utf-8")
        started = [one.removeprefix("exec ") for one in script.splitlines() if one.startswith("exec ")]
        for values in planned(recipe["engine"], line).values():
            found = [read_command(recipe["engine"], one) for one in started]
            shown = {key: value for key, value in values.items() if key.startswith("--")}
            assert any(shown.items() >= {k: v for k, v in one.items() if k.startswith("--")}.items() for one in found)


def test_no_reason_denies_an_option_that_the_engine_has():
    fields = {field.name for field in dataclasses.fields(EplbConfig)}
    reasons = [reason for recipe in recipes().values() for reason in recipe["why_dsjax"].values()]
    denied = [reason.partition(" is no option")[0].split() for reason in reasons if " is no option" in reason]
    assert not fields & {word for words in denied for word in words}


def test_a_value_that_drifts_apart_and_a_reason_in_vain_are_found():
    row = next(row for row in rows(recipes()["vllm-dep16"]) if row.option == "--max-num-seqs" and row.side == "decode")
    assert not list(row.problems)
    assert list(dataclasses.replace(row, ours="256", why="").problems) == [
        "decode --max-num-seqs is '512', and dsjax plan has '256' and no reason"
    ]
    assert "a reason and the same value" in next(dataclasses.replace(row, ours="512").problems)
