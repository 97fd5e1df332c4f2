"""`dsjax bench modules`: that what is timed is what serves, on a model small enough for a test."""

import dataclasses
import gc
import json
import math
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from dsjax.bench.modules import routed
from dsjax.bench.modules import setting as settings
from dsjax.bench.modules.attention import attention_cases
from dsjax.bench.modules.dense import layer_cases
from dsjax.bench.modules.grid import cases
from dsjax.bench.modules.one_rank import OneRankPlan, extrapolate, layer_stack, one_rank_cases
from dsjax.bench.modules.options import MODULES, ModelOptions, ModuleGrid
from dsjax.bench.modules.routed import draw_dispatch, route_randomly
from dsjax.bench.modules.run import run_cases
from dsjax.bench.modules.setting import Ceilings, LayerStack, hardware_of, make_setting
from dsjax.bench.modules.timing import Budget, PreparedCase
from dsjax.cli import app
from dsjax.config import load_config
from dsjax.config.layers import LayerKind
from dsjax.errors import UserError
from dsjax.hosts.rendezvous import GroupError
from dsjax.model.forms import FORMS
from dsjax.model.transformer import MLP, Pass, XlaProducts, attention_of, rotation_at
from dsjax.options import OptionError

FAST = Ceilings(1e12, 1e15, "test")
NO_TIME = Budget(0.0, 1)


@pytest.fixture(scope="module")
def setting():
    return make_setting(ModelOptions(model="demo", max_model_len=64))


@pytest.fixture(scope="module")
def v4():
    return make_setting(ModelOptions(model="demo-v4", max_model_len=512, kernels="plain"))


@pytest.fixture(scope="module")
def v3():
    return make_setting(ModelOptions(weights="bf16"))


@pytest.mark.slow
def test_every_module_can_be_timed(setting, monkeypatch):
    monkeypatch.setattr(routed, "SKEWS", {"even": 0.0})  # `test_one_rank_of_many…` has the other
    grid = ModuleGrid(tokens="16", contexts="16", mesh="dp=2", forms="CC")
    found = run_cases(setting, cases(setting, grid), FAST, NO_TIME, 60.0)
    assert {row.case.module for row in found.rows} == set(MODULES) - {"residual"}, "addition is part of others"
    assert not found.skipped
    assert all(row.times.median > 0 for row in found.rows)


@pytest.mark.slow
def test_what_v4_has_of_its_own_can_be_timed(v4):
    grid = ModuleGrid(only="launch,inputs,attention,residual,router,head", tokens="16", contexts="16")
    found = run_cases(v4, cases(v4, grid), FAST, NO_TIME, 60.0)
    assert not found.skipped
    timed = {
        row.case.module: {one.case.variant for one in found.rows if one.case.module == row.case.module}
        for row in found.rows
    }
    kinds = {f"{kind} {phase}" for kind in ("window", "csa", "hca") for phase in ("decode", "prefill")}
    alone = {name: {""} for name in ("launch", "inputs", "residual", "head")}
    assert timed == alone | {"attention": kinds, "router": {"", "hash"}}
    with pytest.raises(UserError, match="--forms chooses forms of MLA, and deepseek_v4 has none"):
        list(cases(v4, ModuleGrid(only="attention", forms="CC")))


def test_the_grid_has_every_form_that_has_kernels_and_every_method():
    found = list(cases(make_setting(ModelOptions(model="demo")), ModuleGrid(mesh="dp=8")))
    forms = {case.variant for case in found if case.module == "attention"}
    assert forms == {f"{form} {phase}" for form in ("CC", "A_CC_ME") for phase in ("decode", "prefill")}
    assert {case.sizes["method"] for case in found if case.module == "dispatch"} == {"gather", "padded", "ragged"}
    assert {case.sizes["tokens"] for case in found if case.module == "experts"} == {1, 8, 64, 512, 4096}


