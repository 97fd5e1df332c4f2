"""``dsjax kernels``: list kernel implementations, and build native kernels ahead of time, e.g. for a container image."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dsjax.cli.help import PLAIN, Commands, PanelledCommand

app = typer.Typer(cls=Commands, no_args_is_help=True, **PLAIN)


@app.callback()
def kernels() -> None:
    """List the implementations of attention and experts, or build native kernels for machines without a compiler."""


@app.command("list", cls=PanelledCommand)
def show() -> None:
    """List the kernel implementations and the platforms on which each runs."""
    from dsjax.kernels.table import TABLE

    table = Table("operation", "--kernels", "platforms", "what it is")
    for row in TABLE:
        table.add_row(row.operation, row.name, ", ".join(row.platforms) if row.platforms else "all", row.what)
    Console().print(table)


@app.command("build", cls=PanelledCommand)
def build(
    output: Annotated[Path, typer.Option(help="Output directory, for --kernel-cache of dsjax serve.")],
    march: Annotated[
        str, typer.Option(help="Target CPU, as the compiler names it: native, x86-64-v3, x86-64-v4, znver4, …")
    ] = "native",
) -> None:
    """Build the native kernels with this machine's compiler, for this processor or another one of the same architecture."""
    from dsjax.errors import UserError
    from dsjax.kernels import build as building

    path = output / building.prebuilt_name(march)
    try:
        built = building.build(path, march)
    except OSError as error:
        raise UserError(f"cannot write {output} ({error.strerror or error}); choose another --output") from error
    if built.path is None:
        raise UserError(built.note)
    typer.echo(f"{path}: {path.stat().st_size:,} bytes; use it with --kernel-cache {output}")
