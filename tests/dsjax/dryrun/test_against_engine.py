"""What is dry-run is what runs: the demo model's engine holds and does what its dry run says."""

import tempfile
from collections import Counter
from pathlib import Path

import jax
import msgspec
import numpy as np
import pytest
from layouts import write_checkpoint
from quick_compilation import SEVERAL_ROWS

from dsjax.dryrun.arguments import DryRunArgs
from dsjax.dryrun.program import Program, program_collectives
from dsjax.dryrun.run import dry_run
from dsjax.dryrun.timeline import model_part
from dsjax.engine.contract import commands
from dsjax.engine.device.buckets import Buckets, Rectangle
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.loading import load_model

pytestmark = pytest.mark.slow  # all together

# float32 by name: the engine's own choice on a CPU, where a dry run would stand in for an accelerator. Plain kernels, as a dry run has.
OPTIONS = {"dtype": "float32"} | SEVERAL_ROWS
STEPS = {"decode": Rectangle(4, 1), "prefill": Rectangle(1, 16)}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny"), mtp=True)
    args = EngineArgs(model=str(folder), mesh="dp=2,tp=2", dispatch="padded", **OPTIONS)
    model = load_model(args)
    yield model, lambda step: dry_run(DryRunArgs(engine=args, step=step))
    model.executor.shutdown()


def program_of(executor, step):
    decode, prefill = (STEPS[step] if step == name else None for name in ("decode", "prefill"))
    return executor.programs.get("step", executor.programs.shape(decode, prefill), False)


def test_the_running_demo_holds_and_runs_what_its_dry_run_says(engine):
    model, read = engine
    report = read("decode")
    assert (report.request["batch"], report.request["context"]) == (4, 128)
    executor, device = model.executor, model.executor.model.mesh.devices.flat[-1]
    arrays = [*executor.params.values(), *jax.tree.leaves(executor.state)]
    held = sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards if shard.device == device)
    limits = executor.limits
    assert limits.pages_per_rank * limits.page_size == report.cache_tokens + limits.page_size
    assert held == report.memory.arguments - report.memory.inputs
    assert model.facts.weight_bytes == report.memory.weights
    assert model.facts.parameters == sum(report.parameters.values())
    program = Program.parse(program_of(executor, "decode").as_text())
    running = program_collectives(program, dict(executor.model.mesh.shape), host_devices=8)

    def tally(collectives):
        counted = (c for c in collectives if c.times and not c.data_dependent)
        return sorted((c.kind, c.axes, c.ranks, c.operand_bytes) for c in counted)

    assert tally(running) == tally(report.collectives)
    assert len(tally(running)) >= 2


def test_the_profile_of_a_running_step_shows_the_collectives_that_its_dry_run_counts(engine):
    model, read = engine
    report = read("prefill")
    counted = Counter()
    for one in report.collectives:
        counted[one.kind, model_part(one.op_name)] += one.times
    assert counted.total() >= 4  # there and back, in each of two MoE layers
    devices = executed_collectives(model.executor)
    assert sorted(devices) == list(range(4))
    for seen in devices.values():
        assert seen == counted


def full_prefill(limits):
    """A command whose launch is the full batch of a prefill, on every rank."""
    rows, chunk = STEPS["prefill"]
    tokens = np.random.default_rng(0).integers(3, 96, (limits.num_ranks, rows, chunk))

    def rank(tokens):
        found, most = commands.RankStep([], [], b"", [], []), limits.max_pages
        for slot, own in enumerate(tokens.tolist()):
            found.admissions.append(commands.Admission(slot, 0, own[0], commands.Sampling(chunk, 0)))
            found.pages.append(commands.PageChange(slot, 0, list(range(1 + slot * most, 1 + (slot + 1) * most))))
            row = slot, 0, commands.int32s(own), commands.TOKEN_MADE, limits.max_model_len
            found.prefills.append(commands.PrefillRow(*row))
        return found

    return commands.Step([rank(own) for own in tokens])


def executed_collectives(executor):
    """Device → ``(kind, part of the model)`` → how often JAX's profiler saw it run, in one prefill of full rows."""
    program = program_of(executor, "prefill")
    executor.buckets = Buckets((STEPS["decode"].rows,), (STEPS["prefill"],), mixed=False)
    command = full_prefill(executor.limits)
    executor.collect(executor.launch(command))  # the slots are given by a program of its own
    command = commands.Step([msgspec.structs.replace(rank, admissions=[], pages=[]) for rank in command.ranks])
    parsed = Program.parse(program.as_text())
    operations = {name: one for part in parsed.computations.values() for name, one in part.operations.items()}
    kinds = {c.name for c in program_collectives(parsed, dict(executor.model.mesh.shape), host_devices=8)}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            executor.collect(executor.launch(command))
        (path,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
        seen = {}
        for event in (event for plane in planes for line in plane.lines for event in line.events):
            stats = dict(event.stats)
            operation = operations.get(stats.get("hlo_op"))
            if operation is not None and operation.name in kinds:
                key = operation.opcode, model_part(operation.op_name)
                seen.setdefault(stats["device_ordinal"], Counter())[key] += 1
    return seen
