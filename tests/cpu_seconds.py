"""Record the CPU seconds of each test file: of the test process and of all processes that it has waited for.

CPU seconds hardly depend on what else the machine does. Wall time does: with three test processes on two cores a file that takes
one CPU second can last three.
"""

import contextlib
import datetime
import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

KEY = "dsjax/cpu_seconds"
"""Where pytest's cache keeps the last run: ``{"seconds", "date", "cpu": {file: seconds}, "tests": {file: number}}``."""

MOST_SECONDS = 60
"""A file that takes more CPU seconds is to be split, or to start fewer engines."""


def spent() -> float:
    """CPU seconds of this process and of the children that it has waited for."""
    return sum(os.times()[:4])


def changed_files(root: Path) -> set[str]:
    """Paths that the working tree or the last commit changed; none outside a git checkout."""
    commands = (["diff", "--name-only", "HEAD~1"], ["ls-files", "--others", "--exclude-standard"])
    found: set[str] = set()
    for command in commands:
        with contextlib.suppress(OSError):
            found |= {*subprocess.run(["git", *command], cwd=root, capture_output=True, text=True).stdout.splitlines()}
    return found


class CpuSeconds:
    """A pytest plugin. Each test process adds up its files; the first one collects, prints and keeps the sums."""

    def __init__(self, config: pytest.Config):
        self._config, self._started = config, time.monotonic()
        self.cpu, self.tests = Counter(), Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = spent()
        try:
            return (yield)
        finally:
            file = item.nodeid.partition("::")[0]
            self.cpu[file] += spent() - before
            self.tests[file] += 1

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node) -> None:
        cpu, tests = getattr(node, "workeroutput", {}).get(KEY, ({}, {}))
        self.cpu.update(cpu)
        self.tests.update(tests)

    def pytest_sessionfinish(self) -> None:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput[KEY] = dict(self.cpu), dict(self.tests)

    def pytest_terminal_summary(self, terminalreporter) -> None:
        """Print the sum, the files that have changed and those that take too long, and keep all."""
        run = {"seconds": time.monotonic() - self._started, "date": datetime.date.today().isoformat()}
        run |= {"cpu": dict(self.cpu), "tests": dict(self.tests)}
        if hasattr(self._config, "cache"):  # not with `-p no:cacheprovider`
            self._config.cache.set(KEY, run)
        for line in summary(self.cpu, changed_files(self._config.rootpath)):
            terminalreporter.write_line(line)


def summary(cpu: dict[str, float], changed: set[str]) -> list[str]:
    """Lines for the end of a run: the sum of all files, and each file that has changed or takes too long."""
    lines = [f"CPU seconds: {sum(cpu.values()):.0f}"]
    for file, seconds in sorted(cpu.items(), key=lambda item: -item[1]):
        notes = ["changed"] * (file in changed) + [f"more than {MOST_SECONDS}"] * (seconds > MOST_SECONDS)
        if notes:
            lines.append(f"{seconds:7.1f} {file} ({', '.join(notes)})")
    return lines
