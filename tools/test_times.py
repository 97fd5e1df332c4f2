"""Write down where the time of the test suite goes, from the last whole run:

    python -m pytest && python tools/test_times.py --machine "2 cores of an EPYC 9B14"

It writes `docs/measurements/test-times.md`, with CPU seconds by folder and the 20 files that take most, and `tests/seconds.json`, by
which `tests/conftest.py` begins with the longest files. CPU seconds are those of a file's tests, their fixtures and the processes that
they start (`tests/cpu_seconds.py`).
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUN = Path(".pytest_cache/v/dsjax/cpu_seconds")
PAGE = Path("docs/measurements/test-times.md")
SECONDS = Path("tests/seconds.json")
LEAST_SECONDS = 1.0
"""Files that take less come last, in any order."""
MOST_FILES = 20


def folder_of(path: str) -> str:
    """The folder that a file is counted in: that of a room of the engine, or of a part of the program."""
    parts = Path(path).parent.parts
    return "/".join(parts[:4]) if parts[:3] == ("tests", "dsjax", "engine") else "/".join(parts[:3])


def page(run: dict, machine: str) -> str:
    """The page of a run, as pytest's cache keeps it."""
    cpu, tests = run["cpu"], run["tests"]
    whole = sum(cpu.values())
    folders: dict[str, list[str]] = defaultdict(list)
    for path in cpu:
        folders[folder_of(path)].append(path)
    sums = {folder: sum(cpu[path] for path in paths) for folder, paths in folders.items()}
    slowest = sorted(cpu, key=cpu.__getitem__, reverse=True)[:MOST_FILES]
    return "\n".join(
        [
            "# Where the time of the tests goes",
            "",
            f"The whole suite of {sum(tests.values()):,} tests took {run['seconds']:.0f} s and {whole:,.0f} CPU seconds",
            f"on {machine} on {run['date']}. A file's CPU seconds are those of its tests, their fixtures and the processes that",
            "they start. Made by:",
            "",
            "```",
            f'python -m pytest && python tools/test_times.py --machine "{machine}"',
            "```",
            "",
            "| folder | files | tests | CPU seconds | share |",
            "|---|---:|---:|---:|---:|",
            *(
                f"| `{folder}` | {len(folders[folder])} | {sum(tests[path] for path in folders[folder])} "
                f"| {sums[folder]:.0f} | {sums[folder] / whole:.1%} |"
                for folder in sorted(sums, key=sums.__getitem__, reverse=True)
            ),
            "",
            f"The {len(slowest)} files that take most:",
            "",
            "| file | tests | CPU seconds |",
            "|---|---:|---:|",
            *(f"| `{path}` | {tests[path]} | {cpu[path]:.0f} |" for path in slowest),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", required=True, help="what it ran on, in words")
    options = parser.parse_args()
    try:
        run = json.loads((ROOT / RUN).read_text())
    except OSError as error:
        raise SystemExit(f"{RUN} cannot be read ({error.strerror}): run the whole suite first") from error
    (ROOT / PAGE).write_text(page(run, options.machine), encoding="utf-8")
    kept = {path: round(seconds) for path, seconds in sorted(run["cpu"].items()) if seconds >= LEAST_SECONDS}
    (ROOT / SECONDS).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(f"{run['seconds']:.0f} s: wrote {PAGE} and {SECONDS}")


if __name__ == "__main__":
    main()
