"""The dry run of a model in stages: of each its own weights, cache and program."""

import pytest

from dsjax.config import load_config
from dsjax.dryrun.arguments import DryRunArgs
from dsjax.dryrun.memory import DeviceMemory
from dsjax.dryrun.run import dry_run
from dsjax.engine.setup.args import EngineArgs
from dsjax.errors import UserError
from dsjax.model.stage import stages_of

EPLB = {"enable_eplb": True, "eplb_config": {"num_redundant_experts": 8, "max_bytes_per_step": 7 * 44_050_944}}
V3 = EngineArgs(model="deepseek-v3", mesh="pp=2,dp=8", weights="fp8", **EPLB)


@pytest.fixture(scope="module")
def stages():
    return dry_run(DryRunArgs(engine=V3, batch=4, context=256))


@pytest.mark.slow
def test_the_stages_together_have_the_models_parameters_each_its_cache_and_no_program_talks_to_another(stages):
    assert (stages.mesh, stages.devices) == ("pp=2,dp=8", 16)
    first, last = stages.stages
    assert sum(sum(stage.parameters.values()) for stage in stages.stages) == 671_026_419_200
    assert [stage.request["layers"] for stage in stages.stages] == [[0, 30], [31, 60]]
    assert ("embedding" in first.parameters, "head" in first.parameters) == (True, False)
    assert ("embedding" in last.parameters, "head" in last.parameters) == (False, True)
    assert [stage.parameters["attention"] for stage in stages.stages] == [31 * 187_107_328, 30 * 187_107_328]
    pages = 4 * 256 // 16 + 1
    assert [stage.memory.cache for stage in stages.stages] == [layers * pages * 16 * 576 * 2 for layers in (31, 30)]
    assert first.request["hidden_bytes"] == 4 * 7168 * 2  # four rows of a DP rank, in bfloat16
    assert "hidden_bytes" not in last.request
    assert last.memory.state > first.memory.state  # counts of tokens, for penalties
    assert stages.to_json()["stages"][1]["device_bytes"]["cache"] == last.memory.cache
    for stage in stages.stages:
        assert max(one.ranks for one in stage.collectives) <= 8


@pytest.mark.slow
def test_each_stage_moves_the_experts_of_its_own_layers(stages, described):
    assert [stage.rebalance.layers for stage in stages.stages] == [31 - 3, 30]
    for stage in stages.stages:
        assert stage.memory.staging == stage.rebalance.staging_bytes > 0
    dense = stages_of(load_config("deepseek-v3"), 2, given="3,58")[0]
    one = described(DryRunArgs(engine=V3, batch=4, context=256), stage=dense)
    assert (one.exchange, DeviceMemory.of(one).staging) == (None, 0)


def test_what_looks_at_one_program_is_refused():
    with pytest.raises(UserError, match="--reductions looks at one program, and --mesh pp=2,dp=8 has 2"):
        dry_run(DryRunArgs(engine=V3, batch=4, context=256), reductions=True)
