"""Whoever types an option of vLLM's or SGLang's is told what it is called here."""

from pathlib import Path

import typer
from typer.testing import CliRunner

from dsjax.cli.main import app
from dsjax.cli.other_engines import HERE, NEEDLESS, advice

RUNNER = CliRunner()
DOCS = Path(__file__).parents[3] / "docs"


def _options(command: str) -> set[str]:
    made = typer.main.get_command(app).get_command(None, command)
    return {name for one in made.params for name in (*one.opts, *one.secondary_opts)}


def test_every_counterpart_is_an_option_of_serve_and_no_option_of_serve_is_taken_for_anothers() -> None:
    known = _options("serve")
    for names, here in HERE.items():
        assert here.split()[0].rstrip(":") in known, here
        assert not known & set(names.split())
    assert not known & {name for names in NEEDLESS for name in names.split()}


def test_the_table_in_the_docs_has_every_option() -> None:
    page = (DOCS / "serving.md").read_text(encoding="utf-8")
    for name in (name for names in (*HERE, *NEEDLESS) for name in names.split()):
        assert f"`{name}`" in page, name


def test_all_of_them_on_a_command_line_are_explained_at_once() -> None:
    words = ["serve", "--model-path", "x", "-tp", "8", "--context-length=4096", "--trust-remote-code"]
    found = RUNNER.invoke(app, words)
    assert found.exit_code == 2
    for line in (
        "--model-path is --model",
        "-tp is --mesh tp=N",
        "--context-length is --max-model-len",
        "--trust-remote-code is not needed",
    ):
        assert line in found.output


def test_a_model_without_its_option_is_explained() -> None:
    found = RUNNER.invoke(app, ["serve", "deepseek-ai/DeepSeek-R1"])
    assert found.exit_code == 2
    assert "a model is given as --model MODEL" in found.output


def test_a_command_says_nothing_of_what_it_has_no_counterpart_for() -> None:
    assert advice(["--tp", "8"], known={"--model"}) == []
    assert advice(["--model", "demo", "--mesh", "tp=8"], known={"--model", "--mesh"}) == []
    found = RUNNER.invoke(app, ["serve", "--mehs", "dp=2"])
    assert found.exit_code == 2
    assert "--mesh" in found.output  # the nearest of ours
