"""Criteria files of `dsjax accept`: what they may hold, what a value is held against, and that h20-32 has the plan's numbers."""

import json
from pathlib import Path

import pytest

from dsjax.bench.accept.criteria import Criterion, load_checklist
from dsjax.bench.accept.kinds.kind import Measured
from dsjax.bench.accept.results import FORMAT, Result, exit_status, judge, read_results, worst
from dsjax.errors import UserError
from dsjax.options import OptionError
from dsjax.toml_files import bundled_names

ROOT = Path(__file__).parents[3]
FILE = """
name = "mine"
description = "ours"

[measurements]
first = {kind = "ttft", title = "First", input_tokens = 16, requests = 9, quick = {requests = 2}}
second = {kind = "load", title = "Second", sessions = 2, seconds = 60}
"""
CRITERION = """
[[criteria]]
id = "fast"
measurement = "first"
value = "ttft_p99"
below = 1.5
source = "§1"
"""
FILE += CRITERION


@pytest.fixture
def read(tmp_path):
    def made(text=FILE, **how):
        path = tmp_path / "criteria.toml"
        path.write_text(text)
        return load_checklist(str(path), **how)

    return made


def criterion(kind, bound, **others):
    return Criterion("c", "m", "v", "s", kind, bound, "§1", **others)


@pytest.mark.parametrize(
    ("kind", "bound", "met", "missed"),
    [
        ("below", 2.0, 1.9, 2.0),
        ("at_most", 2.0, 2.0, 2.1),
        ("above", 2.0, 2.1, 2.0),
        ("at_least", 2.0, 2.0, 1.9),
        ("between", (1.0, 3.0), 3.0, 3.1),
        ("between", (1.0, 3.0), 1.0, 0.9),
    ],
)
def test_a_value_is_within_its_bound_or_not(kind, bound, met, missed):
    one = criterion(kind, bound)
    assert one.is_met_by(met)
    assert not one.is_met_by(missed)


def result(**measured):
    return Result("load", "t", "f", "2026", 1.0, Measured(**measured))


def test_a_verdict_is_of_the_value_or_says_why_there_is_none():
    one = criterion("below", 2.0, warning=3.0, failing=5.0)
    found = [judge(one, result(values={"v": value})) for value in (1.0, 2.5, 4.0, 6.0)]
    assert [each.verdict for each in found] == ["met", "missed", "missed", "missed"]
    assert [each.grade for each in found] == [None, None, "warning", "failing"]
    assert criterion("above", 20.0, warning=18.0, failing=15.0).grade(16.0) == "warning"
    absent = judge(one, result(absent={"v": ("missed", "none was answered")}))
    assert (absent.verdict, absent.reason) == ("missed", "none was answered")
    assert judge(one, Result("load", "t", "f", "2026", 0.0, None, "no hook")).reason == "no hook"
    assert judge(one, None).verdict == "not tested"


def test_a_missed_criterion_outweighs_one_that_was_not_tested():
    one = criterion("below", 2.0)
    met, missed, untested = judge(one, result(values={"v": 1})), judge(one, result(values={"v": 3})), judge(one, None)
    assert [exit_status(each) for each in ([met], [met, untested], [met, untested, missed], [])] == [0, 4, 3, 0]
    assert worst([untested, met]) == "not tested"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('kind = "ttft"', 'kind = "speed"', "kind is 'speed', expected one of server, ttft"),
        ('kind = "ttft"', 'kind = ["ttft"]', r"kind is ['ttft'\], expected one of server, ttft"),
        ("requests = 9", "request = 9", "unknown request"),
        ("requests = 9", "requests = 0", "measurement first: requests is 0, expected more than 0"),
        ("input_tokens = 16", "input_tokens = 0", "measurement first: input_tokens is 0, expected more than 0"),
        ("quick = {requests = 2}", "quick = {requests = 0}", "measurement first: requests is 0"),
        ("seconds = 60", "seconds = 0", "measurement second: seconds is 0, expected more than 0"),
        ("seconds = 60", "seconds = 60, windows = 0", "measurement second: windows is 0, expected more than 0"),
        ("seconds = 60", "seconds = 60, spread = 1.0", "measurement second: spread is 1, expected at least 0 and less"),
        ("requests = 9", 'requests = "9"', "requests is '9', expected `int`"),
        ("seconds = 60", "seconds = -60", "seconds is -60, expected 0 or more"),
        ("input_tokens = 16, ", "", "missing input_tokens"),
        ("quick = {requests = 2}", "quick = {request = 2}", "quick: unknown request"),
        ("quick = {requests = 2}", "quick = 2", "expected a table"),
        ("sessions = 2", "sessions = 2, request_rate = 1.0", "expected sessions or request_rate"),
        ("sessions = 2", "sessions = 0", "neither is above 0, expected sessions or request_rate"),
        ('measurement = "first"', 'measurement = "third"', "there is no measurement 'third'"),
        ('value = "ttft_p99"', 'value = "ttft_p98"', "gives no 'ttft_p98'; it gives ttft_p50"),
        ("below = 1.5", "", "found no bound"),
        ("below = 1.5", "below = 1.5\nabove = 1", "found below and above"),
        ("below = 1.5", "between = [3, 1]", "the smaller number first"),
        ("below = 1.5", "between = 3", "between is 3, expected `array"),
        ("below = 1.5", "below = true", "below is True, expected `float"),
        ('source = "§1"', "", "missing source"),
        ("below = 1.5", "under = 1.5", "unknown under"),
        ('name = "mine"', "", "missing name"),
        ("[measurements]", "[measurements", "not valid TOML"),
        (
            FILE,
            'name = "a"\ndescription = "b"\nmeasurements = {}\ncriteria = []\n',
            "measurements is {}, expected `object` of length >= 1",
        ),
        (FILE, f"criteria = []\n{FILE.partition(CRITERION)[0]}", "criteria is [], expected `array` of length >= 1"),
        (CRITERION, 2 * CRITERION, "several criteria are called fast"),
    ],
)
def test_a_mistake_in_a_file_is_found_before_anything_is_measured(read, old, new, message):
    assert old in FILE
    with pytest.raises(UserError, match=message.replace("[", r"\[")):
        read(FILE.replace(old, new, 1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "it is no report of dsjax accept") for text in ("[]", "3", "null")),
        (json.dumps({"format": FORMAT, "measurements": {}}), "base_url"),
    ],
)
def test_a_report_that_is_none_is_not_gone_on_from(tmp_path, text, message):
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(UserError, match=f"{message}.*; give another --results"):
        read_results(tmp_path, "http://host", fresh=False)


