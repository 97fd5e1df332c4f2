"""Two layouts side by side: what they share cancels, what decides is named, and the command line and Python say the same. Also `api`."""

import json
import re
from pathlib import Path

import pytest
from plan_words import plan, plan_json

import dsjax.plan
from dsjax.errors import UserError
from dsjax.plan.comparison import compare, estimate, link_bytes, ratio_of
from dsjax.plan.explain import label, labels
from dsjax.plan.figure import Figure
from dsjax.plan.recipe import recipe

ROOT = Path(__file__).parents[3]
ABOUT = {"engine": "published", "input_tokens": 2000, "output_tokens": 500}


@pytest.fixture(scope="module")
def both():
    return dsjax.plan.compare("h20-32", "dp=32", "dp=4,tp=8", **ABOUT)


def width(figure):
    return figure.high / figure.low


def test_a_layout_beside_itself_is_as_good(ask):
    ratios = {one.metric: one for one in compare(ask(), ["tp=8", "tp=8"], draws=8).pairs[0].ratios}
    assert all(one.value == 1 and not one.is_decided for one in ratios.values())
    assert width(ratios["ttft"].value) == 1, "whatever is assumed, it is assumed of both"
    assert ratios["throughput"].value.low < 1 < ratios["throughput"].value.high, "blind ratios were not exact"
    assert ratios["throughput"].better == pytest.approx(0.5, abs=0.01)


def test_the_ratio_of_two_layouts_is_surer_than_either(both):
    a, b = both.candidates
    [ttft] = [one for one in both.pairs[0].ratios if one.metric == "ttft"]
    assert width(ttft.value) < width(a.ttft) * width(b.ttft) * 0.8
    assert ttft.value == pytest.approx(a.ttft / b.ttft)
    assert ttft.is_decided
    assert ttft.better == 0, "dp=32 has eight times the tokens to compute before a prompt's first one"


def test_the_other_way_round_is_the_inverse(both):
    a, b = both.candidates
    for metric in ("throughput", "tpot"):
        there, back = ratio_of(a, b, metric), ratio_of(b, a, metric)
        assert there.value == pytest.approx(1 / back.value)
        assert there.better == pytest.approx(1 - back.better)
        assert there.value.low == pytest.approx(1 / back.value.high, rel=0.05)


def test_what_decides_is_named_with_what_would_measure_it(both):
    deciding = both.pairs[0].deciding
    assert len(deciding) == 3
    usual = both.pairs[0].ratios[0].value
    moves = [abs(one.high - one.low) for one in deciding]
    assert moves == sorted(moves, reverse=True)
    assert all(min(one.low, one.high) <= usual * 1.001 for one in deciding)
    assert all("dsjax bench" in one.command or "recordings" in one.command for one in deciding)


def test_bytes_cross_the_links_that_a_layout_has(both, ask):
    wide, narrow = (link_bytes(one.decode, one.batch) for one in both.candidates)
    assert wide["network"] > 3 * narrow["network"], "rows for 24 of 32 ranks; the sums of tp=8 stay in a host"
    alone = estimate(ask("h200-8"), "tp=8")
    sent = link_bytes(alone.decode, alone.batch)
    assert sent["network"] == 0
    assert sent["scale_up"] >= 4 * 61 * alone.batch * alone.decode.config.hidden_size * 2 * 7 / 8


def test_a_recipe_is_compared_as_it_was_written(ask, tmp_path):
    asked = {"input_tokens": 1000, "output_tokens": 500, "concurrency": 64.0}
    candidate, path = dsjax.plan.estimate("h200-8", "tp=8", **asked), tmp_path / "recipe.json"
    path.write_text(json.dumps(recipe("deepseek-v3", ask(concurrency=64.0), candidate)))
    again = estimate(dsjax.plan.api.question("h200-8", **asked), str(path))
    assert (again.name(), again.batch) == (candidate.name(), candidate.batch)
    assert again.throughput == pytest.approx(candidate.throughput, rel=1e-6)


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        (["dp=8"], "1 layout given, expected at least two"),
        (["dp=8", "dp=3"], "--mesh dp=3"),
        (["dp=8", "none.json"], "none.json cannot be read as a recipe: .* expected what dsjax plan recipe wrote"),
    ],
)
def test_a_layout_that_cannot_be_is_one_message(ask, layouts, message):
    with pytest.raises(UserError, match=message):
        compare(ask(), layouts)


@pytest.mark.parametrize("told", [[], {}, {"mesh": 8}, {"mesh": "tp=8", "instances": 1, "redundant_experts": 0}])
def test_a_recipe_that_lacks_a_field_is_one_message(ask, told, tmp_path):
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({"services": [], "calibrated": None, "workload": {}, "expected": told}))
    with pytest.raises(UserError, match=r"recipe.json is no recipe .*; expected what dsjax plan recipe wrote"):
        compare(ask(), [str(path), "dp=8"])


def test_inputs_have_the_names_that_their_users_know(both):
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "dsjax" / "plan").rglob("*.py"))
    source += (ROOT / "configs" / "assumptions.toml").read_text(encoding="utf-8")
    words = {name: re.split(r"combine, |dispatch, ", name)[-1] for name in labels()}
    assert [name for name, last in words.items() if source.count(f'"{name}"') + source.count(last) < 2] == []
    assert label(Figure(1.0, name="host")) == "CPU overhead per step"
    assert label(Figure(1.0, name="network latency")) == "network latency"


def test_the_command_shows_both_and_writes_json():
    words = ["compare", "tp=8", "dp=8", "--cluster", "h200-8", "--input", "1000", "--output", "100"]
    shown = plan(*words)
    assert "A ÷ B, with 90 % intervals" in shown
    assert re.search(r"(A|B) is better, (\d+|> 99) % sure|undecided \((A|B) with \d+ %\)", shown)
    assert "order of tokens/s; those that move the ratio most:" in shown
    found = plan_json(*words)
    assert [one["mesh"] for one in found["layouts"]] == ["tp=8", "dp=8"]
    assert set(found["pairs"][0]["ratios"]) == {"throughput", "tpot", "ttft"}
    assert len(found["pairs"][0]["deciding"]) == 3


def test_sums_over_two_hosts_travel_inside_them_and_once_between(ask):
    """NCCL adds inside a host, between hosts, and hands out inside: 7/8 there and back over NVLink, 1/8 × 1/2 over each card."""
    instance = estimate(ask("h200-16"), "tp=16,ep=1").decode
    sent, config = link_bytes(instance, 1.0), instance.config
    whole = 4 * config.num_hidden_layers * config.hidden_size * 2
    assert sent["scale_up"] == pytest.approx(whole * 7 / 8)
    assert sent["network"] == pytest.approx(whole / 8 / 2)
