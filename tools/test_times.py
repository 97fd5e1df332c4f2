"""Write down where the time of the test suite goes, from the last whole run:

    python -m pytest && python tools/test_times.py --machine "2 cores of an EPYC 9B14"

It writes `docs/measurements/test-times.csv`, with CPU seconds by folder and the 20 files that take most, and `tests/seconds.json`, by
which `tests/conftest.py` begins with the longest files. CPU seconds are those of a file's tests, their fixtures and the processes that
they start (`tests/cpu_seconds.py`).
"""

import argparse
import csv
import json
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUN = Path(".pytest_cache/v/dsjax/cpu_seconds")
TABLE = Path("docs/measurements/test-times.csv")
SECONDS = Path("tests/seconds.json")
LEAST_SECONDS = 1.0
"""Files that take less come last, in any order."""
MOST_FILES = 20


def folder_of(path: str) -> str:
    """The folder that a file is counted in: that of a room of the engine, or of a part of the program."""
    parts = Path(path).parent.parts
    return "/".join(parts[:4]) if parts[:3] == ("tests", "dsjax", "engine") else "/".join(parts[:3])


def table(run: dict, machine: str) -> list[list]:
    """The rows of a run, as pytest's cache keeps it: all of it, by folder, and the files that take most."""
    cpu, tests = run["cpu"], run["tests"]
    folders: dict[str, list[str]] = defaultdict(list)
    for path in cpu:
        folders[folder_of(path)].append(path)
    parts = {("run", f"{machine}, {run['date']}, {run['seconds']:.0f} s"): list(cpu)}
    parts |= {("folder", folder): paths for folder, paths in folders.items()}
    parts |= {("file", path): [path] for path in sorted(cpu, key=cpu.__getitem__, reverse=True)[:MOST_FILES]}
    rows = [
        [*name, sum(tests[path] for path in paths), round(sum(cpu[path] for path in paths))]
        for name, paths in parts.items()
    ]
    return sorted(rows, key=lambda row: (["run", "folder", "file"].index(row[0]), -row[3]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", required=True, help="what it ran on, in words")
    options = parser.parse_args()
    try:
        run = json.loads((ROOT / RUN).read_text())
    except OSError as error:
        raise SystemExit(f"{RUN} cannot be read ({error.strerror}): run the whole suite first") from error
    with (ROOT / TABLE).open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([["what", "path", "tests", "cpu_seconds"], *table(run, options.machine)])
    kept = {path: round(seconds) for path, seconds in sorted(run["cpu"].items()) if seconds >= LEAST_SECONDS}
    (ROOT / SECONDS).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(f"{run['seconds']:.0f} s: wrote {TABLE} and {SECONDS}")


if __name__ == "__main__":
    main()
