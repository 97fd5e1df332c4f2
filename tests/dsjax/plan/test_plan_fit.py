"""Whether a launch fits, by each engine's own division of memory; and what `dsjax plan fit` says of public launches."""

import hashlib

import pytest
from plan_words import plan_json
from typer.testing import CliRunner

from dsjax.cli.main import app
from dsjax.errors import UserError
from dsjax.plan.fit import DOES_NOT_FIT, Launch, fit
from dsjax.plan.layout import parse_layout
from dsjax.plan.memory import cache_bytes_per_token, weight_bytes
from dsjax.plan.precision import PRECISIONS
from tools.plan_data.fit_incidents import rows, score

GIB = 2**30


def _judged(config, mesh="tp=8", precision="fp8", **launch):
    launch = {"engine": "vllm", "device_bytes": 140 * GIB} | launch
    return fit(config, parse_layout(mesh, 0, config), PRECISIONS[precision], Launch(**launch))


def test_671_gb_do_not_fit_where_the_devices_have_less(v3):
    for engine in ("vllm", "sglang", "tensorrt-llm", "dsjax"):
        verdict = _judged(v3, engine=engine, device_bytes=80 * GIB)
        assert (verdict.words, verdict.fractions) == ("does not fit", None)
        assert _judged(v3, engine=engine).words == "fits"


def test_a_profiled_cache_is_what_is_left_by_a_tokens_size_and_must_hold_the_longest_request_to_the_token(v3):
    verdict = _judged(v3)
    weights, step, _, outside = verdict.parts
    assert weights.to_json()["kind"] == "exact"
    assert all(part.source for part in verdict.parts[1:])
    assert "DeepEP" in _judged(v3, mesh="dp=16", deepep=True).parts[3].source
    left, held = 0.9 * 140 * GIB - weights - step - outside, verdict.cache_tokens
    assert held == pytest.approx(left / cache_bytes_per_token(v3, PRECISIONS["fp8"]))
    assert _judged(v3, longest=int(held)).fits
    assert not _judged(v3, longest=int(held) + 1).fits
    assert _judged(v3, engine="sglang", longest=10**9).fits  # SGLang starts, and refuses such a request later


def test_of_a_mesh_with_stages_a_token_is_held_in_the_layers_of_one(v3):
    """V3's 61 layers are 31 and 30, so that the cache has room for nearly twice as many tokens as bytes of all layers would say."""
    verdict = _judged(v3, mesh="pp=2,tp=8", engine="dsjax")
    cache = verdict.conditions[0].left + 4096 * 31 * 1152
    assert verdict.cache_tokens == pytest.approx(cache / (31 * 1152))


def test_a_static_fraction_too_high_leaves_no_room_for_a_step_and_one_too_low_none_for_weights(v3):
    verdict = _judged(v3, engine="sglang")
    low, high = verdict.fractions
    assert 0.5 < low < 0.7 < 0.9 < high < 0.99
    assert not _judged(v3, engine="sglang", fraction=low - 0.01).fits
    assert not _judged(v3, engine="sglang", fraction=high + 0.01).fits
    assert _judged(v3, engine="sglang", fraction=low).fits
    assert _judged(v3, engine="sglang", fraction=high).words == "probably fits", "it depends on assumptions"
    assert _judged(v3, engine="sglang", fraction=0.8).words == "fits"
    with pytest.raises(UserError, match="--memory-fraction is 90, expected a number above 0 and at most 1"):
        _judged(v3, fraction=90)
    longer = _judged(v3, engine="sglang", prefill_tokens=32768)
    assert longer.fractions[1] < high


def test_absorbed_matrices_are_counted_once_more_for_engines_that_keep_both(v3):
    weights = sum(weight_bytes(v3, parse_layout("tp=8", 0, v3), PRECISIONS["fp8"]).values())
    of = {engine: _judged(v3, engine=engine).parts[0] for engine in ("dsjax", "vllm")}
    assert of["dsjax"] == weights
    assert of["vllm"] - weights == 61 * 16 * 512 * (128 + 128) * 2


@pytest.mark.parametrize("engine", ["sglang", "vllm", "dsjax"])
def test_the_fullest_stage_has_whole_layers_and_its_step_is_that_of_its_own_devices(v3, engine):
    """A pipeline's other stages hold no part of its experts' arrays."""
    parts = (_judged(v3, mesh=mesh, engine=engine).parts for mesh in ("tp=8", "pp=4,tp=8"))
    (whole, whole_step, *_), (staged, staged_step, *_) = parts
    # Of 58 layers with experts, which are nearly all of it, the fullest has 16.
    assert 15 / 58 * whole < staged < 16 / 58 * whole
    assert staged_step == whole_step


def test_the_command_says_what_lacks_and_ends_with_3():
    found = CliRunner().invoke(app, ["plan", "fit", "--cluster", "h100-32", "--mesh", "tp=8", "--engine", "vllm"])
    assert found.exit_code == DOES_NOT_FIT
    assert "does not fit" in found.output
    assert "no memory fraction fits" in found.output
    body = plan_json("fit", "--cluster", "h200-8", "--mesh", "tp=8", "--engine", "vllm")
    assert body["fits"]
    assert body["fractions_that_fit"][0] <= body["memory_fraction"]
    assert body["device_bytes"] == 143771 * 2**20


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["fit"], "plan fit is about one layout; give it, such as --mesh tp=8"),
        (["--memory-fraction", "0.8"], "No such option: --memory-fraction"),
        (["fit", "--mesh", "tp=8", "--max-devices", "4"], "No such option: --max-devices"),
        (["fit", "--mesh", "tp=8", "--mtp", "1", "--model", "moonlight"], "the model has no MTP module"),
        (["fit", "--mesh", "tp=8", "--context", "163841"], "the model has positions for 163840"),
        (["fit", "--mesh", "tp=8", "--engine", "vllm", "--precision", "int8"], "vllm does not load block-wise INT8"),
        (["fit", "--mesh", "dp=64"], "--mesh dp=64 has 64 devices, and h100-32 has 32"),
    ],
)
def test_questions_that_do_not_go_together_are_one_line(options, said):
    found = CliRunner().invoke(app, ["plan", *options])
    assert found.exit_code != 0
    assert said in " ".join((found.output + str(found.exception)).split())


def test_verdicts_are_those_that_were_committed_most_are_right_today_too_and_none_refuses_what_fitted():
    """A verdict that is changed after its outcome is known is no prediction."""
    asked = [[value for name, value in row.items() if name not in ("fitted", "happened")] for row in rows()]
    assert hashlib.sha256(repr(asked).encode()).hexdigest()[:16] == "41f31d1129a0fe7c"
    assert all(row["fitted"] in ("yes", "no", "") and row["happened"] for row in rows())
    assert score()["committed"] == (29, 36)
    assert score()["today"][0] >= 29
    assert score("yes") == {"committed": (24, 24), "today": (24, 24)}
