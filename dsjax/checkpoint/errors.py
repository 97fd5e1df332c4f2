"""The error that lists everything wrong with a checkpoint, and the warning of what loading can go on without."""

from collections.abc import Sequence

from dsjax.errors import UserError

_SHOWN = 40


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


class CheckpointWarning(UserWarning):
    """Something in a checkpoint that loading goes on without, and that the user should know of."""
