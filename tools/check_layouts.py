"""Hold every layout × dispatch × pair of MLA forms to the answer of one device: 9 × 3 × 6 runs of a tiny model.

    python tools/check_layouts.py

The tests run a covering part of this; the whole takes about a quarter of an hour on 2 cores. Exits 1 if any run differs.
"""

import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

from rich.console import Console
from rich.progress import track

from sharding.emulation import emulate_devices


def main() -> int:
    """Run the sweep and print what differs."""
    emulate_devices(32)
    from layouts import DISPATCHES, FORMS, LAYOUTS, answer, difference, write_checkpoint

    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        directory = write_checkpoint(Path(folder))
        reference = answer(directory, "dp=1", "auto", "CC", "A_CC_ME")
        runs = [(layout, dispatch, *forms) for layout in LAYOUTS for dispatch in DISPATCHES for forms in FORMS]
        wrong = 0
        for run in track(runs, "layouts", console=console):
            found = difference(answer(directory, *run), reference)
            if found:
                wrong += 1
                console.print(f"{' '.join(run)}: {found}")
    console.print(f"{len(runs) - wrong} of {len(runs)} equal to one device")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
