"""The dry run at full size: its bytes are the real checkpoint's, and nothing of them is allocated."""

import dataclasses
import gzip
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from quick_compilation import QUICK_COMPILATION
from typer.testing import CliRunner

from dsjax.cli.main import app
from dsjax.config import load_config
from dsjax.dryrun.arguments import DryRunArgs
from dsjax.dryrun.assumptions import expected_tiles
from dsjax.dryrun.memory import DeviceMemory, parameters_by_component
from dsjax.dryrun.run import dry_run
from dsjax.engine.setup.args import EngineArgs
from dsjax.errors import UserError
from dsjax.fp4.formats import experts_format
from dsjax.model.experts import default_tile
from dsjax.plan.compiled import read_dry_run
from sharding import MeshError, MeshSpec

TENSORS = Path(__file__).parents[3] / ".." / "shared" / "reference" / "deepseek-r1.tensors.json.gz"
ITEM_BYTES = {"F8_E4M3": 1, "BF16": 2, "F32": 4}
V3 = EngineArgs(model="deepseek-v3", mesh="dp=32", weights="fp8")


@pytest.fixture(scope="module")
def full_size():
    return dry_run(DryRunArgs(engine=V3, batch=8, context=1024))


def device_bytes_of_the_checkpoint(experts_on_a_device, *, fp8):
    """Bytes of the real tensors that one device of a dp mesh holds: its experts, and everything else."""
    total, tensors = 0, json.loads(gzip.decompress(TENSORS.read_bytes()))
    for name, tensor in tensors.items():
        if name.startswith("model.layers.61."):
            continue  # the MTP module, which the step does not run
        if ".mlp.experts." in name and int(name.split(".mlp.experts.")[1].split(".")[0]) >= experts_on_a_device:
            continue
        if fp8:
            total += math.prod(tensor["shape"]) * ITEM_BYTES[tensor["dtype"]]
        elif not name.endswith("_scale_inv"):
            total += math.prod(tensor["shape"]) * (4 if "e_score_correction_bias" in name else 2)
    return total


@pytest.mark.skipif(not TENSORS.is_file(), reason="the list of the real checkpoint's tensors is not here")
def test_weights_on_a_device_are_the_real_tensors_to_the_byte(full_size, described):
    assert full_size.memory.weight_bytes == device_bytes_of_the_checkpoint(8, fp8=True)
    bf16 = described(DryRunArgs(engine=dataclasses.replace(V3, weights="auto", mesh="dp=16"), batch=1, context=16))
    assert DeviceMemory.of(bf16).weight_bytes == device_bytes_of_the_checkpoint(16, fp8=False)


def test_the_programs_arguments_are_weights_cache_and_inputs(full_size):
    memory = full_size.memory
    assert memory.arguments == memory.persistent == memory.weight_bytes + memory.cache + memory.state + memory.inputs
    # 61 layers of 512 + 64 bf16 values for each slot of 8 rows of 64 pages, and page 0.
    assert memory.cache == 61 * 576 * 2 * (8 * 64 + 1) * 16
    assert full_size.cache_tokens == 8 * 1024
    # Of each slot a page table, 13 numbers, and counts of all tokens; for 58 layers a copy of each of 256 experts, and how many.
    assert memory.state == 8 * (4 * (64 + 13) + 2 * 129_280) + 58 * 256 * 2 * 4
    assert memory.inputs == 4 * (3 * 8 + 3 * 9)  # three integers a row, room for nine changes of page tables
    assert memory.aliased == memory.cache + memory.state  # updated in place
    assert memory.outputs - memory.aliased >= 8 * (4 + 4 * 129_280)  # tokens and float32 logits


def test_two_collectives_a_moe_layer_and_no_others(full_size):
    found = [(c.kind, c.axes, c.ranks, c.times, c.operand[0].dtype) for c in full_size.collectives]
    assert found == [("all-gather", ("ep",), 32, 58, "u16"), ("reduce-scatter", ("ep",), 32, 58, "bf16")]
    there, back = full_size.collectives
    assert there.operand_bytes == 8 * (7168 * 2 + 8 * 4 + 8 * 2 + 4)
    assert back.operand_bytes == 32 * 8 * 7168 * 2
    assert (there.bytes_inside, there.bytes_between) == (7 * there.operand_bytes, 24 * there.operand_bytes)


def test_products_of_a_decode_are_the_models_arithmetic(full_size):
    """2 operations a weight and token, absorbed attention, and of the experts as many tiles as even routing begins."""
    rows, context = 8, 1024
    outside = 61 * (187_107_328 - 2048) + 3 * 396_361_728 + 58 * 44_040_192 + 58 * 256 * 7168 + 926_679_040
    attention = 61 * 2 * 128 * (576 + 512) * context
    # 32 × 8 tokens choose 8 of 256 experts each: eight pairs an expert in tiles of 8 rows.
    tiles = 8 * expected_tiles(8, 8)
    assert 11 < tiles < 12
    experts = 58 * tiles * 8 * 2 * 44_040_192
    assert full_size.costs.flops == pytest.approx(rows * (2 * outside + attention) + experts, rel=1e-12)
    assert full_size.expert_flops == 2 * rows * 8 * 44_040_192 * 58


