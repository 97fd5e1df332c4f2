"""`python -m MODULE ARGUMENTS` without a Python of its own, which takes one to three seconds of processor time to start."""

import io
import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple
from unittest import mock


class Ended(NamedTuple):
    """What of `subprocess.CompletedProcess` the tests ask for."""

    returncode: int
    stdout: str
    stderr: str


def run(module: str, *arguments: str) -> Ended:
    """Run a module as `python -m` does, but in this process, with all that is imported and set here."""
    stdout, stderr, code = io.StringIO(), io.StringIO(), 0
    with mock.patch.object(sys, "argv", [module, *arguments]), redirect_stdout(stdout), redirect_stderr(stderr):
        try:
            runpy.run_module(module, run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
    return Ended(code, stdout.getvalue(), stderr.getvalue())
