"""Write down where the time of the test suite goes, from the report of a run on an idle machine:

    python -m pytest --junitxml=times.xml && python tools/test_times.py times.xml --machine "2 cores of an EPYC 9B14"

It writes `docs/measurements/test-times.md`, with seconds by folder and the slowest 20 files, and `tests/seconds.json`, by which
`tests/conftest.py` begins with the longest files. The seconds of a test are those between its beginning and its end, with its
fixtures, while other processes share the cores: all together are more than the run took.
"""

import argparse
import json
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = Path("docs/measurements/test-times.md")
SECONDS = Path("tests/seconds.json")
LEAST_SECONDS = 1.0
"""Files that take less come last, in any order."""
MOST_FILES = 20


class Run(NamedTuple):
    """A run of the suite.

    Attributes:
        seconds: of the whole run. files: seconds of each test file, by its path. tests: how many tests each file has.
        started: when, in ISO 8601.
    """

    seconds: float
    files: dict[str, float]
    tests: dict[str, int]
    started: str


def read(report: Path, root: Path = ROOT) -> Run:
    """A run's times from pytest's JUnit report, which names a test's file as a dotted path, with the test's class behind it."""
    suite = next(ET.parse(report).iter("testsuite"))
    files, tests = defaultdict(float), defaultdict(int)
    for case in suite.iter("testcase"):
        parts = case.get("classname", "").split(".")
        paths = (Path(*parts[:count]).with_suffix(".py") for count in range(len(parts), 0, -1))
        path = next((str(path) for path in paths if (root / path).is_file()), None)
        if path is None:
            raise SystemExit(f"{report} has a test of {case.get('classname')!r}, of which there is no file here")
        files[path] += float(case.get("time", 0))
        tests[path] += 1
    return Run(float(suite.get("time", 0)), dict(files), dict(tests), suite.get("timestamp", "")[:10])


def folder_of(path: str) -> str:
    """The folder that a file is counted in: that of a room of the engine, or of a part of the program."""
    parts = Path(path).parent.parts
    return "/".join(parts[:4]) if parts[:3] == ("tests", "dsjax", "engine") else "/".join(parts[:3])


def page(run: Run, machine: str) -> str:
    """The page of a run."""
    whole = sum(run.files.values())
    folders: dict[str, list[str]] = defaultdict(list)
    for path in run.files:
        folders[folder_of(path)].append(path)
    sums = {folder: sum(run.files[path] for path in paths) for folder, paths in folders.items()}
    slowest = sorted(run.files, key=run.files.__getitem__, reverse=True)[:MOST_FILES]
    return "\n".join(
        [
            "# Where the time of the tests goes",
            "",
            f"The whole suite of {sum(run.tests.values()):,} tests took {run.seconds:.0f} s on {machine} on {run.started}.",
            "The seconds below are those of each test with its fixtures, while the other processes of the run share the cores,",
            f"so that their sum is {whole:,.0f} s. Made by:",
            "",
            "```",
            f'python -m pytest --junitxml=times.xml && python tools/test_times.py times.xml --machine "{machine}"',
            "```",
            "",
            "| folder | files | tests | seconds | share |",
            "|---|---:|---:|---:|---:|",
            *(
                f"| `{folder}` | {len(folders[folder])} | {sum(run.tests[path] for path in folders[folder])} "
                f"| {sums[folder]:.0f} | {sums[folder] / whole:.1%} |"
                for folder in sorted(sums, key=sums.__getitem__, reverse=True)
            ),
            "",
            f"The slowest {len(slowest)} files:",
            "",
            "| file | tests | seconds |",
            "|---|---:|---:|",
            *(f"| `{path}` | {run.tests[path]} | {run.files[path]:.0f} |" for path in slowest),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="what `python -m pytest --junitxml=FILE` has written")
    parser.add_argument("--machine", required=True, help="what it ran on, in words")
    options = parser.parse_args()
    run = read(options.report)
    (ROOT / PAGE).write_text(page(run, options.machine), encoding="utf-8")
    kept = {path: round(seconds) for path, seconds in sorted(run.files.items()) if seconds >= LEAST_SECONDS}
    (ROOT / SECONDS).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(f"{run.seconds:.0f} s: wrote {PAGE} and {SECONDS}")


if __name__ == "__main__":
    main()
