"""`Hooks`: the user's commands that make a fault and end it."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from dsjax.options import OptionError

_SCALE = "scale:"
_MOST_OUTPUT = 300


class NotTestedError(Exception):
    """A measurement, or some of its values, cannot be had here; the message says why, and what would make it testable."""


@dataclass(frozen=True)
class Hooks:
    """Commands by name; `NAME-end` ends what `NAME` began."""

    commands: Mapping[str, str]
    scale: Callable[[str], Awaitable[str | None]]  # asks the server to go on on another mesh, and says what was wrong
    timeout: float = 600.0  # seconds

    def why_not(self, name: str) -> str | None:
        """Why a fault cannot be made; None where both of its commands are there."""
        missing = [f"--hook {each}=COMMAND" for each in (name, f"{name}-end") if each not in self.commands]
        if not missing:
            return None
        return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not given: what makes this fault, and ends it"

    async def run(self, name: str, value: str) -> None:
        """Run one, with its output kept for an error.

        Raises:
            NotTestedError: it ended with an error, or not in time.
        """
        command = self.commands[name].replace("{value}", value)
        hook = f"--hook {name} ({command})"
        if command.startswith(_SCALE):
            problem = await self.scale(command.removeprefix(_SCALE))
            if problem is not None:
                raise NotTestedError(f"{hook}: {problem}")
            return
        pipes = {
            "stdin": asyncio.subprocess.DEVNULL,
            "stdout": asyncio.subprocess.PIPE,
            "stderr": asyncio.subprocess.STDOUT,
        }
        process = await asyncio.create_subprocess_shell(command, **pipes, start_new_session=True)
        try:
            # Not `wait_for`: where the command ends in the same moment, Python 3.11's forgets that this was cancelled, by Ctrl-C.
            async with asyncio.timeout(self.timeout):
                output, _ = await process.communicate()
        except BaseException as error:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            if isinstance(error, TimeoutError):
                raise NotTestedError(f"{hook} did not end within {self.timeout:g} s") from None
            raise
        if process.returncode:
            said = " ".join(output.decode("utf-8", "replace").split())[-_MOST_OUTPUT:]
            raise NotTestedError(f"{hook} ended with {process.returncode}: {said or 'it said nothing'}")


def parse_hooks(words: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """`NAME=COMMAND` words as a mapping.

    known: names of the criteria file's hooks.

    Raises:
        OptionError: a word without `=`, or a name that no measurement has.
    """
    names, hooks = [*known, *(f"{name}-end" for name in known)], {}
    for word in words:
        name, _, command = word.partition("=")
        if not command.strip():
            raise OptionError(f"--hook is {word!r}, expected NAME=COMMAND")
        if name not in names:
            raise OptionError(
                f"--hook {name} is no hook of the criteria file; expected one of {', '.join(names) or 'none'}"
            )
        hooks[name] = command
    return hooks