def test_a_file_that_is_not_there_is_told_with_the_bundled_names():
    with pytest.raises(UserError, match="expected a TOML file, or one of h20-32"):
        load_checklist("h20-33")


def test_quick_and_only_take_what_they_name_and_keep_the_others(read):
    whole, quick = (read(quick=each) for each in (False, True))
    assert (whole.measurements["first"].requests, quick.measurements["first"].requests) == (9, 2)
    assert whole.measurements["second"] == quick.measurements["second"]
    assert whole.criteria == quick.criteria
    kept = [whole.selected(only) for only in ("f*", "second", "second,fast")]
    assert [list(one.measurements) for one in kept] == [["first"], ["second"], ["first", "second"]]
    assert [[criterion.id for criterion in one.criteria] for one in kept] == [["fast"], [], ["fast"]]
    with pytest.raises(OptionError, match="--only has 'fest', which names no criterion and no measurement"):
        whole.selected("fast,fest")


@pytest.mark.parametrize("name", bundled_names("acceptance"))
def test_bundled_files_are_whole_and_their_quick_list_takes_five_minutes(name):
    whole, quick = (load_checklist(name, quick=each) for each in (False, True))
    assert list(quick.measurements) == list(whole.measurements)
    assert quick.criteria == whole.criteria
    assert sum(one.expected_seconds() for one in quick.measurements.values()) <= 300
    for short, long in zip(quick.measurements.values(), whole.measurements.values(), strict=True):
        assert short.expected_seconds() <= long.expected_seconds()


def test_h20_32_has_the_plan_s_numbers():
    """Bounds and sources are those of the published report, whose sources are sections of the plan."""
    whole = load_checklist("h20-32")
    report = json.loads((ROOT / "docs" / "accept-example" / "report.json").read_text(encoding="utf-8"))
    no_longer = {name for name, one in report["measurements"].items() if one["kind"] in ("eplb_gain", "link_share")}
    published = [one for one in report["criteria"] if one["measurement"] not in no_longer]
    assert len(published) == 70
    found = [(c.id, c.measurement, c.value_name, c.bound_text, c.source) for c in whole.criteria]
    assert found == [tuple(c[key] for key in ("id", "measurement", "value_name", "bound", "source")) for c in published]
    graded = {c.id: (c.warning, c.failing) for c in whole.criteria}
    expected = {"pair-between-64b-latency": (15, 25), "all-to-all-1m-latency": (750, 1000)}
    assert graded | expected == graded
    measured, named = whole.measurements, {c.measurement for c in whole.criteria}
    assert set(measured) - named == {"ttft-8192"}  # which §7.1.1 measures, and which no bound follows for
    assert measured["experts-data"].bytes == 7 * 8 * 7168 * 2  # 200 sessions are 6.25 a GPU
    assert (measured["sessions"].sessions, measured["sessions"].seconds) == (200, 900)
    assert (measured["stability"].request_rate, measured["stability"].seconds) == (3.33, 3600)
