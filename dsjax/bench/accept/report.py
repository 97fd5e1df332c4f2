"""The report of a run: Markdown, JSON, JUnit XML, and the table on the console. Fields of the JSON: `docs/accept.md`."""

import datetime
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rich.table import Table

from dsjax.bench.accept.criteria import Checklist, figure
from dsjax.bench.accept.results import FORMAT, REPORT, Judged, Result, exit_status, judge, worst
from dsjax.cli.output import writing
from dsjax.tables import table
from dsjax.versions import installed_version

_NOT_OF_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML has no form for, such as those by which a command colours what it says."""
_STYLES = {"met": "green", "missed": "bold red", "not tested": "yellow"}


@dataclass(frozen=True)
class Report:
    """What a run has come to.

    checklist: what was asked. results: what was measured, by the measurements' names. base_url, model: of the server. criteria_file: as
    `--criteria` has it; quick: whether durations were short. command: as typed, without keys and `--only`.
    """

    checklist: Checklist
    results: Mapping[str, Result]
    base_url: str
    model: str
    criteria_file: str
    quick: bool
    command: str

    @property
    def judged(self) -> list[Judged]:
        """Each criterion with its verdict."""
        return [judge(c, self.results.get(c.measurement)) for c in self.checklist.criteria]

    @property
    def partial(self) -> bool:
        """Whether measurements are still to come."""
        return any(name not in self.results for name in self.checklist.measurements)

    def alone(self, name: str) -> str:
        """The command that shows one criterion alone."""
        return f"{self.command} --only {name} --fresh"

    def to_json(self) -> dict[str, Any]:
        """Stable fields."""
        judged = self.judged
        return {
            "format": FORMAT,
            "command": self.command,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": {"dsjax": installed_version("dsjax", missing="unknown"), "python": platform.python_version()},
            "base_url": self.base_url,
            "model": self.model,
            "criteria_file": self.criteria_file,
            "name": self.checklist.name,
            "quick": self.quick,
            "verdict": worst(judged),
            "exit_status": exit_status(judged),
            "partial": self.partial,
            "criteria": [
                {
                    "id": one.criterion.id,
                    "measurement": one.criterion.measurement,
                    "value_name": one.criterion.value,
                    "value": one.value,
                    "unit": one.criterion.unit,
                    "bound": one.criterion.bound_text,
                    "verdict": one.verdict,
                    "grade": one.grade,
                    "reason": one.reason,
                    "source": one.criterion.source,
                    "note": one.criterion.note,
                    "command": self.alone(one.criterion.id),
                }
                for one in judged
            ],
            "measurements": {name: result.to_json() for name, result in self.results.items()},
        }

    def markdown(self) -> str:
        """The report for people."""
        judged, name = self.judged, self.checklist.name
        counts = ", ".join(f"{sum(o.verdict == v for o in judged)} {v}" for v in ("met", "missed", "not tested"))
        how = ", with the short durations of `--quick`, which accepts nothing" if self.quick else ""
        lines = [
            f"# Acceptance by {name}: {worst(judged)}\n",
            f"{self.checklist.description}. The server: `{self.model}` at {self.base_url}{how}. {counts}, of {len(judged)} criteria.\n",
            f"```\n{self.command}\n```\n",
        ]
        if self.partial:
            lines.append("The run has not ended: measurements are still to come.\n")
        lines.append("| criterion | value | bound | verdict | from |\n|---|---|---|---|---|")
        for one in judged:
            c = one.criterion
            verdict = f"**{one.verdict}**" if one.verdict == "missed" else one.verdict
            verdict += f" (beyond the plan's {one.grade} value)" if one.grade else ""
            cells = (f"`{c.id}`", _value(one), c.bound_text, verdict, c.source)
            lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
        lines.append(f"\nOne criterion alone: `{self.alone('CRITERION')}`\n")
        reasons: dict[str, list[str]] = {}
        for one in judged:
            if one.reason:
                reasons.setdefault(f"{one.verdict}: {one.reason}", []).append(f"`{one.criterion.id}`")
        if reasons:
            lines += ["## Without a value\n", *(f"- {', '.join(ids)}: {reason}" for reason, ids in reasons.items())]
        notes = [f"- `{one.criterion.id}`: {one.criterion.note}" for one in judged if one.criterion.note]
        lines += ["\n## Notes on the criteria\n", *notes] if notes else []
        lines.append("\n## What was measured\n")
        for name, measurement in self.checklist.measurements.items():
            result = self.results.get(name)
            if result is None or result.measured is None:
                continue
            found = result.measured
            values = ", ".join(
                f"{k} {figure(value, measurement.UNITS.get(k, ''))}" for k, value in found.values.items()
            )
            sampled = "" if found.samples is None else f", {found.samples:,} samples"
            lines.append(
                f"**{result.title}** (`{name}`, {result.seconds:.0f} s{sampled}, {result.started}): {values}.\n"
            )
            lines += [" ".join(found.notes) + "\n"] if found.notes else []
        return "\n".join(lines).rstrip() + "\n"

    def junit(self) -> str:
        """The report for a build server: a suite for each measurement, a case for each criterion."""
        judged = self.judged
        root = ElementTree.Element("testsuites", _counts(judged) | {"name": self.checklist.name})
        for name in dict.fromkeys(one.criterion.measurement for one in judged):
            cases = [one for one in judged if one.criterion.measurement == name]
            result = self.results.get(name)
            seconds = f"{result.seconds:.3f}" if result else "0"
            suite = ElementTree.SubElement(root, "testsuite", _counts(cases) | {"name": name, "time": seconds})
            for one in cases:
                c = one.criterion
                case = ElementTree.SubElement(suite, "testcase", {"classname": name, "name": c.id, "time": "0"})
                if one.verdict == "missed":
                    said = one.reason or f"{figure(one.value, c.unit)}, expected {c.bound_text}"
                    failure = ElementTree.SubElement(case, "failure", {"message": said, "type": one.grade or "missed"})
                    failure.text = f"{c.source}\n{self.alone(c.id)}"
                elif one.verdict == "not tested":
                    ElementTree.SubElement(case, "skipped", {"message": one.reason})
        ElementTree.indent(root)
        return _NOT_OF_XML.sub("�", ElementTree.tostring(root, encoding="unicode", xml_declaration=True)) + "\n"

    def write(self, folder: Path) -> None:
        """Write all three; the JSON, from which a run goes on, is never half written.

        Raises:
            UserError: the folder cannot be written.
        """
        text = json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n"
        with writing(folder, "folder"):
            folder.mkdir(parents=True, exist_ok=True)
            new = folder / f"{REPORT}.new"
            new.write_text(text, encoding="utf-8")
            os.replace(new, folder / REPORT)
            (folder / "report.md").write_text(self.markdown(), encoding="utf-8")
            (folder / "report.xml").write_text(self.junit(), encoding="utf-8")

    def table(self) -> Table:
        """The verdicts for the console."""
        rows = [(one.criterion.id, _value(one), one.criterion.bound_text, one.said) for one in self.judged]
        title, styles = f"{self.checklist.name}: {worst(self.judged)}", [_STYLES[one.verdict] for one in self.judged]
        return table(title, ("<criterion", "value", "bound", "<<verdict"), rows, styles)


def _counts(judged: Sequence[Judged]) -> dict[str, str]:
    return {
        "tests": str(len(judged)),
        "failures": str(sum(one.verdict == "missed" for one in judged)),
        "skipped": str(sum(one.verdict == "not tested" for one in judged)),
    }


def _value(one: Judged) -> str:
    return "" if one.value is None else figure(one.value, one.criterion.unit)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
