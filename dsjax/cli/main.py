"""The command line: `dsjax <command>`, or `python -m dsjax <command>`.

A command's module is imported when the command is used. No command's module imports JAX at import time, because
`--mesh dp=32` on a CPU must set the number of emulated devices first.
"""

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from dsjax.cli.help import PLAIN, Commands, PanelledCommand
from dsjax.errors import UserError
from dsjax.versions import installed_version

COMMANDS = {
    "serve": ("dsjax.serve.command", "serve"),
    "dynamo": ("dsjax.dynamo.command", "app"),
    "generate": ("dsjax.cli.generate", "generate"),
    "convert": ("dsjax.cli.convert", "convert"),
    "dryrun": ("dsjax.cli.dryrun", "dryrun"),
    "info": ("dsjax.cli.info", "info"),
    "plan": ("dsjax.cli.plan", "app"),
    "bench": ("dsjax.bench.command", "bench"),
    "accept": ("dsjax.bench.accept.command", "accept"),
    "top": ("dsjax.top.command", "top"),
    "kernels": ("dsjax.cli.kernels", "app"),
    "tune": ("dsjax.cli.tune", "tune"),
    "replay": ("dsjax.cli.replay", "replay"),
    "doctor": ("dsjax.cli.doctor", "doctor"),
}
"""Command → (module, name of a function or of a `typer.Typer` with subcommands), in the order of `--help`."""


class LazyCommands(Commands):
    """A group that imports a command's module on first use."""

    def list_commands(self, ctx: Any) -> list[str]:
        """List the names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and build a command; return None for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        module, function = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), function)
        if isinstance(command, typer.Typer):
            return typer.main.get_command(command)
        single = typer.Typer(**PLAIN)
        single.command(cmd_name, cls=PanelledCommand)(command)
        return typer.main.get_command(single)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a write to a full disk."""

app = typer.Typer(cls=LazyCommands, no_args_is_help=True, **PLAIN)


def _print_version(wanted: bool) -> None:
    if wanted:
        for package in ("dsjax", "jax", "jaxlib", "flax"):
            typer.echo(f"{package} {installed_version(package)}")
        raise typer.Exit


@app.callback()
def dsjax(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the versions of dsjax and JAX, and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Serve, dry-run and plan DeepSeek-V3/R1-family models with JAX on any device mesh."""


def main(prefix: Sequence[str] = ()) -> None:
    """Run the command in `sys.argv`; `prefix` goes before it (`python -m dsjax.serve` is `dsjax serve`).

    User errors and a full disk print one line and exit with status 2. A broken pipe exits silently with status 1. Other exceptions keep
    their traceback.
    """
    try:
        try:
            app([*prefix, *sys.argv[1:]], prog_name="dsjax")
        finally:
            sys.stdout.flush()  # here, where a failure can still be reported
    except ValueError as error:
        if not _is_users_mistake(error):
            raise
        _fail(str(error))
    except OSError as error:
        if error.errno not in (errno.EPIPE, *_FULL):
            raise
        _drop_output()
        if error.errno == errno.EPIPE:
            sys.exit(1)
        _fail(f"cannot write {error.filename or 'what was found'}: {error.strerror}; make room, or write it elsewhere")


def _fail(message: str) -> None:
    Console(stderr=True, soft_wrap=True).print(Text("error: ", "bold red") + Text(message, "default"))
    sys.exit(2)


def _drop_output() -> None:
    """Discard buffered standard output that cannot be written; Python would try to write it again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _is_users_mistake(error: ValueError) -> bool:
    from sharding.errors import MeshError

    return isinstance(error, UserError | MeshError)
