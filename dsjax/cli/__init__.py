"""The command line: the commands, the options that they share, and where they write what they found."""

from dsjax.cli.main import app, main

__all__ = ["app", "main"]
