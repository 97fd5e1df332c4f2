"""Blind rows that are predicted again: their settings, and how far today's planner is off."""

import math
import statistics

import pytest

from dsjax.plan.calibration import HOST, RATE, TPOT
from tools.plan_data import replay
from tools.plan_data.replay import answer, mean_values, read, replayed


def run(**given):
    settings = {"device": "b200", "engine": "sglang", "weights": "fp8", "mesh": "tp=8,ep=1"}
    settings |= {"prompt": "1024", "output": "1024", "users": "32", "drafts": "0"}
    settings |= {"step": "32768", "fraction": "0.82", "first_prompt": "warm"}
    settings |= dict.fromkeys(("prefill", "running", "sent", "prefill_tables", "tables"), "")
    return replay.Run.of(settings | given)


def test_a_row_is_read_with_both_sides_and_what_its_recipe_says():
    apart = run(prefill="4 x dp=4", mesh="1 x dp=32", running="64", step="8192", drafts="2")
    assert (apart.prefill, apart.decode, apart.drafts) == ((4, "dp=4"), (1, "dp=32"), 2)
    assert (apart.running, apart.step) == (64, 8192)
    assert run().decode == (1, "tp=8,ep=1")
    assert run().running == math.inf


def test_prompts_are_as_long_as_the_server_most_likely_counted_them():
    assert answer(run(sent="5152")).decode.workload.input.mean == pytest.approx(5152 * 0.9)
    assert answer(run(sent="5152"), "as_sent").decode.workload.input.mean == pytest.approx(1024 * 0.9)


def test_each_side_has_the_tables_of_its_engines_version():
    tables = {"prefill_tables": "tensorrt-llm-1.2.0rc5 without experts_spread", "tables": "tensorrt-llm-1.2.0rc5"}
    apart = answer(run(engine="trt", prefill="2 x tp=8", mesh="1 x dp=8", **tables))
    prefill, decode = (side.options.operators for side in (apart.prefill, apart.decode))
    assert prefill.folder == decode.folder != answer(run()).decode.options.operators.folder
    assert (prefill.left_out, decode.left_out) == ({"experts_spread"}, set())


def test_no_more_requests_run_than_the_cache_holds():
    crowd = run(prompt="8192", users="512", running="512")
    alone = answer(crowd)
    decode = alone.decode
    assert alone.batch * decode.workload.context > decode.memory.cache_tokens
    assert mean_values(crowd)[TPOT] < 0.9e3 * alone.tpot
    few = run(users="32")
    assert mean_values(few)[TPOT] == 1e3 * answer(few).tpot


def test_a_loop_that_is_played_is_near_its_mean_values():
    few = run(users="4", mesh="tp=8,ep=8")
    loop, means = replay.played(few), mean_values(few)
    assert loop[RATE] == pytest.approx(means[RATE], rel=0.1)
    assert loop[TPOT] == pytest.approx(means[TPOT], rel=0.1)
    assert set(loop) > {RATE, TPOT}


def test_a_mechanism_that_is_left_out_is_that_of_a_published_engine():
    held = run(engine="trt", mesh="dp=8")
    whole, without = (answer(*given).decode.options.engine for given in ((held,), (held, "holds_prompts")))
    assert set(replay.SWITCHES) <= set(vars(whole))
    assert (whole.holds_prompts, without.holds_prompts) == (True, False)


def test_rows_of_a_new_round_are_predicted_with_their_settings_kept(tmp_path):
    row = next(row for row in read() if row["round"] == "all left" and row["kind"] == RATE)
    asked = row | {"round": "new"} | dict.fromkeys(("predicted", "low", "high", "measured"), "")
    replay.write(tmp_path / "new.csv", [asked])
    (found,) = replayed(read(tmp_path / "new.csv"))
    assert 0 < float(found["low"]) == float(found["predicted"]) == float(found["high"])
    assert found["measured"] == ""
    assert {name for name in asked if found[name] != asked[name]} == {"predicted", "low", "high"}


def test_the_table_of_mechanisms_has_each_of_them():
    rows = [row for row in read() if row["round"] == "drafts again" and row["run"] == "E1"]
    lines = replay.mechanisms(rows).splitlines()
    assert lines[0] == "| left out | rate | tpot |"
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines[2:]] == ["nothing", *replay.MECHANISMS]


@pytest.mark.slow
def test_the_newest_round_on_one_host_is_predicted_as_well_as_blind():
    """Guards the planner: `all left` was 16.9 % off in rates, for cold engines that the mean value lacks, and 7.0 % in TPOT."""
    errors = {RATE: [], TPOT: []}
    for row in replayed(row for row in read() if (row["round"], row["distance"]) == ("all left", HOST)):
        errors[row["kind"]].append(abs(float(row["predicted"]) / float(row["measured"]) - 1))
    assert {kind: len(each) for kind, each in errors.items()} == {RATE: 134, TPOT: 134}
    assert statistics.mean(errors[RATE]) < 0.18
    assert statistics.mean(errors[TPOT]) < 0.08