def test_v3_s_work_is_its_own(v3):
    """Known figures: an expert has 44,040,192 parameters, an attention layer 187,107,328; nothing is allocated to say so."""
    gc.collect()  # what another test has left is not freed meanwhile
    before = sum(array.nbytes for array in jax.live_arrays())
    every = cases(v3, ModuleGrid(tokens="1,512", forms="A_CC_ME", experts=8))
    found = {(c.module, c.variant, c.sizes["tokens"]): c for c in every}
    experts = found["experts", "even", 512]
    assert experts.work.weight_bytes == 8 * 44_040_192 * 2
    assert experts.work.flops == 2 * experts.sizes["pairs"] * 44_040_192
    assert found["attention", "A_CC_ME decode", 1].work.weight_bytes == 187_107_328 * 2
    assert found["head", "", 1].work.weight_bytes == (926_679_040 + 7168) * 2
    assert sum(array.nbytes for array in jax.live_arrays()) == before


def test_v4_flash_s_work_is_its_own():
    """A window layer's attention has 106,954,752 weights in matrices, an expert 25,165,824."""
    flash = make_setting(ModelOptions(model="deepseek-v4-flash", weights="bf16"))
    grid = ModuleGrid(only="attention,experts,residual,router", tokens="512", contexts="1024", experts=8)
    found = {(c.module, c.variant): c for c in cases(flash, grid)}
    small = 2 * (1024 + 512) + 4 * 64  # norms, and sinks in float32
    assert found["attention", "window decode"].work.weight_bytes == 2 * 106_954_752 + small
    assert found["experts", "even"].work.weight_bytes == 8 * 25_165_824 * 2
    assert found["router", "hash"].work.weight_bytes == 2 * 256 * 4096, "and not the table of experts by token"
    assert found["residual", ""].work.flops == 512 * 2 * 2 * (4 * 4096 * 24 + 4 * 4096 * 4)


def test_what_does_not_fit_takes_too_long_or_drowns_in_noise_is_left_out_with_a_line(v3, setting, monkeypatch):
    monkeypatch.setattr("dsjax.bench.modules.timing.seconds_of", lambda run, count: 0.05)
    [usual], [small] = layer_cases(v3, "dense MLP", [1]), layer_cases(setting, "shared expert", [1])
    slow, large = Ceilings(1.0, 1.0, "a very slow device"), dataclasses.replace(usual, memory=10**15)
    idle = dataclasses.replace(small, build=lambda: PreparedCase(lambda count: None))
    for made, case, ceilings, budget, said in (
        (v3, large, FAST, NO_TIME, "needs 1000000.0 GB"),
        (v3, usual, slow, NO_TIME, "--row-limit"),
        (setting, idle, FAST, Budget(seconds=1.0, samples=3), "run it again"),
    ):
        found = run_cases(made, [case], ceilings, budget, 60.0)
        assert not found.rows
        assert said in found.skipped[0][1]


def test_as_many_bytes_go_by_between_two_uses_as_in_a_step(setting, v3):
    small = LayerStack.of(setting, lambda declare: MLP(declare, 256, 32, "shared_width"), 4)
    assert small.depth == 64, "at most so many layers"
    experts = next(case for case in cases(setting, ModuleGrid(only="experts", tokens="1")))
    assert experts.memory >= setting.working_set()
    whole = LayerStack.of(v3, lambda declare: MLP(declare, 7168, 18432, "mlp_width"), 3)
    assert whole.depth == 2, "one layer exceeds every cache, and one layer's scan would be compiled away"


def test_attention_is_the_model_s_own(setting):
    """The timed loop's first layer equals the projections, attention and output that the step computes, in another order."""
    states = []
    for form in ("A_CC_ME", "CC"):
        prepared = next(attention_cases(setting, "mla", 5, FORMS[form], "decode", [(2, 1, 16)])).build()
        prepared.run(1)
        states.append(prepared.state())
    total, cache, layer = states[0]
    assert int(layer) == 1
    assert np.abs(np.asarray(cache["latent"][0])).sum() > 0
    assert not np.asarray(cache["latent"][1]).any(), "each layer writes its own part of the cache"
    # Two forms of the same arithmetic on the same random weights, in float32: rounding only.
    np.testing.assert_allclose(np.asarray(total), np.asarray(states[1][0]), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["window", "csa", "hca"])
