"""The error that lists all problems of a checkpoint, and the warning about problems that do not prevent loading."""

from collections.abc import Sequence
from pathlib import Path

from dsjax.errors import UserError

_SHOWN = 40
_POINTER = b"version https://git-lfs.github.com/spec/"
_READ_SUFFIXES = (".json", ".jinja", ".safetensors")


class CheckpointError(UserError):
    """A checkpoint cannot be used. One error reports all its problems.

    ``problems`` has one line for each problem; the message shows the first few dozen and counts the rest.
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
    """The destination cannot be written; the source may be valid."""

    def __init__(self, destination: object, problem: str):
        super().__init__(destination, [problem])
        self.args = (f"cannot write to {destination}: it {problem}",)


def check_pulled(directory: Path) -> None:
    """Check that a checkpoint's files are not Git LFS pointers.

    Raises:
        CheckpointError: some files are pointers; the error lists them.
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
    """A problem of a checkpoint that does not prevent loading, but that the user should know about."""
