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
    """Run benchmarks: `serve` loads a server and reports like `vllm bench serve`; `modules` times the model's parts, `network` the
    collectives between devices, `step` a decode step by part; `soak` disconnects and aborts requests, then checks the server."""
