"""`dsjax serve`: load a model onto a mesh and answer OpenAI's clients."""

import dataclasses
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from dsjax.cli.options import engine_options
from dsjax.engine.elastic.joining import host_options
from dsjax.engine.setup.args import EngineArgs
from dsjax.errors import UserError
from dsjax.serve.options import REASONING_PARSERS, TOOL_CALL_PARSERS, ServeOptions, read_keys

if TYPE_CHECKING:  # they bring JAX in, which `--help` does not need
    from dsjax.engine.llm import LLM
    from dsjax.serve.metrics import Metrics


ServedModelNames = Annotated[
    list[str] | None, typer.Option(help="Name for clients; several may be given. Default: the model's.")
]
ShutdownTimeout = Annotated[
    float, typer.Option(help="Seconds that running requests get to finish after SIGINT or SIGTERM.", min=0)
]
StepTimeout = Annotated[
    float,
    typer.Option(help="Seconds after which a step is taken for a hang, which ends the process; 0: never.", min=0),
]


@engine_options
def serve(
    args: EngineArgs,
    host: Annotated[
        str, typer.Option(help="Address to listen on; the default is reachable from this machine only.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8000,
    served_model_name: ServedModelNames = None,
    shutdown_timeout: ShutdownTimeout = 10.0,
    api_server_count: Annotated[
        int,
        typer.Option(
            help="Processes that speak HTTP, tokenise and write text, on one port, in front of the engine's.",
            min=1,
            max=64,
        ),
    ] = 1,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Key that clients must send; several may be given.", envvar="DSJAX_API_KEY")
    ] = None,
    api_key_file: Annotated[list[Path] | None, typer.Option(help="File with such keys, one a line.")] = None,
    admin_api_key: Annotated[
        str | None,
        typer.Option(help="Key for the admin endpoints; without one they are closed.", envvar="DSJAX_ADMIN_API_KEY"),
    ] = None,
    max_queued_requests: Annotated[
        int | None,
        typer.Option(help="Most completions that wait for a slot; more get a 429. Default: no limit.", min=1),
    ] = None,
    max_queued_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of waiting completions; more get a 429. Default: no limit.", min=1)
    ] = None,
    max_body_bytes: Annotated[int, typer.Option(help="Largest body of a request.", min=1024)] = 16 * 1024 * 1024,
    request_timeout: Annotated[
        float, typer.Option(help="Seconds in which a request's head, then its body, must arrive.", min=0.1)
    ] = 60.0,
    step_timeout: StepTimeout = 300.0,
    reasoning_parser: Annotated[
        str, typer.Option(help=f"How reasoning is told from the answer ({', '.join(REASONING_PARSERS)}).")
    ] = "auto",
    tool_call_parser: Annotated[
        str, typer.Option(help=f"How tool calls are written ({', '.join(TOOL_CALL_PARSERS)}).")
    ] = "auto",
    disable_any_whitespace: Annotated[
        bool,
        typer.Option(
            "--disable-any-whitespace",
            help="Structured output has no blanks between JSON's parts, unless a request says otherwise.",
        ),
    ] = False,
    profile_dir: Annotated[
        str | None, typer.Option(help="Where /start_profile writes traces; without it it is closed.")
    ] = None,
    log_level: Annotated[
        str, typer.Option(help="Of the server's log: critical, error, warning, info, debug or trace.")
    ] = "info",
    log_json: Annotated[bool, typer.Option("--log-json", help="Log JSON, an object a line.")] = False,
) -> None:
    """Serve a model behind OpenAI's API."""
    from dsjax.serve.logs import configure_logging
    from dsjax.serve.server import bind, bind_shared

    if args.disaggregation_mode != "agg":
        raise UserError(
            f"--disaggregation-mode {args.disaggregation_mode} is one side of two behind an orchestrator that tells each of the other; "
            "dsjax serve alone has both with --prefill-mesh and --decode-mesh"
        )
    options = ServeOptions(
        api_keys=read_keys(api_key or (), api_key_file or ()),
        admin_api_key=admin_api_key,
        max_queued_requests=max_queued_requests,
        max_queued_tokens=max_queued_tokens,
        max_body_bytes=max_body_bytes,
        request_timeout=request_timeout,
        step_timeout=step_timeout,
        reasoning_parser=reasoning_parser,
        tool_call_parser=tool_call_parser,
        disable_any_whitespace=disable_any_whitespace,
        profile_dir=profile_dir,
    )
    configure_logging(log_level, as_json=log_json)
    group_options = host_options(args)
    leads = group_options is None or group_options.is_leader
    listeners = bind_shared(host, port, api_server_count) if leads and api_server_count > 1 else [bind(host, port)]
    listener = listeners[0]
    console = Console()
    if group_options is not None and not group_options.is_leader:
        from dsjax.serve.headless import Headless

        Headless(group_options).serve(args, listener, console)
        return
    from dsjax.engine.llm import LLM

    model = LLM(**dataclasses.asdict(args), show_progress=True)
    names = tuple(served_model_name or ()) or (args.model,)
    code = serve_model(
        model,
        console,
        listener,
        names,
        shutdown_timeout,
        log_level,
        options,
        orders_by_priority=args.scheduling_policy == "priority",
        front_end_listeners=listeners if len(listeners) > 1 else (),
        log_json=log_json,
    )
    if code:
        raise typer.Exit(code)


