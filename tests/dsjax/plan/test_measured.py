"""Module times in place of published tables: interpolation, what is refused, and that nothing else is mixed in."""

import dataclasses
import json

import msgspec
import pytest
from plan_words import plan
from step_models import step_model

from dsjax.config import load_config
from dsjax.errors import UserError
from dsjax.hardware.this_machine import cpu_name
from dsjax.plan.cluster import load_cluster
from dsjax.plan.figure import Draw, Kind, drawing, spread
from dsjax.plan.layout import parse_layout
from dsjax.plan.measured import Measured, read_measured, widths
from dsjax.plan.measured_step import MeasuredStep
from dsjax.plan.own_cluster import choose_precision, find_cluster
from dsjax.plan.skew import UNIFORM
from dsjax.plan.step import RankWork

EACH = {"norms": 1e-6, "dense MLP": 2e-3, "router": 3e-6, "shared expert": 4e-6, "head": 5e-4}


def row(module, seconds, variant="", once=0.0, **sizes):
    times = {"median_s": seconds, "low_s": seconds * 0.9, "high_s": seconds * 1.2}
    return {"module": module, "variant": variant, "sizes": sizes, **times, "once_s": once}


@pytest.fixture(scope="module")
def demo():
    return load_config("demo")


@pytest.fixture(scope="module")
def body(demo):
    """A file whose times are a constant and a part for each token, of which the planner's sums are known."""
    rows = []
    for tokens in (1, 8, 64, 256):
        rows += [row(module, each * (1 + tokens), once=7e-6, tokens=tokens) for module, each in EACH.items()]
        for variant in ("even", "skewed"):
            rows.append(row("experts", 1e-5 * (1 + tokens), variant, tokens=tokens, experts=64))
        rows.append(row("launch", 8e-5, tokens=tokens))
        sizes = {"rows": tokens, "chunk": 1, "tokens": tokens, "block": 128}
        for context in (127, 1023):
            seconds = 1e-8 * tokens * (context + 1)
            rows.append(row("attention", seconds, "A_CC_ME decode", 1e-4, **sizes, context=context))
        sizes |= {"rows": 1, "chunk": tokens}
        for context in (0, 256, 1024) if tokens >= 64 else ():
            rows.append(row("attention", 1e-7 * tokens * (context + tokens), "CC prefill", **sizes, context=context))
    return {
        "format": "dsjax modules 1",
        "date": "2026-01-01T00:00:00+00:00",
        "device": {"name": cpu_name(), "platform": "cpu", "memory_bytes": 2**34, "hardware": None, "count": 1},
        "ceilings": {"bytes_per_s": 2e10, "flops_per_s": 2e11, "source": "made up for a test"},
        "model": "demo",
        "widths": widths(demo),
        "dtype": "float32",
        "weights": "mixed",
        "kv_cache_dtype": "float32",
        "partial": False,
        "rows": rows,
    }


def read(body):
    return msgspec.convert({"path": "m.json", **body}, Measured)


@pytest.fixture(scope="module")
def model(demo, body):
    def make(body=body):
        measured = read(body)
        precision = choose_precision("auto", "auto", demo, measured)
        given = find_cluster(None, measured), parse_layout("dp=1", 0, demo), precision
        return step_model(demo, *given, UNIFORM, MeasuredStep, measured=measured)

    return make


def test_a_step_is_the_sum_of_its_modules(demo, model):
    """At a timed size nothing is interpolated: layers × each, once for each place in the program, and the launch."""
    [step] = spread(lambda: [model().decode(8, 127)])
    layers, moe = demo.num_hidden_layers, demo.num_moe_layers
    expected = layers * EACH["norms"] * 9 + 2 * 7e-6  # stands in both stacks of layers
    expected += EACH["dense MLP"] * 9 + EACH["head"] * 9 + 2 * 7e-6
    expected += moe * (EACH["router"] + EACH["shared expert"]) * 9 + 2 * 7e-6 + moe * 1e-5 * 9
    expected += layers * 1e-8 * 8 * 128 + 2 * 1e-4 + 8e-5
    assert step == pytest.approx(expected, rel=1e-9)
    assert step.low < step < step.high
    with drawing(Draw(lambda name: 0.0 if "measured" in name else 1.0)):
        assert model().decode(8, 127) == step, "only what was measured moves it"


def test_without_a_module_s_rows_the_published_table_stays(body, model):
    fewer = model(body | {"rows": [one for one in body["rows"] if one["module"] != "head"]})
    [step] = spread(lambda: [fewer.decode(8, 127)])
    assert step.kinds & Kind.ASSUMPTION
    parts, whole = (one.decode_parts(8, 127) for one in (fewer, model()))
    assert {name for name in whole if parts[name] != whole[name]} == {"head"}


