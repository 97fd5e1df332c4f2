"""``dsjax convert``: the command line of ``dsjax/checkpoint/convert.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from dsjax.config.weights import CONVERTED
from dsjax.errors import UserError


def convert(
    source: Annotated[
        str, typer.Argument(help="Checkpoint directory, name of a bundled model, or Hugging Face repository id.")
    ],
    destination: Annotated[str, typer.Argument(help="Output directory, created once the checkpoint is complete.")],
    to: Annotated[
        Literal["orbax", "hf"] | None,
        typer.Option(help="Output format: Orbax or Hugging Face safetensors. Default: not the source's."),
    ] = None,
    weights: Annotated[
        Literal[("auto", *CONVERTED)],
        typer.Option(
            help="Format of weight matrices. auto: unchanged from the source. Packed formats apply to routed experts."
        ),
    ] = "auto",
    max_shard_size: Annotated[
        str, typer.Option(help="Maximum size of a safetensors file, such as 5GB or 500MB.")
    ] = "5GB",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the Hugging Face repository.")] = None,
    overwrite: Annotated[
        bool, typer.Option(help="Replace the checkpoint at the destination once the new one is complete.")
    ] = False,
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
) -> None:
    """Convert a checkpoint between Hugging Face and Orbax, or to another weight format."""
    max_shard_bytes = parse_bytes(max_shard_size)
    from dsjax.checkpoint.convert import convert_checkpoint
    from dsjax.checkpoint.hub import resolve
    from dsjax.checkpoint.publish import check_destination
    from dsjax.checkpoint.source import open_checkpoint

    if not destination:
        raise UserError("the destination is '', which names no folder; give the name of one, which need not exist")
    check_destination(Path(destination), overwrite=overwrite)
    directory = resolve(source, revision=revision)
    form = to or ("hf" if open_checkpoint(directory).kind == "orbax" else "orbax")
    written = convert_checkpoint(
        directory,
        destination,
        to=form,
        weights=weights,
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
        progress=progress,
    )
    size = sum(path.stat().st_size for path in written.rglob("*") if path.is_file())
    typer.echo(f"{written}: {'Orbax' if form == 'orbax' else 'Hugging Face'} form, {size:,} bytes")


def parse_bytes(text: str) -> int:
    """Parse a size such as ``"5GB"`` (5,000,000,000) into bytes; decimal, binary or no unit, as pydantic reads them.

    Raises:
        UserError: not a positive size.
    """
    try:
        size = int(TypeAdapter(ByteSize).validate_python(text.strip()))
    except ValidationError:
        size = 0
    if size < 1:
        raise UserError(f"size {text!r}: expected a positive number with a unit, such as 5GB or 500MiB")
    return size