def serve_model(
    model: "LLM",
    console: Console,
    listener: socket.socket,
    names: tuple[str, ...],
    shutdown_timeout: float,
    log_level: str,
    options: ServeOptions | None = None,
    *,
    orders_by_priority: bool = False,
    front_end_listeners: Sequence[socket.socket] = (),
    log_json: bool = False,
) -> int:
    """Serve a loaded model until the end, listening while it warms up; give the process's exit code.

    front_end_listeners: one for each process that is to speak HTTP; none: this one does, on `listener`.
    """
    from dsjax.engine.async_engine import AsyncEngine
    from dsjax.serve.front_ends.engine_server import EngineServer
    from dsjax.serve.front_ends.shared_engine import SharedEngine
    from dsjax.serve.server import Server
    from dsjax.serve.serving import Serving
    from dsjax.serve.startup_screen import show_facts, show_url, warm_up_bar

    def warm_up(check_going_on: Callable[[], None]) -> None:
        with warm_up_bar(console) as progress:

            def between_shapes(done: int, total: int, label: str) -> None:
                check_going_on()
                progress(done, total, label)

            model.parts.warm_up(between_shapes)

    facts = model.facts
    show_facts(console, facts)
    metrics = metrics_of(model, names[0])
    engine = SharedEngine(model.parts) if front_end_listeners else AsyncEngine(model.parts)
    group = getattr(model, "group", None)
    serving = Serving(
        engine,
        names,
        facts.model,
        facts.max_model_len,
        options or ServeOptions(),
        facts=facts,
        metrics=metrics,
        orders_by_priority=orders_by_priority,
    )
    engine.on_change.append(serving.on_change)
    host, port = listener.getsockname()[:2]
    how = {
        "shutdown_timeout": shutdown_timeout,
        "log_level": log_level,
        "warm_up": warm_up,
        "on_ready": lambda: show_url(console, host, port, names),
        "before_exit": lambda code: group and group.leave("its engine has failed" if code else None),
    }
    if front_end_listeners:
        shared = EngineServer.over(serving, model.parts, front_end_listeners, log_json, **how)
        return shared.serve_behind()
    return Server(serving, **how).serve_on(listener)


def metrics_of(model: "LLM", name: str) -> "Metrics":
    """What counts a loaded model's work. name: as clients know it."""
    from dsjax.serve.metrics import Metrics
    from dsjax.serve.metrics_parts import device_memory

    facts = model.facts
    return Metrics(
        name,
        facts.dp_ranks,
        facts.max_model_len,
        experts_per_device=facts.physical_experts_per_device,
        most_drafts=facts.speculation["num_speculative_tokens"] if facts.speculation else 0,
        page_bytes=facts.page_bytes,
        device_memory=device_memory,
        generations=model.parts.core.generations,
        prefills=model.parts.prefill_engines,
    )