def test_attention_is_interpolated_in_rows_and_whole_blocks(body):
    """The file's times are proportional to rows × positions, so that straight lines are exact; 200 positions are 2 blocks of 128."""
    find = read(body).attention
    for rows, context, blocks in ((8, 127, 1), (8, 200, 2), (64, 895, 7), (1, 511, 4)):
        found = find("A_CC_ME", rows, 1, context, applications=5, loops=0)
        straight = 5 * 1e-8 * rows * blocks * 128
        assert found.low <= straight <= found.high * (1 + 1e-9)
    between = find("A_CC_ME", 30, 1, 511, applications=1, loops=0)
    assert between.low < 1e-8 * 30 * 512 < between.high


def test_a_prompt_is_taken_in_the_longest_timed_chunks(demo, model):
    """512 tokens are two chunks of 256 that begin, on average, behind 128 positions."""
    found = model().prefill_parts(512, prompt=512)["attention"]
    one = 1e-7 * 256 * (128 + 256)
    assert found == pytest.approx(2 * demo.num_hidden_layers * one * 1.03, rel=0.1)  # 1.03: uneven prompts


def test_a_rank_without_work_waits_for_what_was_timed_of_the_others(model):
    step, work = model(), RankWork(8, 8 * 127)
    alone, beside = step.step([work]), step.step([work, RankWork()])
    assert (beside["attention"], beside["norms"]) == (alone["attention"], alone["norms"])


def test_a_figure_beyond_the_file_is_an_assumption(model):
    def seen(batch, context):
        with drawing(Draw()) as draw:
            model().decode(batch, context)
        return {name: figure.kinds for name, figure in draw.seen.items() if "measured" in name}

    assert set(seen(256, 127).values()) == {Kind.MEASURED}
    assert seen(512, 127)["router, measured, and beyond what was timed"] == Kind.MEASURED | Kind.ASSUMPTION
    assert seen(8, 1900)["attention, measured, and beyond what was timed"] == Kind.MEASURED | Kind.ASSUMPTION


def test_the_longest_context_of_a_batch_is_what_the_loop_runs_to(model):
    even, uneven = (model().decode_parts(64, 500, uneven=cv) for cv in (0.0, 0.3))
    assert uneven["attention"] > 1.3 * even["attention"]
    assert uneven["head"] == even["head"]


def test_heads_over_tp_keep_the_published_times(demo, body):
    """What was timed has all heads; only what is whole on every device is taken."""
    measured, cluster = read(body), dataclasses.replace(load_cluster("h100-32"), hosts=1)
    given = demo, cluster, parse_layout("tp=2", 0, demo), choose_precision("auto", "auto", demo, measured), UNIFORM
    steps = step_model(*given, kind=MeasuredStep, measured=measured), step_model(*given)
    timed, plain = (step.decode_parts(8, 127) for step in steps)
    assert timed["attention"] == plain["attention"]
    assert timed["router"].kinds == Kind.MEASURED


def test_a_file_of_another_device_is_refused_and_this_machine_is_the_one_that_was_timed(body):
    mine = read(body)
    devices = {"name": "NVIDIA H200", "platform": "gpu", "hardware": "h200"}, {"name": "Another CPU, 4 cores"}
    h200, other = (read(body | {"device": body["device"] | device}) for device in devices)
    assert find_cluster("h200-8", h200).name == "h200-8"
    assert find_cluster(None, h200).hardware.key == "h200"
    assert find_cluster("this-machine", mine).num_devices == 1
    assert find_cluster(None, other).hardware.name == "Another CPU, 4 cores"
    for name, measured, why in (
        ("h200-8", mine, r"taken on .*, and h200-8 has H200"),
        ("h100-32", h200, "h100-32 has H100"),
        ("this-machine", other, "Another CPU, 4 cores, and this machine is"),
        ("this-machine", None, "needs --measured"),
    ):
        with pytest.raises(UserError, match=why):
            find_cluster(name, measured)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: [], "Expected `object`, got `array`"),
        (lambda body: body | {"format": "another"}, "Invalid enum value 'another' - at `\\$.format`"),
        (lambda body: body | {"rows": [body["rows"][0] | {"median_s": "1"}]}, r"`str` - at `\$.rows\[0\].median_s`"),
        (lambda body: body | {"rows": 5}, "Expected `array`, got `int`"),
        (lambda body: {k: v for k, v in body.items() if k != "device"}, "missing required field `device`"),
        (lambda body: body | {"widths": body["widths"] | {"hidden_size": 7168}}, r"hidden_size 7168 \(here 256\)"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_words(demo, body, tmp_path, change, message):
    path = tmp_path / "m.json"
    path.write_text(json.dumps(change(body)))
    with pytest.raises(UserError, match=message):
        read_measured(path, demo)


def test_the_command_plans_for_the_machine_that_was_timed(body, tmp_path):
    path = tmp_path / "m.json"
    path.write_text(json.dumps(body))
    found = plan("--model", "demo", "--measured", path, "--input", "300", "--output", "100", "--explain", "tpot")
    assert "on measured device" in found
    assert f"{path}: 2026-01-01" in found.replace("\n", "")
    assert "dsjax serve --model demo --mesh dp=1" in found
