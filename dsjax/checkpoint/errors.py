"""The error that lists everything wrong with a checkpoint, and the warning of what loading can go on without."""

from collections.abc import Sequence
from pathlib import Path

from dsjax.errors import UserError

_SHOWN = 40
_POINTER = b"version https://git-lfs.github.com/spec/"
_READ_SUFFIXES = (".json", ".jinja", ".safetensors")


class CheckpointError(UserError):
    """A checkpoint that cannot be used: every fault found, in one message.

    ``problems`` holds all of them, one line each; the message shows the first few dozen and counts the rest.
    """

    def __init__(self, source: object, problems: Sequence[str], advice: str = ""):
        self.source = str(source)
        self.problems = list(problems)
        count = len(self.problems)
        lines = [f"checkpoint {source} cannot be used: {count} problem{'s' if count != 1 else ''}"]
        lines += [f"  - {problem}" for problem in self.problems[:_SHOWN]]
        if count > _SHOWN:
            lines.append(f"  … and {count - _SHOWN} more")
        if advice:
            lines.append(advice)
        super().__init__("\n".join(lines))


class DestinationError(CheckpointError):
    """A place where nothing can be written; the source may be in order."""

    def __init__(self, destination: object, problem: str):
        super().__init__(destination, [problem])
        self.args = (f"cannot write to {destination}: it {problem}",)


def check_pulled(directory: Path) -> None:
    """Make sure that Git LFS has fetched a checkpoint's files, and did not leave pointers in their place.

    Raises:
        CheckpointError: naming every file that is a pointer.
    """
    pointers = []
    for path in sorted(directory.iterdir()):
        if path.suffix in _READ_SUFFIXES and path.is_file():
            with path.open("rb") as file:
                if file.read(len(_POINTER)) == _POINTER:
                    pointers.append(path.name)
    if pointers:
        problems = [f"{name}: a Git LFS pointer, not the file that it stands for" for name in pointers]
        raise CheckpointError(directory, problems, "Run `git lfs install` and `git lfs pull` in that directory.")


class CheckpointWarning(UserWarning):
    """Something in a checkpoint that loading goes on without, and that the user should know of."""
