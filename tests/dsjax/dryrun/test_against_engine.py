"""What is dry-run is what runs: the demo model's engine holds and does what its dry run says."""

import dataclasses
import tempfile
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest

from dsjax.dryrun.arguments import DryRunArgs
from dsjax.dryrun.run import dry_run
from dsjax.dryrun.scopes import model_part
from dsjax.engine.args import EngineArgs
from dsjax.engine.buckets import Rectangle
from dsjax.engine.loading import load_model
from dsjax.model.rows import RowGroup
from sharding.program import Program, program_collectives

# float32 by name: the engine's own choice on a CPU, where a dry run would stand in for an accelerator.
ARGS = EngineArgs(
    model="demo",
    mesh="dp=2,tp=2",
    dtype="float32",
    max_model_len=64,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    prefill_chunk=16,
)
STEPS = {"decode": Rectangle(4, 1), "prefill": Rectangle(2, 16)}


@pytest.fixture(params=[("dp=2,tp=2", "auto"), ("dp=4", "padded")], ids=lambda layout: "-".join(layout), scope="module")
def engine(request):
    """Options, and the runner that serves by them."""
    mesh, dispatch = request.param
    args = dataclasses.replace(ARGS, mesh=mesh, dispatch=dispatch)
    model = load_model(args)
    yield args, model
    model.runner.shutdown()


def program_of(runner, step):
    """The shapes of the full batch of a step, and the compiled program that serves it."""
    decode, prefill = (STEPS[step] if step == name else None for name in ("decode", "prefill"))
    shapes = runner.programs.shapes(decode, prefill)
    return shapes, runner.programs.step(shapes)


def test_the_running_demo_holds_and_runs_what_its_dry_run_says(engine):
    args, model = engine
    report = dry_run(DryRunArgs(engine=args))
    assert (report.request["batch"], report.request["context"]) == (4, 64)
    runner, device = model.runner, model.runner.step.mesh.devices.flat[-1]
    arrays = [*runner.params.values(), *runner.cache.values()]
    held = sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards if shard.device == device)
    assert runner.limits.pages_per_rank * args.page_size == report.cache_tokens + args.page_size
    assert held == report.memory.arguments - report.memory.inputs
    assert model.facts.weight_bytes == report.memory.weights
    assert model.facts.parameters == sum(report.parameters.values())
    program = Program.parse(program_of(runner, "decode")[1].as_text())
    running = program_collectives(program, dict(runner.step.mesh.shape), host_devices=8)

    def tally(collectives):
        return sorted(
            (c.kind, c.axes, c.ranks, c.operand_bytes) for c in collectives if c.times and not c.data_dependent
        )

    assert tally(running) == tally(report.collectives)
    assert len(tally(running)) >= 2


@pytest.mark.parametrize("step", STEPS)
def test_the_profile_of_a_running_step_shows_the_collectives_that_its_dry_run_counts(engine, step):
    args, model = engine
    report = dry_run(DryRunArgs(engine=args, step=step))
    counted = Counter()
    for one in report.collectives:
        counted[one.kind, model_part(one.op_name)] += one.times
    assert counted.total() >= 8  # there and back, in each of four MoE layers
    devices = executed_collectives(model.runner, step)
    assert sorted(devices) == list(range(4))
    for seen in devices.values():
        assert seen == counted


def executed_collectives(runner, step):
    """Device → ``(kind, part of the model)`` → how often JAX's profiler saw it run, in one step of full rows."""
    shapes, program = program_of(runner, step)
    rows, chunk = STEPS[step]
    ranks, pages = runner.limits.num_ranks, shapes[0].pages
    tables = np.broadcast_to(1 + np.arange(rows * pages, dtype=np.int32).reshape(rows, pages), (ranks, rows, pages))
    tokens = np.random.default_rng(0).integers(3, 256, (ranks, rows, chunk))
    positions = np.full((ranks, rows), 20 if step == "decode" else 0)
    inputs = RowGroup.pack(tokens, positions, np.full((ranks, rows), chunk, np.int32), tables)
    operations = {
        operation.name: operation
        for computation in Program.parse(program.as_text()).computations.values()
        for operation in computation.operations.values()
    }
    kinds = {
        c.name
        for c in program_collectives(Program.parse(program.as_text()), dict(runner.step.mesh.shape), host_devices=8)
    }
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            found, _, runner.cache, _ = program(
                runner.params, runner.cache, jax.device_put(inputs, runner.programs.rows)
            )
            jax.block_until_ready(found)
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
