"""The command line: `dsjax <command>`, or `python -m dsjax <command>`.

No module that is imported here brings JAX in: `--mesh dp=32` on a CPU must set the number of emulated devices first.
"""

import sys
from collections.abc import Sequence

import typer
from rich.console import Console
from rich.text import Text

from dsjax.errors import UserError
from dsjax.generate import generate
from dsjax.info import info
from dsjax.serve.command import serve

app = typer.Typer(
    name="dsjax",
    help="Serve, dry-run and plan DeepSeek-V3/R1-family models with JAX on any device mesh.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(serve)
app.command()(generate)
app.command()(info)


def main(prefix: Sequence[str] = ()) -> None:
    """Run the command in `sys.argv`; `prefix` goes before it (`python -m dsjax.serve` is `dsjax serve`).

    A user's mistake is printed in one line and ends with 2; anything else keeps its traceback.
    """
    try:
        app([*prefix, *sys.argv[1:]], prog_name="dsjax")
    except ValueError as error:
        if not _is_users_mistake(error):
            raise
        Console(stderr=True, soft_wrap=True).print(Text("error: ", "bold red") + Text(str(error), "default"))
        sys.exit(2)


def _is_users_mistake(error: ValueError) -> bool:
    from sharding.errors import MeshError

    return isinstance(error, UserError | MeshError)
