"""The table of where the tests' time goes: each file's seconds are its tests', by folder, and the longest files are run first."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "tools"))
import test_times as times

REPORT = """<?xml version="1.0"?><testsuites><testsuite name="pytest" time="60.25" timestamp="2026-11-23T11:00:00">
<testcase classname="tests.test_house" name="a" time="1.5"/>
<testcase classname="tests.dsjax.engine.schedule.test_scheduler_machine.TestSchedulerMachine" name="runTest" time="4"/>
<testcase classname="tests.dsjax.engine.schedule.test_pages" name="b[1.5.x]" time="0.25"/>
<testcase classname="tests.dsjax.engine.schedule.test_pages" name="c" time="0.25"/>
<testcase classname="tests.dsjax.engine.test_llm" name="d" time="34"/>
</testsuite></testsuites>"""


@pytest.fixture
def run(tmp_path):
    report = tmp_path / "times.xml"
    report.write_text(REPORT)
    return times.read(report)


def test_seconds_and_tests_are_counted_by_file_whatever_class_a_test_is_in(run):
    room = "tests/dsjax/engine/schedule"
    assert (run.seconds, run.started) == (60.25, "2026-11-23")
    assert run.files == {
        "tests/test_house.py": 1.5,
        f"{room}/test_scheduler_machine.py": 4,
        f"{room}/test_pages.py": 0.5,
        "tests/dsjax/engine/test_llm.py": 34,
    }
    assert run.tests[f"{room}/test_pages.py"] == 2


def test_the_page_has_folders_by_their_share_and_the_slowest_files(run):
    page = times.page(run, "a machine")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert rows[:3] == [
        "| `tests/dsjax/engine` | 1 | 1 | 34 | 85.0% |",
        "| `tests/dsjax/engine/schedule` | 2 | 3 | 4 | 11.2% |",
        "| `tests` | 1 | 1 | 2 | 3.8% |",
    ]
    assert rows[3] == "| `tests/dsjax/engine/test_llm.py` | 1 | 34 |"
    assert "The whole suite of 5 tests took 60 s on a machine on 2026-11-23." in page


def test_a_report_of_files_that_are_not_here_is_refused(tmp_path):
    report = tmp_path / "times.xml"
    report.write_text(REPORT.replace("tests.test_house", "tests.test_that_went"))
    with pytest.raises(SystemExit, match=r"a test of 'tests.test_that_went', of which there is no file"):
        times.read(report)
