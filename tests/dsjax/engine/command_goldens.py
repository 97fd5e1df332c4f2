"""Goldens of recorded commands: a text file for each scenario, a line for each command.

A line has the command's number in its stream, its kind, its length in bytes and the first 12 hexadecimal digits of its SHA-256.
"""

from itertools import zip_longest
from pathlib import Path

from recorded_engines import record
from recorded_executor import Line
from recorded_scenarios import SCENARIOS

GOLDENS = Path(__file__).parents[2] / "goldens" / "commands"

Streams = dict[str, list[Line]]


def streams_of(scenario: str) -> Streams:
    return record(SCENARIOS[scenario])


def text_of(streams: Streams) -> str:
    parts = []
    for name, lines in streams.items():
        parts.append(f"# {name}")
        parts += [f"{number} {line}" for number, line in enumerate(lines)]
    return "\n".join(parts) + "\n"


def path_of(scenario: str) -> Path:
    return GOLDENS / f"{scenario}.txt"


def write(scenario: str) -> Path:
    path = path_of(scenario)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text_of(streams_of(scenario)), encoding="utf-8")
    return path


def difference(scenario: str, streams: Streams) -> str | None:
    """Name the first command that differs from the golden, of each stream that has one; None where all are equal."""
    expected = parsed(path_of(scenario).read_text(encoding="utf-8"))
    found = []
    for name in dict.fromkeys([*expected, *streams]):
        pairs = zip_longest(expected.get(name, []), streams.get(name, []))
        for number, (before, now) in enumerate(pairs):
            if before != (now and str(now)):
                command = "" if now is None or now.command is None else f"\n    which is {now.command}"
                found.append(
                    f"{scenario}, {name}, command {number}: recorded {before or 'nothing'}, now {now or 'nothing'}{command}"
                )
                break
    return "\n".join(found) or None


def parsed(text: str) -> dict[str, list[str]]:
    """A golden's lines, without their numbers, by the names of the streams."""
    streams: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("# "):
            lines = streams.setdefault(line[2:], [])
        else:
            lines.append(line.split(" ", 1)[1])
    return streams
