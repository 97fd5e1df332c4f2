"""Whether a launch fits: each engine's own division of memory, judged before it is started."""

import json

import pytest
from typer.testing import CliRunner

from dsjax.cli.main import app
from dsjax.errors import UserError
from dsjax.plan.fit import DOES_NOT_FIT, Launch, fit
from dsjax.plan.layout import parse_layout
from dsjax.plan.memory import cache_bytes_per_token, weight_bytes
from dsjax.plan.precision import PRECISIONS

GIB = 2**30


def _judged(config, mesh="tp=8", precision="fp8", **launch):
    launch = {"engine": "vllm", "device_bytes": 140 * GIB} | launch
    return fit(config, parse_layout(mesh, 0, config), PRECISIONS[precision], Launch(**launch))


def test_671_gb_do_not_fit_where_the_devices_have_less(v3):
    for engine in ("vllm", "sglang", "tensorrt-llm", "dsjax"):
        verdict = _judged(v3, engine=engine, device_bytes=80 * GIB)
        assert (verdict.words, verdict.fractions) == ("does not fit", None)
        assert _judged(v3, engine=engine).words == "fits"


def test_a_profiled_cache_must_hold_the_longest_request_to_the_token(v3):
    held = _judged(v3).cache_tokens
    assert _judged(v3, longest=int(held)).fits
    assert not _judged(v3, longest=int(held) + 1).fits
    assert _judged(v3, engine="sglang", longest=10**9).fits  # SGLang starts, and refuses such a request later


def test_of_a_mesh_with_stages_a_token_is_held_in_the_layers_of_one(v3):
    """V3's 61 layers are 31 and 30, so that the cache has room for nearly twice as many tokens as bytes of all layers would say."""
    verdict = _judged(v3, mesh="pp=2,tp=8", engine="dsjax")
    (first, _) = verdict.conditions
    cache = first.left + 4096 * 31 * 1152
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
    layout = parse_layout("tp=8", 0, v3)
    weights = sum(weight_bytes(v3, layout, PRECISIONS["fp8"]).values())
    of = {engine: _judged(v3, engine=engine).parts[0] for engine in ("dsjax", "vllm")}
    assert of["dsjax"] == weights
    assert of["vllm"] - weights == 61 * 16 * 512 * (128 + 128) * 2


def test_cache_tokens_are_what_is_left_by_the_tokens_size(v3):
    verdict = _judged(v3)
    weights, step, _, outside = verdict.parts
    left = 0.9 * 140 * GIB - weights - step - outside
    assert verdict.cache_tokens == pytest.approx(left / cache_bytes_per_token(v3, PRECISIONS["fp8"]))


def test_the_fullest_stage_of_a_pipeline_has_whole_layers(v3):
    weights = [_judged(v3, stages=stages).parts[0] for stages in (1, 4)]
    assert weights[0] / 4 < weights[1] < weights[0] / 4 * 16 / 15


def test_the_command_says_what_lacks_and_ends_with_3():
    found = CliRunner().invoke(app, ["plan", "fit", "--cluster", "h100-32", "--mesh", "tp=8", "--engine", "vllm"])
    assert found.exit_code == DOES_NOT_FIT
    assert "does not fit" in found.output
    assert "no memory fraction fits" in found.output
    found = CliRunner().invoke(
        app, ["plan", "fit", "--cluster", "h200-8", "--mesh", "tp=8", "--engine", "vllm", "--json", "-"]
    )
    assert found.exit_code == 0
    body = json.loads(found.output)
    assert body["fits"]
    assert body["fractions_that_fit"][0] <= body["memory_fraction"]
    assert body["device_bytes"] == 143771 * 2**20


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["fit"], "plan fit is about one layout; give it, such as --mesh tp=8"),
        (["--memory-fraction", "0.8"], "No such option: --memory-fraction"),
        (["fit", "--mesh", "tp=8", "--request-rate", "3"], "No such option: --request-rate"),
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
