"""`Tenths`: progress where there is no terminal: a line at each tenth, in place of a bar that a log would see once, at its end."""

import time
from collections.abc import Callable


class Tenths:
    """Writes a line when the first of `total` is begun, and at each tenth.

    ::

        compiling: 4 of 31 (12 %), 9 s
    """

    def __init__(
        self, title: str, total: float, write: Callable[[str], None], show: Callable[[float], str] = "{:g}".format
    ):
        self._title, self._total, self._write, self._show = title, total, write, show
        self._begun = time.monotonic()
        self._tenth = -1

    def reach(self, done: float) -> None:
        """So much is done."""
        share = done / self._total if self._total else 1.0
        tenth = int(share * 10 + 1e-9)
        if tenth <= self._tenth:
            return
        self._tenth = tenth
        seconds = time.monotonic() - self._begun
        self._write(f"{self._title}: {self._show(done)} of {self._show(self._total)} ({share:.0%}), {seconds:.0f} s")