DRAFTING = dataclasses.replace(V3, speculative_config={"method": "mtp", "num_speculative_tokens": 2})


@pytest.fixture(scope="module")
def drafting():
    return dry_run(DryRunArgs(engine=DRAFTING, batch=4, context=1024))


@pytest.mark.slow
def test_a_step_with_drafts_verifies_them_and_holds_the_mtp_module(drafting):
    assert (drafting.request["chunk"], drafting.request["num_drafts"]) == (3, 2)
    assert sum(drafting.parameters.values()) == 671_026_419_200 + 11_610_068_224
    memory, slots = drafting.memory, (4 * 64 + 1) * 16
    assert memory.cache == 71_424 * slots
    # Beside a plain step's state two drafts of each slot, and a byte for each cache slot: whether the module has filled it.
    assert memory.state == 4 * (4 * (64 + 13 + 2) + 2 * 129_280) + 59 * 256 * 2 * 4 + slots
    assert memory.outputs - memory.aliased >= 12 * 4 * 129_280  # logits of each verified token
    # The module's weights are not read by the step, but lie on the device all the same.
    assert memory.arguments < memory.persistent < memory.total
    assert drafting.expert_flops == 2 * 12 * 8 * 44_040_192 * 58


@pytest.mark.slow
def test_drafting_is_one_pass_over_all_tokens_and_one_more_over_the_last(drafting):
    found = [(c.kind, c.times, c.op_name.split("/")[2]) for c in drafting.drafts.collectives]
    assert found == [(kind, 1, f"mtp_{k}") for k in (12, 4) for kind in ("all-gather", "reduce-scatter")]
    context, rows = 1024, 4
    a_token = 187_107_328 - 2048 + 2 * 7168**2 + 44_040_192 + 256 * 7168
    attention = 2 * 128 * (576 + 512) * context
    flops = 0
    for tokens, load in ((3 * rows, 12), (rows, 4)):  # 32 ranks choose 8 of 256 experts for each token
        tile = default_tile(load)
        experts = 8 * expected_tiles(load, tile) * tile * 2 * 44_040_192
        flops += tokens * (2 * a_token + attention) + experts + rows * 2 * 926_679_040
    assert drafting.drafts.costs.flops == pytest.approx(flops, rel=1e-12)
    assert drafting.drafts.expert_flops == 2 * 16 * 8 * 44_040_192
    assert drafting.to_json()["drafts"]["costs"]["flops"] == drafting.drafts.costs.flops


@pytest.mark.slow
def test_prompts_in_halves_are_followed_by_drafts_of_the_whole_and_a_plan_reads_of_halves(tiny, tmp_path, described):
    engine = EngineArgs(
        model=tiny, mesh="dp=2", weights="nvfp4", dispatch="gather", enable_dbo=True, dbo_prefill_token_threshold=512,
        speculative_config=DRAFTING.speculative_config,
    )  # fmt: skip
    report = dry_run(args := DryRunArgs(engine=engine, step="prefill", batch=2, context=512))
    assert (report.request["chunk"], report.request["num_drafts"], report.request["weights"]) == (256, 2, "nvfp4")
    rows = {c.op_name.split("/")[2]: c.operand[0].dims[0] for c in report.drafts.collectives if c.kind == "all-gather"}
    assert rows == {"mtp_512": 512, "mtp_2": 2}
    file = tmp_path / "run.json"
    file.write_text(json.dumps(report.to_json()))
    assert read_dry_run(file).halves
    file.write_text(json.dumps(report.to_json() | {"halves": False}))
    assert not read_dry_run(file).halves
    whole = described(dataclasses.replace(args, engine=dataclasses.replace(engine, dbo_prefill_token_threshold=513)))
    assert not whole.step.runs_in_halves(whole.shape.groups)


@pytest.mark.slow
def test_by_so_many_rows_nothing_is_drafted_but_the_module_stays_on_the_device(described, tiny):
    by_load = {**DRAFTING.speculative_config, "num_speculative_tokens_per_batch_size": [[1, 3, 2], [4, 64, 0]]}
    engine = EngineArgs(model=tiny, mesh="dp=2", cache_tokens=1024, speculative_config=by_load)
    args = DryRunArgs(engine=engine, batch=3, context=64)
    few, many = described(args), described(dataclasses.replace(args, batch=4))
    assert (few.shape.groups[0].chunk, few.num_drafts, few.drafts is None) == (3, 2, False)
    assert (many.shape.groups[0].chunk, many.num_drafts, many.drafts) == (1, 0, None)
    held, found = DeviceMemory.of(few), DeviceMemory.of(many)
    assert (found.weights, found.cache) == (held.weights, held.cache)


