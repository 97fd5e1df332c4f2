"""The command `dsjax tune`. It imports JAX only when it runs."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dsjax.cli.options import options_of
from dsjax.cli.output import INTERRUPTED
from dsjax.engine.setup.args import EngineArgs
from dsjax.errors import UserError
from dsjax.progress import track

_USED = """model mesh dtype weights activation_scheme kv_cache_dtype page_size max_num_batched_tokens prefill_chunk speculative_config
    redundant_experts moe_dense_tp_size enable_dp_lm_head"""
"""Engine options that change the matrix products that a device computes."""


@options_of(only=_USED.split(), args=EngineArgs)
def tune(
    args: EngineArgs,
    output: Annotated[Path, typer.Option(help="File to write, or to resume if it exists. Pass it to dsjax serve as --kernel-config.")],
    tokens: Annotated[str, typer.Option(help="Numbers of tokens of a DP rank in a step, separated by commas.")] = "1,8,32,128,512,2048",
    context: Annotated[int, typer.Option(help="Context length of a request in the attention kernels.", min=1)] = 4096,
    seconds: Annotated[float, typer.Option(help="Time to measure each choice of tile sizes, in seconds.")] = 0.1,
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
) -> None:  # fmt: skip
    """Tune the tile sizes of a model's Pallas kernels (attention, matrix products) on this GPU, and write the fastest to a file.

    The shapes are those of one device of --mesh; one GPU is enough. The file is written after each shape: after Ctrl-C, the same
    command resumes where it stopped. No checkpoint is needed.
    """
    counts = _numbers(tokens)
    if not seconds > 0:
        raise UserError(f"--seconds is {seconds:g}; expected more than 0")
    if context < args.chunk_tokens:
        raise UserError(
            f"--context is {context}, less than --prefill-chunk {args.chunk_tokens}; expected at least as many positions"
        )
    import jax

    from dsjax.bench import tune as tuning
    from dsjax.bench.modules.timing import Budget
    from dsjax.config import load_config
    from dsjax.engine.device.process import enable_compile_cache
    from dsjax.engine.setup import assembly
    from dsjax.engine.setup.fitting import check_layout
    from dsjax.kernels.pallas.tile_table import TileTable
    from dsjax.model.parameter_table import parameter_table
    from sharding import MeshSpec

    device = jax.devices()[0]
    if device.platform != "gpu":
        raise UserError(
            f"dsjax tune times the Pallas kernels for GPUs, and this machine's devices are {device.platform}: there is nothing to tune. "
            "Native kernels on a CPU have no sizes to choose"
        )
    enable_compile_cache()
    config, spec = load_config(args.model), MeshSpec.parse(args.mesh)
    dtype = assembly.compute_dtype(args, config, device.platform)
    weights = assembly.weights_format(args, config, dtype)
    check_layout(config, spec, args.num_redundant, weights, dense_tp=args.moe_dense_tp_size)
    scheme = assembly.activation_scheme(args, config, weights, device)
    n_physical = config.n_routed_experts + args.num_redundant
    infos = parameter_table(config, weights=weights, platform=device.platform, num_physical=n_physical, mtp=False).infos
    rules = assembly.model_rules(args, config, spec)
    todo = tuning.find_products(config, infos, spec, rules, counts, n_physical=n_physical, quantises=scheme.dynamic)
    cache_dtype = assembly.cache_dtype(args, dtype)
    heads = config.num_attention_heads // spec.tp_size
    setting = tuning.AttentionSetting(config, heads, cache_dtype, args.page_size_of(config), context)
    if config.family.has_forms:  # other attention has no tile table
        todo += setting.find(counts, args.chunk_tokens, args.num_drafts)
    table = TileTable.read(output) if output.exists() else TileTable(device.device_kind)
    if table.device != device.device_kind:
        raise UserError(
            f"{output} is of {table.device}, and this machine has {device.device_kind}; choose another --output"
        )
    timer = tuning.device_timer(dtype, max(1, n_physical // spec.ep_size), setting, Budget(seconds, samples=5))
    console = Console(stderr=True)
    try:
        table = tuning.tune(table, track(console, progress, "timing cases", todo), output, timer)
    except KeyboardInterrupt:
        done = TileTable.read(output).entries if output.exists() else ()
        left = sum(product not in {entry.product for entry in done} for product in todo)
        console.print(
            f"interrupted: {left} of {len(todo)} kernels' shapes are left; the same command resumes", highlight=False
        )
        raise typer.Exit(INTERRUPTED) from None
    faster = [entry.default_seconds / entry.seconds for entry in table.entries]
    mean = sum(faster) / len(faster) if faster else 1.0
    typer.echo(
        f"{output}: {len(faster)} kernels' shapes, on the mean {mean:.2f} times as fast as with default sizes; use it with --kernel-config"
    )


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"--tokens is {text!r}; expected whole numbers above 0, separated by commas")
    return sorted({int(part) for part in parts})
