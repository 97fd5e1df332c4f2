"""`dsjax serve`: load a model onto a mesh and answer OpenAI's clients."""

import dataclasses
import socket
from typing import Annotated, Protocol

import typer
from rich.console import Console

from dsjax.engine.args import EngineArgs
from dsjax.engine.engine import LLMEngine
from dsjax.engine.facts import EngineFacts
from dsjax.options import engine_options, prepare_devices


class LoadedModel(Protocol):
    """What serving needs of `dsjax.LLM`."""

    engine: LLMEngine
    facts: EngineFacts


@engine_options
def serve(
    args: EngineArgs,
    host: Annotated[
        str, typer.Option(help="Address to listen on; the default is reachable from this machine only.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name for clients; several may be given. Default: the model's.")
    ] = None,
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests get to finish after SIGINT or SIGTERM.", min=0)
    ] = 10.0,
    log_level: Annotated[str, typer.Option(help="Of the server's log.")] = "info",
) -> None:
    """Serve a model behind OpenAI's API."""
    from dsjax.serve.server import bind

    listener = bind(host, port)
    prepare_devices(args.mesh)
    from dsjax.engine.llm import LLM

    console = Console()
    model = LLM(**dataclasses.asdict(args), show_progress=True)
    names = tuple(served_model_name or ()) or (args.model,)
    code = serve_model(model, console, listener, names, shutdown_timeout, log_level)
    if code:
        raise typer.Exit(code)


def serve_model(
    model: LoadedModel,
    console: Console,
    listener: socket.socket,
    names: tuple[str, ...],
    shutdown_timeout: float,
    log_level: str,
) -> int:
    """Warm up and serve a loaded model until the end; give the process's exit code."""
    from dsjax.engine.async_engine import AsyncEngine
    from dsjax.serve.server import Server
    from dsjax.serve.serving import Serving
    from dsjax.serve.startup_screen import show_facts, show_url, warm_up_bar

    show_facts(console, model.facts)
    with warm_up_bar(console) as progress:
        model.engine.warm_up(progress)
    serving = Serving(AsyncEngine(model.engine), names, model.facts.model, model.facts.max_model_len)
    host, port = listener.getsockname()[:2]
    server = Server(
        serving,
        shutdown_timeout=shutdown_timeout,
        log_level=log_level,
        on_ready=lambda: show_url(console, host, port, names),
    )
    return server.serve_on(listener)