@pytest.mark.parametrize("weights", ["nvfp4", "mxfp4-bf16", "int4-bf16"])
def test_packed_experts_take_the_bytes_of_the_format_and_count_as_numbers_of_the_model(weights, described):
    engines = (EngineArgs(model="demo", mesh="dp=2", weights=one) for one in (weights, "auto"))
    kept, plain = (described(DryRunArgs(engine=engine, batch=2, context=64)) for engine in engines)
    parameters = parameters_by_component(kept.step)
    assert parameters == parameters_by_component(plain.step)
    form, config = experts_format(weights), load_config("demo")
    wholes = 4 * 3 * config.n_routed_experts * config.num_moe_layers if form.has_global else 0
    experts = DeviceMemory.of(kept).weights["routed experts"]
    assert experts == (parameters["routed experts"] * form.bytes_per_value + wholes) / 2


def test_impossible_requests_say_what_to_do():
    with pytest.raises(UserError, match="--mla-decode and"):
        CliRunner().invoke(app, ["dryrun", "--model", "demo", "--step", "mixed", "--mla", "CC"], catch_exceptions=False)
    many = DryRunArgs(engine=V3, batch=100_000_000)
    with pytest.raises(UserError, match=r"--batch 100,000,000 at --context 4,096: .* 409,600,000,016 token slots"):
        many.limits(load_config("deepseek-v3"), MeshSpec.parse("dp=32"))
    moonlight = dataclasses.replace(DRAFTING, model="moonlight", weights="auto", mesh="dp=4")
    for message, options in {
        "--step is 'train', expected one of decode, prefill, mixed": {"step": "train"},
        "--prefill-chunk is 256, more than the --context of 64": {"step": "prefill", "context": 64},
        "--context is 10000000, but the model has 163840 positions; lower it": {"context": 10_000_000},
        "no hardware 'h300'": {"target": "h300"},
        "least number of redundant experts that fits is 8": {"engine": dataclasses.replace(V3, mesh="dp=24")},
        "--speculative-config .* has none": {"engine": moonlight},
    }.items():
        with pytest.raises((UserError, MeshError), match=message):
            dry_run(DryRunArgs(**{"engine": V3} | options))


WATCHED = """
import sys; sys.argv[0] = 'dsjax'; from dsjax.cli import main
try: main()
finally: sys.stderr.write(dict(line.split(':', 1) for line in open('/proc/self/status'))['VmHWM'].split()[0])
"""


@pytest.mark.slow
def test_the_command_answers_in_json_for_72_ranks_and_allocates_nothing():
    """In a process of its own, which emulates 72 devices: the JSON's fields, and the peak of its memory.

    The peak is VmHWM: `ru_maxrss` of a new process begins with what its parent held, here a whole test session.
    """
    command = "dryrun --model deepseek-v3 --mesh dp=72 --redundant-experts 32 --step prefill --batch 2 --json -"
    command += " --context 512"
    environment = {k: v for k, v in os.environ.items() if k != "PJRT_NPROC"}
    environment["XLA_FLAGS"] = " ".join(QUICK_COMPILATION)  # without the number of devices
    command, root = [sys.executable, "-c", WATCHED, *command.split()], Path(__file__).parents[3]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root, timeout=300, check=True)
    report = json.loads(done.stdout)
    assert report["devices"] == 72
    assert report["device_bytes"]["weights"]["routed experts"] == 58 * 4 * 44_040_192 * 2
    assert report["device_bytes"]["weights_total"] == sum(report["device_bytes"]["weights"].values())
    # 512 tokens of a rank: too many for every rank to see all, so they go out and come back.
    assert [c["kind"] for c in report["collectives"]] == ["all-to-all", "all-to-all"]
    assert all(c["axes"] == ["ep"] and c["ranks"] == 72 and c["times"] == 58 for c in report["collectives"])
    peak = int(done.stderr.split()[-1]) * 1024
    assert peak < 2e9 < report["device_bytes"]["weights_total"]


@pytest.mark.parametrize("flag", ["--json", "--timeline", "--timeline-picture"])
def test_a_file_that_cannot_be_written_is_said_before_anything_is_compiled(flag, tmp_path, monkeypatch):
    monkeypatch.setattr("dsjax.dryrun.run.dry_run", lambda *_, **__: pytest.fail("it compiled"))
    others = ["--timeline", str(tmp_path / "t.json")] if flag == "--timeline-picture" else []
    ended = CliRunner().invoke(app, ["dryrun", *others, flag, str(tmp_path / "missing" / "a.json")])
    assert isinstance(ended.exception, UserError)
    assert "where no file can be written; choose another" in str(ended.exception)
