"""What is dry-run is what runs: the demo model's engine holds and does what its dry run says."""

from dsjax.dryrun.arguments import DryRunArgs
from dsjax.dryrun.run import dry_run
from dsjax.engine.args import EngineArgs
from dsjax.engine.buckets import Rectangle
from dsjax.engine.loading import load_model
from sharding.program import Program, program_collectives


def test_the_running_demo_holds_and_runs_what_its_dry_run_says():
    # float32 by name: the engine's own choice on a CPU, where a dry run would stand in for an accelerator.
    args = EngineArgs(
        model="demo",
        mesh="dp=2,tp=2",
        dtype="float32",
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        prefill_chunk=16,
    )
    report = dry_run(DryRunArgs(engine=args))
    assert (report.request["batch"], report.request["context"]) == (4, 64)
    model = load_model(args)
    try:
        runner, device = model.runner, model.runner.step.mesh.devices.flat[-1]
        arrays = [*runner.params.values(), *runner.cache.values()]
        held = sum(
            shard.data.nbytes for array in arrays for shard in array.addressable_shards if shard.device == device
        )
        assert runner.limits.pages_per_rank * args.page_size == report.cache_tokens + args.page_size
        assert held == report.memory.arguments - report.memory.inputs
        assert model.facts.weight_bytes == report.memory.weights
        assert model.facts.parameters == sum(report.parameters.values())
        program = runner.programs.step(runner.programs.shapes(Rectangle(4, 1), None))
        running = program_collectives(Program.parse(program.as_text()), dict(runner.step.mesh.shape), host_devices=8)
    finally:
        model.runner.shutdown()

    def tally(collectives):
        return sorted(
            (c.kind, c.axes, c.ranks, c.operand_bytes) for c in collectives if c.times and not c.data_dependent
        )

    assert tally(running) == tally(report.collectives)
    assert len(tally(running)) >= 2
