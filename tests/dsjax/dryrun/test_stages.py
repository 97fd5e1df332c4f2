"""The dry run of a model in stages: of each its own weights, cache and program."""

import io

import pytest
from layouts import write_checkpoint
from rich.console import Console

from dsjax.dryrun.arguments import DryRunArgs
from dsjax.dryrun.run import dry_run
from dsjax.dryrun.tables import show_stages
from dsjax.engine.setup.args import EngineArgs
from dsjax.errors import UserError

V3 = EngineArgs(model="deepseek-v3", mesh="pp=2,dp=8", weights="fp8")


@pytest.fixture(scope="module")
def stages():
    return dry_run(DryRunArgs(engine=V3, batch=4, context=256))


def test_the_stages_together_have_the_models_parameters(stages):
    assert (stages.mesh, stages.devices) == ("pp=2,dp=8", 16)
    first, last = stages.stages
    assert sum(sum(stage.parameters.values()) for stage in stages.stages) == 671_026_419_200
    assert [stage.request["layers"] for stage in stages.stages] == [[0, 30], [31, 60]]
    assert ("embedding" in first.parameters, "head" in first.parameters) == (True, False)
    assert ("embedding" in last.parameters, "head" in last.parameters) == (False, True)
    assert [stage.parameters["attention"] for stage in stages.stages] == [31 * 187_107_328, 30 * 187_107_328]


def test_a_stage_has_the_cache_of_its_layers_and_hands_on_hidden_states(stages):
    first, last = stages.stages
    pages = 4 * 256 // 16 + 1
    assert [stage.memory.cache for stage in stages.stages] == [layers * pages * 16 * 576 * 2 for layers in (31, 30)]
    assert first.request["hidden_bytes"] == 4 * 7168 * 2  # four rows of a DP rank, in bfloat16
    assert "hidden_bytes" not in last.request
    assert last.memory.state > first.memory.state  # counts of tokens, for penalties
    assert stages.to_json()["stages"][1]["device_bytes"]["cache"] == last.memory.cache


def test_no_program_of_a_stage_talks_to_another(stages):
    for stage in stages.stages:
        assert max(one.ranks for one in stage.collectives) <= 8


def test_the_stages_stand_side_by_side_below_what_is_said_of_each(stages):
    console = Console(file=io.StringIO(), width=200)
    show_stages(console, stages)
    said = console.file.getvalue()
    assert "stage 1: layers 31 to 60" in said
    row = next(line for line in said.splitlines() if line.count("│") == 8 and "0 to 30" in line)
    assert f"{stages.stages[0].memory.total:,}" in row
    assert f"{4 * 7168 * 2:,}" in row


def test_each_stage_moves_the_experts_of_its_own_layers(tmp_path):
    model = write_checkpoint(tmp_path, num_hidden_layers=5)
    eplb = {"num_redundant_experts": 4}
    engine = EngineArgs(
        model=str(model), mesh="pp=3,dp=2", pp_layer_partition="1,2,2", enable_eplb=True, eplb_config=eplb
    )
    first, *others = dry_run(DryRunArgs(engine=engine, batch=4, context=64)).stages
    assert first.rebalance is None  # of a dense layer alone
    assert first.memory.staging == 0
    for stage in others:
        assert stage.rebalance.layers == 2
        assert stage.memory.staging == stage.rebalance.staging_bytes > 0


@pytest.mark.parametrize(("options", "flag"), [({"reductions": True}, "--reductions")])
def test_what_looks_at_one_program_is_refused(options, flag):
    with pytest.raises(UserError, match=f"{flag} looks at one program, and --mesh pp=2,dp=8 has 2"):
        dry_run(DryRunArgs(engine=V3, batch=4, context=256), **options)
