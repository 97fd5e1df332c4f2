"""`dsjax plan` on the command line, its recipe and its pages."""

import dataclasses
import json
import shlex

import pytest
from typer.testing import CliRunner

from dsjax.cli import app
from dsjax.engine.args import EngineArgs
from dsjax.plan.recipe import recipe
from dsjax.plan.search import search
from dsjax.plan.workload import Objective, Options

BASE = ["plan", "--cluster", "h200-8", "--input", "1000", "--output", "200", "--mode", "aggregated"]


def run(*options):
    found = CliRunner().invoke(app, [*BASE, *options], catch_exceptions=False)
    assert found.exit_code == 0
    return found.output


def test_the_table_names_winner_command_and_bottleneck():
    output = run("--tpot-ms", "50", "--rows", "3")
    assert "meet the objectives, best first" in output
    assert "dsjax serve --model deepseek-v3 --mesh" in output
    assert "twice as much of one thing would give" in output


def test_explain_shows_sources_intervals_and_kinds():
    output = run("--explain", "tpot")
    assert "DeepGEMM README" in output
    assert "(exact" in output
    assert " … " in output
    assert "GB  experts  (exact)" in run("--explain", "memory")


def test_json_and_recipe_agree(tmp_path):
    path = tmp_path / "recipe.json"
    found = json.loads(run("--json", "-", "--recipe", str(path)))
    assert json.loads(path.read_text()) == found["winner"]


def test_the_front_is_one_page_that_loads_nothing(tmp_path):
    path = tmp_path / "front.html"
    run("--pareto", str(path))
    page = path.read_text()
    assert "<svg" in page
    assert page.count("<circle") == page.count("<title>") - 1 > 3
    assert "http" not in page
    assert "<script" not in page


def test_the_front_says_that_it_keeps_the_ttft(tmp_path):
    path = tmp_path / "front.html"
    run("--pareto", str(path), "--ttft-ms", "150", "--tpot-ms", "40")
    page = path.read_text()
    assert "The front keeps a TTFT of 0.15 s" in page
    assert page.count('fill="#fff"') >= 1
    assert "A hollow dot breaks the TTFT of 0.15 s" in page
    assert "stroke-dasharray" in page


def test_pictures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    run("--pareto", str(tmp_path / "front.png"), "--sweep", "loss-of-hosts", "--plots", str(tmp_path))
    for name in ("front.png", "loss-of-hosts.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "options", [Options(), Options(modes=("separated",)), Options(redundant=32), Options(dispatch="auto")]
)
def test_every_recipe_is_made_of_options_that_serve_has(ask, options):
    question = ask("h200-16", objective=Objective(tpot=0.05), options=options)
    made = recipe("demo", question, search(question).winner)
    fields = {field.name: field for field in dataclasses.fields(EngineArgs)}
    for service in made["services"]:
        words = shlex.split(service["command"])
        assert words[:2] == ["dsjax", "serve"]
        given = {}
        for flag, value in zip(words[2::2], words[3::2], strict=True):
            name = flag.removeprefix("--").replace("-", "_")
            numeric = fields[name].metadata["least"] is not None
            given[name] = int(value) if numeric else value
        EngineArgs(**given)
    assert [s["role"] for s in made["services"]][-1] in ("decode", "prefill and decode")
