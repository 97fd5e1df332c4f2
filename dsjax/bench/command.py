"""`dsjax bench`: the group of benchmarks."""

import typer

from dsjax.bench.modules.command import modules
from dsjax.bench.network.command import network
from dsjax.bench.serve.command import serve
from dsjax.bench.soak import soak
from dsjax.bench.step import step
from dsjax.cli.help import PLAIN, Commands, PanelledCommand

bench = typer.Typer(name="bench", cls=Commands, no_args_is_help=True, **PLAIN)
bench.command("serve", cls=PanelledCommand)(serve)
bench.command("modules", cls=PanelledCommand)(modules)
bench.command("network", cls=PanelledCommand)(network)
bench.command("step", cls=PanelledCommand)(step)
bench.command("soak", cls=PanelledCommand)(soak)


@bench.callback()
def group() -> None:
    """Measure: `serve` puts load on a server and prints what `vllm bench serve` prints; `modules` times the model's parts, `network` the
    collectives between devices, `step` a decode step by its parts; `soak` runs sessions
    for minutes, some of which break off, and judges what is left."""
