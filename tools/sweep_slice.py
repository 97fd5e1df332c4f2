"""``--slice K/N``: the part of a sweep that one run takes. CI has the commit's hash choose it, so that all parts come up in time."""

import argparse
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parents[1]
Run = TypeVar("Run")


@dataclass(frozen=True)
class Slice:
    """The runs whose number has the remainder ``number`` when divided by ``count``."""

    number: int = 0
    count: int = 1

    def __str__(self) -> str:
        return f"slice {self.number} of {self.count}"

    def of(self, runs: Sequence[Run]) -> Sequence[Run]:
        """Return this slice's runs."""
        return runs[self.number :: self.count]

    @classmethod
    def parse(cls, text: str) -> "Slice":
        """Read ``K/N``, or ``COMMIT/N``, which stands for the commit's hash modulo N.

        Raises:
            argparse.ArgumentTypeError: N is not a positive number, or K is not a number below N or a commit.
        """
        which, _, count = text.rpartition("/")
        if not re.fullmatch("[1-9][0-9]*", count):
            raise argparse.ArgumentTypeError(f"found {text}, expected K/N or COMMIT/N such as 3/77 or HEAD/77")
        if which.isdigit() and int(which) < int(count):
            return cls(int(which), int(count))
        command = ["git", "rev-parse", "--verify", "--quiet", f"{which}^{{commit}}"]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if found.returncode:
            raise argparse.ArgumentTypeError(f"found {which}, expected a number below {count} or a commit such as HEAD")
        return cls(int(found.stdout, 16) % int(count), int(count))


def add_slice(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the option. what: what the tool numbers, such as "runs"."""
    parser.add_argument(
        "--slice",
        type=Slice.parse,
        default=Slice(),
        metavar="K/N",
        help=f"each N-th of the {what} only, from number K on; COMMIT/N: the commit's hash chooses K. Default: all",
    )
