"""The report of a run: Markdown, JSON, JUnit XML, and the table on the console. `Report.to_json` explains the JSON."""

import datetime
import json
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from dsjax.bench.accept.criteria import Checklist, figure
from dsjax.bench.accept.results import FORMAT, REPORT, Judged, Result, exit_status, judge, worst
from dsjax.cli.output import writing
from dsjax.tables import table
from dsjax.texts import filled
from dsjax.versions import installed_version

_INVALID_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML cannot represent, such as the colour escapes in a command's output."""
_STYLES = {"met": "green", "missed": "bold red", "not tested": "yellow"}


@dataclass(frozen=True)
class Report:
    """Outcome of a run."""

    checklist: Checklist  # the criteria and measurements
    results: Mapping[str, Result]  # by measurement name
    base_url: str  # the server's
    model: str  # the server's
    criteria_file: str  # value of `--criteria` or `--recipe`
    quick: bool  # whether `--quick` shortened the durations
    command: str  # see `command.typed`

    @property
    def judged(self) -> list[Judged]:
        """Each criterion with its verdict."""
        return [judge(c, self.results.get(c.measurement)) for c in self.checklist.criteria]

    @property
    def partial(self) -> bool:
        """Whether some measurements have no result yet."""
        return any(name not in self.results for name in self.checklist.measurements)

    def command_of(self, criterion_id: str) -> str:
        """Return the command that measures and judges one criterion alone."""
        return f"{self.command} --only {criterion_id} --fresh"

    def to_json(self) -> dict[str, Any]:
        """Return the report with stable fields.

        Criteria: `verdict` is met, missed or not tested; `grade` is warning, failing or None; `command` measures the criterion alone.
        Measurements: `fingerprint` changes with definition, server and hooks; `absent` has [verdict, reason] of each missing value.
        """
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
                    "id": item.criterion.id,
                    "measurement": item.criterion.measurement,
                    "value_name": item.criterion.value_name,
                    "value": item.value,
                    "unit": item.criterion.unit,
                    "bound": item.criterion.bound_text,
                    "verdict": item.verdict,
                    "grade": item.grade,
                    "reason": item.reason,
                    "source": item.criterion.source,
                    "note": item.criterion.note,
                    "command": self.command_of(item.criterion.id),
                }
                for item in judged
            ],
            "measurements": {name: result.to_json() for name, result in self.results.items()},
        }

    def markdown(self) -> str:
        """Return the report as Markdown."""
        reasons: dict[str, list[str]] = {}
        for judged in self.judged:
            if judged.reason:
                reasons.setdefault(f"{judged.verdict}: {judged.reason}", []).append(f"`{judged.criterion.id}`")
        names = {"report": self, "reasons": reasons, "worst": worst, "value_of": _value, "figure": figure}
        return filled("acceptance", "report.md", **names).rstrip() + "\n"

    def junit(self) -> str:
        """Return the report as JUnit XML: a suite for each measurement, a case for each criterion."""
        suites: dict[str, list[Judged]] = {}
        for judged in self.judged:
            suites.setdefault(judged.criterion.measurement, []).append(judged)
        text = filled("acceptance", "report.xml", report=self, suites=suites, figure=figure)
        return _INVALID_IN_XML.sub("�", text) + "\n"

    def write(self, folder: Path) -> None:
        """Write the three files. A run resumes from the JSON, so replace it atomically. Raises `UserError`: the folder is unwritable."""
        text = json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n"
        with writing(folder, "folder"):
            folder.mkdir(parents=True, exist_ok=True)
            new = folder / f"{REPORT}.new"
            new.write_text(text, encoding="utf-8")
            os.replace(new, folder / REPORT)
            (folder / "report.md").write_text(self.markdown(), encoding="utf-8")
            (folder / "report.xml").write_text(self.junit(), encoding="utf-8")

    def table(self) -> Table:
        """Return the verdicts as a table for the console."""
        rows = [(item.criterion.id, _value(item), item.criterion.bound_text, item.verdict_text) for item in self.judged]
        title = f"{self.checklist.name}: {worst(self.judged)}"
        styles = [_STYLES[judged.verdict] for judged in self.judged]
        return table(title, ("<criterion", "value", "bound", "<<verdict"), rows, styles)


def _value(judged: Judged) -> str:
    return "" if judged.value is None else figure(judged.value, judged.criterion.unit)
