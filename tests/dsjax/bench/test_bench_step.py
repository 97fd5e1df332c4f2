"""`dsjax bench step`: a decode step's time by part of the model."""

import json

import pytest
from typer.testing import CliRunner

from dsjax.bench.step import part_seconds, scopes_of
from dsjax.cli import app


def test_an_operations_time_is_its_scopes_and_loops_and_strangers_have_none():
    text = """
      %dot.1 = f32[] dot(a, b), metadata={op_name="jit(step)/attend/dot"}
      %all-gather.2 = f32[] all-gather(a), metadata={op_name="jit(step)/experts/gather"}
      %add.3 = f32[] add(a, b), metadata={op_name="jit(step)/add"}
      %while.4 = f32[] while(a), metadata={op_name="jit(step)/experts/while"}
    """
    names = ("dot.1", "all-gather.2", "add.3", "while.4", "stranger", "dot.1")
    events = [{"name": name, "dur": 10**place} for place, name in enumerate(names)]
    found = part_seconds(events, scopes_of(text))
    assert found == {"attend": 100_001 / 5e6, "norms, residuals, embedding": 100 / 5e6, "collectives": 10 / 5e6}


def test_a_context_that_the_model_has_no_positions_for_is_refused():
    refused = CliRunner().invoke(app, ["bench", "step", "--model", "demo", "--input-len", "32768"]).exception
    assert "positions, expected at most 2048" in str(refused)


@pytest.mark.slow
def test_a_step_of_the_demo_is_timed_by_its_parts(tmp_path):
    sizes = "--mesh dp=1 --batch-size 2 --input-len 40 --num-iters 3"
    ended = CliRunner().invoke(app, ["bench", "step", *sizes.split(), "--json", str(tmp_path / "step.json")])
    assert ended.exit_code == 0, ended.output
    found = json.loads((tmp_path / "step.json").read_text())
    assert {"attend", "experts", "head"} <= found["part_seconds"].keys()
    assert found["seconds"] > 0
    assert "2 requests on each of 1 ranks, 40 tokens before" in ended.output
