"""What the sweep over layouts says of runs that differ because of a rounding edge."""

import math
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from layouts import Answer, judge
from rounding_edges import Edges, nearest_edge

from dsjax.model.fp8_product import ActivationScheme
from sharding import emulation, fp8

TOOL = Path(__file__).parents[2] / "tools/check_layouts.py"
# The scale is 1; 6.75 is the edge between 6.5 and 7, of which rounding takes the even one.
ROW = np.array([[448.0, 6.75, 3.0]], np.float32)
ABOVE, BELOW = ROW * 1, np.nextafter(ROW, 0, where=ROW == 6.75, out=ROW.copy())


@pytest.mark.parametrize("asked", ["on the command line", "by the process that started this one", "not at all"])
def test_with_servings_compilation_no_flag_of_the_tests_is_left(asked):
    arguments = ["--serving-compilation"] if asked == "on the command line" else []
    environment = {name: value for name, value in os.environ.items() if name != "DSJAX_SERVING_COMPILATION"}
    if asked == "by the process that started this one":
        environment["DSJAX_SERVING_COMPILATION"] = "1"
    code = "from quick_compilation import QUICK_COMPILATION; print(len(QUICK_COMPILATION))"
    ran = [sys.executable, "-c", code, *arguments]
    found = subprocess.run(
        ran, cwd=TOOL.parents[1] / "tests", env=environment, capture_output=True, text=True, timeout=60
    )
    assert (int(found.stdout) > 0) == (asked == "not at all"), found.stderr


def run_of(row):
    """A run of which the logits are a row as an FP8 product reads it, eight times so large."""

    def make(**kept):
        assert kept == {"activation_scheme": "dynamic"}
        values, scales = ActivationScheme(dynamic=True).quantise(row)
        return Answer(8 * fp8.dequantise(values, scales), [[3]])

    return make


def edges_of(row):
    return Edges(run_of(row), {"activation_scheme": "dynamic"})


def test_values_about_an_edge_are_told_from_values_that_differ():
    quantise = fp8.quantise, ActivationScheme.quantise
    on_an_edge, why = edges_of(ABOVE).explain(run_of(BELOW), "differ")
    assert on_an_edge
    assert why.startswith("differ; without rounding to FP8 equal")
    assert "6.75" in why
    assert "become 6.5 and 7" in why
    differs, why = edges_of(ABOVE).explain(run_of(ROW + 1), "differ")
    assert not differs
    assert "without rounding to FP8 logits differ" in why
    assert (fp8.quantise, ActivationScheme.quantise) == quantise


def test_runs_whose_blocks_no_rounding_of_float32_brings_over_an_edge_differ():
    # The nearest blocks lie 1e-4 of their largest value apart, 839 × 2⁻²³: the bound on logits forgives as much, float32 does not.
    edges = edges_of(ABOVE)
    on_an_edge, why = edges.explain(run_of(ROW - np.float32([[0, 0.0448, 0]])), "differ")
    assert not on_an_edge
    assert "without rounding to FP8 equal" in why
    assert "not a rounding edge" in why
    on_an_edge, why = edges.explain(run_of(ABOVE), "differ")
    assert not on_an_edge
    assert "each block has the FP8 numbers" in why


def test_a_balanced_run_on_an_edge_must_have_moved_experts_too():
    reference, logits = Answer(np.ones((1, 4)), [[3]]), np.full((1, 4), 2.0)
    edge, none = (lambda text: (True, "edge")), (lambda text: (False, "no edge"))
    assert judge(Answer(np.ones((1, 4)), [[3]], 3), reference, rebalances=3, explain=none) == ("equal", "equal")
    assert judge(Answer(np.ones((1, 4)), [[3]], 2), reference, rebalances=3) == ("wrong", "only 2 rebalances")
    assert judge(Answer(logits, [[3]], 3), reference, rebalances=3, explain=edge) == ("on an edge", "edge")
    assert judge(Answer(logits, [[3]], 3), reference, rebalances=3, explain=none) == ("wrong", "no edge")
    assert judge(Answer(logits, [[3]], 2), reference, rebalances=3, explain=edge) == (
        "wrong",
        "edge; only 2 rebalances",
    )
    assert judge(Answer(logits, [[3]]), reference)[0] == "wrong"


@pytest.mark.parametrize(
    "options",
    [
        "",
        "--activation-scheme none",
        "--activation-scheme dynamic --kernels pallas",
        "--activation-scheme dynamic --kv-cache-dtype fp8",
    ],
)
def test_edges_are_asked_of_activations_that_jax_rounds_alone(options, monkeypatch, capsys):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", [TOOL.name, "--edges", *options.split()])
    monkeypatch.setattr(emulation, "emulate_devices", lambda count: None)
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(TOOL), run_name="__main__")
    assert (
        "nor --kv-cache-dtype fp8, whose reading and writing a run without rounding would leave out"
        in capsys.readouterr().err
    )


def test_the_edge_is_that_of_the_nearest_blocks_and_not_of_what_follows_from_them():
    block = np.zeros((2, fp8.BLOCK), np.float32)
    block[0, :3], block[1, :3] = ABOVE[0], [448, 100, 30]
    other = block.copy()
    other[0, :3], other[1, :3] = BELOW[0], [448, 120, 40]
    text, distance = nearest_edge(other, block)
    assert text.startswith("2 of 2 blocks")
    assert "the edge 6.75" in text
    assert 0 < distance < 0.01
    assert nearest_edge(block, block) == ("each block has the FP8 numbers of the nearest of one device", math.inf)


@pytest.mark.parametrize("powers", [False, True])
def test_without_rounding_a_product_reads_what_was_given(powers):
    x = np.array([[0.3, -5.1, 77.7]], np.float32)

    def make(**kept):
        assert kept == {"weights": "fp8"}
        return Answer(fp8.dequantise(*ActivationScheme(dynamic=True, powers=powers).quantise(x)), [[3]])

    np.testing.assert_allclose(Edges(make, {"weights": "fp8"}).unrounded(make).logits, x, rtol=3e-7)