def test_v4_s_attention_is_the_model_s_own(v4, kind):
    """The timed loop's first layer on a prompt equals the layer of the plain forward pass, which has no cache."""
    prepared = next(attention_cases(v4, kind, 1, v4.step.decode_form, "prefill", [(1, 300, 0)])).build()
    prepared.run(1)
    stack = LayerStack.of(v4, lambda declare: attention_of(declare, v4.config, kind), 1)
    layer = stack.layer(stack.values(v4.seed), 0)
    rotation = rotation_at(v4.config, jnp.arange(300)[None])
    expected, _ = layer(v4.random((1, 300, v4.config.hidden_size)), Pass(None, rotation, XlaProducts()))
    # The same arithmetic in float32 with other sums.
    np.testing.assert_allclose(np.asarray(prepared.state()[0]), np.asarray(expected), atol=1e-4)


def test_even_routing_sends_a_rank_its_share_and_every_draw_has_distinct_experts(v3):
    """8 of 256 experts: each token of 32 ranks has 8 experts, so that as many pairs arrive as leave, 8 a token of its own."""
    even, skewed = draw_dispatch(v3, 512, 8, 0.0), draw_dispatch(v3, 512, 8, 0.3)
    assert even.pairs == pytest.approx(8 * 512, rel=0.02)  # the rank nearest the mean of 32
    assert skewed.pairs > 1.1 * even.pairs, "the busiest rank of a skewed draw"
    assert even.rows <= even.pairs
    assert (even.mean_load, even.ids.max()) == (8 * 512 / 8, 7)
    assert (even.ids >= 0).any(axis=1).all()
    ids = route_randomly(np.random.default_rng(0), 100, 64, 8, 1.0)
    assert all(len(set(row)) == 8 for row in ids.tolist())
    counts = np.bincount(ids.ravel(), minlength=64)
    assert counts.max() > 4 * counts.min()


def test_weights_are_kept_as_the_engine_keeps_them(setting):
    assert setting.weights == "mixed", "the demo's checkpoint is bf16, and a CPU computes in float32"
    assert setting.dtype == jnp.float32
    assert make_setting(ModelOptions(weights="fp8")).weights == "fp8"


def test_ceilings_are_found_by_the_device_s_name():
    names = ("NVIDIA H200", "NVIDIA GB200", "NVIDIA A100", "Intel(R) Xeon(R) Processor")
    assert [hardware_of(name) for name in names] == ["h200", "gb200", None, None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only": "attention,mpl"}, "mpl"),
        ({"tokens": "0"}, "at least 1"),
        ({"forms": "XX"}, "A_CC_ME"),
        ({"layers": "x"}, "auto"),
        ({"layers": "²"}, "auto"),
        ({"only": "norms", "one_rank_of": 32}, "give one of them"),
    ],
)
def test_a_mistake_is_named_with_what_would_do(options, message):
    with pytest.raises(OptionError, match=message):
        ModuleGrid(**options)


def test_what_was_done_before_an_interrupt_or_before_another_process_went_is_kept(setting):
    first, second = layer_cases(setting, "shared expert", [1, 2])
    endless = dataclasses.replace(second, build=Mock(side_effect=KeyboardInterrupt))
    interrupted = run_cases(setting, [first, endless], FAST, NO_TIME, 60.0)
    agree, shared = Mock(side_effect=GroupError("process 1 has gone away")), dataclasses.replace(second, shared=True)
    failed = run_cases(setting, [first, shared], FAST, NO_TIME, 60.0, agree=agree)
    assert (interrupted.interrupted, failed.partial, str(failed.failure)) == (True, True, "process 1 has gone away")
    assert [[row.case for row in found.rows] for found in (interrupted, failed)] == [[first], [first]]


