"""`report_console`: where a command prints its tables."""

import os
import sys

from rich.console import Console

FILE_COLUMNS = 140


def report_console(*, stderr: bool = False) -> Console:
    """As wide as the terminal; in a file or a pipe `FILE_COLUMNS` columns, unless `COLUMNS` says otherwise.

    rich would take 80 there, and cut the figures of wide tables.
    """
    stream = sys.stderr if stderr else sys.stdout
    wide = stream.isatty() or "COLUMNS" in os.environ
    return Console(stderr=stderr, width=None if wide else FILE_COLUMNS)
