"""`python -m dsjax.<command>` is `dsjax <command>`, and what the command line imports."""

import json
import subprocess
import sys

import pytest

from dsjax.cli.main import COMMANDS

_RUN = """
import contextlib, io, json, runpy, sys

def run(module, *arguments):
    sys.argv = [module, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        try:
            runpy.run_module(module, run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code or 0
    return code, shown.getvalue()

def heavy():
    return sorted({"jax", "flax", "scipy.optimize"} & {*sys.modules})

found = [(run(*row), heavy()) for row in json.loads(sys.argv[1])]
import dsjax.bench.serve.benchmark, dsjax.llm, dsjax.serve.front_ends.front_end
print(json.dumps([*found, ((0, "imports"), heavy())]))
"""
"""Run modules with arguments in one process, then import a benchmark's client, `LLM` and a front end. Print of each the exit code, the
output and the heavy packages imported so far."""


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[int, str, list[str]]]:
    """Every command's help, then commands that need no JAX, all in one process: (exit code, output, heavy packages by then)."""
    rows = [(f"dsjax.{command}", "--help") for command in COMMANDS]
    rows += [
        ("dsjax", "--help"),
        ("dsjax", "info", "--model", "deepseek-v3", "--mesh", "dp=8,tp=2"),
        ("dsjax", "plan", "fit", "--model", "demo", "--cluster", "h200-8", "--mesh", "dp=8"),
    ]
    made = subprocess.run([sys.executable, "-c", _RUN, json.dumps(rows)], capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr
    named = [*map(" ".join, rows), "a benchmark's client, LLM and a front end"]
    return {name: (*run, heavy) for name, (run, heavy) in zip(named, json.loads(made.stdout), strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_can_be_run_as_a_module(found, command):
    code, shown, _ = found[f"dsjax.{command} --help"]
    assert code == 0
    assert f"Usage: dsjax {command} " in shown


def test_help_info_plan_and_clients_import_neither_jax_nor_flax(found):
    for command, (code, shown, heavy) in found.items():
        assert code == 0, command
        assert shown, command
        assert heavy == [], command
