"""The scorer of blind predictions, on a file made by hand, and the committed predictions and page."""

import hashlib
import math

import pytest

from dsjax.plan.calibration import HOST, LEAST, RATE, TPOT, blind_predictions
from tools import plan_score
from tools.plan_score import Score, by_device, by_older_rounds, groups, interval_score, read, table

COLUMNS = "round,run,kind,distance,predicted,low,high,measured"


@pytest.fixture
def blind(tmp_path):
    """Read predictions from a file of these lines."""

    def make(*lines):
        path = tmp_path / "blind.csv"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return read(path)

    return make


def test_errors_are_relative_to_what_was_measured_and_intervals_are_made_from_older_rounds_alone(blind):
    """Three rounds: one prediction; 19 that were measured 2 % to 38 % above; and two, one within what was seen before."""
    lines = [COLUMNS, f"first,A,{RATE},{HOST},100,80,125,200"]
    lines += [f"second,B{n},{RATE},{HOST},100,90,110,{100 + 2 * n}" for n in range(1, 20)]
    every = blind(*lines, f"third,C1,{RATE},{HOST},50,40,60,55", f"third,C2,{RATE},{HOST},50,40,60,25")
    rounds = {
        name: [pair for pair in by_older_rounds(every) if pair[0].round == name]
        for name in ("first", "second", "third")
    }
    a, b, c = map(Score.of, rounds.values())
    assert (c.count, c.inside) == (2, 0.5)
    assert (c.error, c.bias) == pytest.approx(((5 / 55 + 1) / 2, (-5 / 55 + 1) / 2))
    # 20 errors of 1.02 to 1.38 and 2: the conformal ranks of 90 % are the least and the largest.
    assert c.width == pytest.approx(2 / 1.02)
    assert math.isnan(a.score), "nothing is older"
    assert math.isnan(b.score), f"one older prediction, and {LEAST} are needed"
    lines = table(every).splitlines()
    assert f"| *second* | {b.cells()} |" in lines
    assert [line for line in lines if line.startswith(f"| rate, {HOST} | 22 |")]


def test_an_interval_score_is_the_width_and_twenty_times_the_miss():
    for value, miss in ((1.0, 0), (4.0, math.log(2)), (0.25, math.log(2))):
        assert interval_score(value, (0.5, 2.0)) == pytest.approx(math.log(4) + 20 * miss)


def test_tpot_is_scored_by_device_and_weights_where_there_are_enough_predictions(blind):
    lines = [f"first,A{n},{TPOT},{HOST},90,80,100,100,b200,fp4" for n in range(3)]
    lines += [f"first,B,{TPOT},{HOST},50,40,60,100,b200,fp8", f"first,C,{RATE},{HOST},50,40,60,100,b200,fp4"]
    every = blind(f"{COLUMNS},device,weights", *lines)
    rows = {name: len(list(filter(holds, every))) for name, holds in by_device(every).items()}
    assert rows == {f"TPOT, B200 in FP4, {HOST}": 3, f"TPOT, B200 in FP8, {HOST}": 1}
    assert list(by_device(every, least=2)) == [f"TPOT, B200 in FP4, {HOST}"]
    assert f"| TPOT, B200 in FP4, {HOST} | 3 | 10.0% | -10.0% | – | – | – |" in table(every).splitlines()


def test_every_committed_prediction_is_in_a_round_and_a_kind_and_has_not_changed():
    """A prediction that is changed after its measurement is known is no prediction. A new round adds rows."""
    blind = read()
    assert len(blind) == len(blind_predictions()) == 2546
    parts = list(groups(blind).values())[2:-1]
    assert all(sum(holds(b) for holds in parts) == 2 for b in blind)
    lines = plan_score.DATA.read_text(encoding="utf-8").splitlines()[1:]
    said = [line.split(",")[:8] for line in lines[:2546]]
    assert hashlib.sha256(repr(said).encode()).hexdigest()[:16] == "2acee6336d0731f4"


def test_the_page_has_todays_scores():
    assert plan_score.PAGE.read_text(encoding="utf-8") == plan_score.page(), "python tools/plan_score.py --page"
