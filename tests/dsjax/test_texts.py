"""`dsjax.texts`: templates of `configs` are filled strictly, and escaped where they are markup."""

from types import SimpleNamespace

import jinja2
import pytest

from dsjax.texts import filled

REASON = {"wanted": 0.01, "best": 0.025, "by": "dp=8", "would": "", "with_64_times_everything": 0.002, "no_layout": ""}


def test_a_text_has_its_values_in_the_formats_that_it_gives():
    said = filled("texts", "forbidden.txt", bound="tpot", **REASON)
    assert said.startswith("TPOT forbids it: 10 ms wanted, 25.0 ms at best, by dp=8. No multiple up to 64")
    assert said.endswith("With 64 × everything it is 2.0 ms: launches, host and other fixed costs remain.")


def test_a_value_that_is_not_given_is_an_error():
    without = {name: value for name, value in REASON.items() if name != "by"}
    with pytest.raises(jinja2.UndefinedError, match="'by' is undefined"):
        filled("texts", "forbidden.txt", bound="tpot", **without)


def test_values_of_markup_are_escaped():
    report = SimpleNamespace(judged=(), checklist=SimpleNamespace(name="<a> & b"))
    assert 'name="&lt;a&gt; &amp; b"' in filled("acceptance", "report.xml", report=report, suites={}, figure=str)
