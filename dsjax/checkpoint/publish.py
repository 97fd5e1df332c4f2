"""Atomic creation of directories: written under a temporary name, renamed when complete."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dsjax.checkpoint.errors import DestinationError
from dsjax.checkpoint.orbax_form import MANIFEST_NAME
from dsjax.checkpoint.safetensors import sync_folder
from dsjax.checkpoint.shards import INDEX_NAME


def check_destination(destination: Path, *, overwrite: bool = False) -> None:
    """Raise if ``publish`` cannot write to ``destination``; call it before downloading or reading a source.

    Only a checkpoint or an empty folder is ever replaced: a mistyped name must not delete a home directory.

    Raises:
        DestinationError: it is no directory, is a mount point, holds anything but a checkpoint, or exists and ``overwrite`` is false.
    """
    if destination.exists() and not destination.is_dir():
        raise DestinationError(destination, "exists and is no directory; choose another destination")
    if os.path.ismount(os.path.realpath(destination)):
        raise DestinationError(destination, "is where a volume is mounted; choose a folder in it, which need not exist")
    if not destination.exists() or not any(destination.iterdir()):
        return
    if not _is_checkpoint(destination):
        raise DestinationError(
            destination,
            "exists and is no checkpoint, which is all that --overwrite replaces; choose another destination",
        )
    if not overwrite:
        raise DestinationError(destination, "exists already; choose another destination, or pass --overwrite")


def _is_checkpoint(folder: Path) -> bool:
    """Whether a folder holds a checkpoint, possibly damaged: a configuration, and weights, an index or a manifest."""
    weights = any((folder / name).exists() for name in (MANIFEST_NAME, INDEX_NAME)) or any(folder.glob("*.safetensors"))
    return weights and (folder / "config.json").exists()


@contextmanager
def publish(destination: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Create a folder beside ``destination`` to write to; rename it to ``destination`` when the block ends without an error.

    On an error or interrupt the folder is removed. A killed process may leave a hidden ``.NAME.PID.partial``, never an incomplete
    ``destination``. With ``overwrite``, the old directory stays until the new one is complete, is then renamed to ``.NAME.PID.replaced``,
    and deleted after the new one has its name. A symbolic link is kept; its target is replaced.

    Raises:
        DestinationError: as in ``check_destination``, or the folder cannot be created.
    """
    destination = Path(os.path.realpath(destination))
    check_destination(destination, overwrite=overwrite)
    partial = destination.with_name(f".{destination.name}.{os.getpid()}.partial")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
    except OSError as error:
        raise DestinationError(destination, f"cannot be made ({error.strerror}); choose another destination") from error
    try:
        yield partial
        sync_folder(partial)
        if destination.exists():
            replaced = destination.with_name(f".{destination.name}.{os.getpid()}.replaced")
            try:
                destination.rename(replaced)
                partial.rename(destination)
            except BaseException:
                if not destination.exists() and replaced.exists():
                    replaced.rename(destination)
                raise
            shutil.rmtree(replaced)
        else:
            partial.rename(destination)
        sync_folder(destination.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
