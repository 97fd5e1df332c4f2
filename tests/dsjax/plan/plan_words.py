"""`dsjax plan` in this process."""

import json

from typer.testing import CliRunner

from dsjax.cli import app
from dsjax.errors import UserError


def run(*words):
    """The end of a `dsjax plan` that must not fail."""
    ended = CliRunner().invoke(app, ["plan", *map(str, words)], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    return ended


def plan(*words) -> str:
    return run(*words).output


def plan_json(*words) -> dict:
    return json.loads(run(*words, "--json", "-").stdout)


def refusal_of(*words) -> str:
    """The one message with which `dsjax plan` ends."""
    error = CliRunner().invoke(app, ["plan", *map(str, words)]).exception
    assert isinstance(error, UserError)
    return str(error)
