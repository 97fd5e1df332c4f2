"""`dsjax bench`: the group of benchmarks."""

import typer

from dsjax.bench.modules.command import modules
from dsjax.bench.serve.command import serve

bench = typer.Typer(name="bench", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
bench.command("serve")(serve)
bench.command("modules")(modules)


@bench.callback()
def group() -> None:
    """Measure: `serve` puts load on a server and prints what `vllm bench serve` prints; `modules` times the model's parts."""
