"""Hold every layout × dispatch × pair of MLA forms to the answer of one device: 9 × 3 × 6 runs of a tiny model.

    python tools/check_layouts.py
    python tools/check_layouts.py dp=32 tp=8,ep=1      # these layouts only
    python tools/check_layouts.py --kernels native     # each run with native kernels, held to one device with the plain forms

The tests run a covering part of this; the whole takes about a quarter of an hour on 2 cores. Exits 1 if any run differs.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]
# Compiling with LLVM's optimisations would take most of the time; XLA's own passes all run.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")

from sharding.emulation import emulate_devices


def main() -> int:
    """Run the sweep and print what each run found."""
    emulate_devices(32)
    from layouts import DISPATCHES, FORMS, LAYOUTS, answer, difference, write_checkpoint

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", help=f"of {' '.join(LAYOUTS)}; default: all")
    parser.add_argument("--kernels", default="auto", help="as of dsjax serve; one device always has the plain forms")
    args = parser.parse_args()
    chosen = args.layouts or LAYOUTS
    if unknown := sorted(set(chosen) - set(LAYOUTS)):
        parser.error(f"no such layout: {' '.join(unknown)}; expected some of {' '.join(LAYOUTS)}")
    with tempfile.TemporaryDirectory() as folder:
        directory = write_checkpoint(Path(folder))
        reference = answer(directory, "dp=1", "auto", "CC", "A_CC_ME", kernels="plain")
        runs = [(layout, dispatch, *forms) for layout in chosen for dispatch in DISPATCHES for forms in FORMS]
        wrong = 0
        for number, run in enumerate(runs, 1):
            start = time.monotonic()
            found = difference(answer(directory, *run, kernels=args.kernels), reference)
            wrong += found is not None
            print(
                f"{number}/{len(runs)} {' '.join(run)}: {found or 'equal'} ({time.monotonic() - start:.1f} s)",
                flush=True,
            )
    print(f"{len(runs) - wrong} of {len(runs)} equal to one device")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