@pytest.mark.parametrize(("says_no", "expected"), [("possible", ["possible"]), ("built", ["possible", "built"])])
def test_what_another_process_cannot_time_is_left_out_by_all(setting, says_no, expected):
    """A shared case is agreed on before anybody waits in its collectives; a case of one device is this process's own."""
    asked = []

    def agree(what, own):
        asked.append(what)
        return [own, "another process says no" if what == says_no else None]

    own, shared = layer_cases(setting, "shared expert", [1, 2])
    cases = [own, dataclasses.replace(shared, shared=True)]
    found = run_cases(setting, cases, FAST, NO_TIME, 60.0, agree=agree)
    assert [row.case for row in found.rows] == [own]
    assert [reason for _, reason in found.skipped] == ["another process says no"]
    assert asked == expected


@pytest.mark.slow
def test_the_command_prints_tables_and_writes_json(tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "_COPY_BYTES", 16 << 20)
    monkeypatch.setattr(settings, "_SIDE", 512)
    path = tmp_path / "m.json"
    command = f"bench modules --model demo --only norms,head --tokens 4 --seconds 0.01 --json {path}"
    done = CliRunner().invoke(app, command.split(), catch_exceptions=False)
    assert done.exit_code == 0
    assert "head" in done.output
    assert "GFLOP/s" in done.output
    body = json.loads(path.read_text())
    assert (body["format"], body["partial"]) == ("dsjax modules 1", False)
    assert body["widths"]["hidden_size"] == load_config("demo").hidden_size
    assert {row["module"] for row in body["rows"]} == {"norms", "head"}
    for row in body["rows"]:
        assert row["min_s"] <= row["low_s"] <= row["median_s"] <= row["high_s"]
        assert len(row["samples_s"]) >= 3


@pytest.mark.slow
def test_one_rank_of_many_is_reckoned_up_layer_by_layer(setting):
    plan = OneRankPlan.of(setting, 32, 4, "2")
    assert (plan.experts, plan.layers) == (2, 2)
    found = run_cases(setting, one_rank_cases(setting, plan, [16]), FAST, NO_TIME, 60.0)
    assert not found.skipped
    even, skewed = extrapolate(setting, found.rows)
    assert (even.variant, skewed.variant) == ("even", "skewed")
    each = {row.case.module: row.times.median for row in found.rows if row.case.variant in ("", "even")}
    # The demo has one dense layer and four with experts.
    expected = 4 * each["MoE layer"] + each["dense layer"] + each["head"] + each["launch"]
    assert even.seconds == pytest.approx(expected)


@pytest.mark.slow
def test_one_rank_of_v4_has_its_kinds_of_layers(v4):
    plan = OneRankPlan.of(v4, 32, 4, "1")
    found = run_cases(v4, one_rank_cases(v4, plan, [16]), FAST, NO_TIME, 60.0)
    even, _ = extrapolate(v4, found.rows)
    layers = {"window hash-routed layers": 1, "csa MoE layers": 2, "hca MoE layers": 1}
    assert {name: count for name, count, _ in even.parts} == layers | {"launch": 1, "head": 1}
    assert not extrapolate(v4, [row for row in found.rows if not row.case.module.startswith("hca")])


def test_a_rank_s_layer_has_its_experts_and_nothing_of_the_others(v3):
    """8 of 256 experts, the shared one, the router and attention: 44,040,192 × 9 + 1,835,264 + 187,107,328 and two norms."""
    stack = layer_stack(v3, LayerKind("layers", "moe"), 8, 1)
    parameters = sum(math.prod(info.shape) for info in stack.table.infos.values())
    assert parameters == 9 * 44_040_192 + 1_835_264 + 187_107_328 + 2 * 7168


def test_a_rank_that_cannot_be_is_refused(setting):
    for ranks, layers, message in ((7, "auto", "does not divide 64"), (32, "5", "the model has 4 layers")):
        with pytest.raises(UserError, match=message):
            OneRankPlan.of(setting, ranks, 4, layers)
