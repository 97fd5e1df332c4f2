"""`dsjax serve`: load a model onto a mesh and answer OpenAI's clients."""

import dataclasses
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from dsjax.cli.options import options_of
from dsjax.descriptors import check_descriptors
from dsjax.engine.elastic.joining import host_options
from dsjax.engine.setup.args import EngineArgs
from dsjax.errors import UserError
from dsjax.serve.options import (
    ADMIN_KEY_VARIABLE,
    KEY_VARIABLE,
    HttpOptions,
    ServeOptions,
    check_key_variables,
    check_listener,
    read_keys,
)

if TYPE_CHECKING:  # import JAX, which `--help` does not need
    from dsjax.engine.contract.executor import CompileRest
    from dsjax.llm import LLM
    from dsjax.serve.metrics import Metrics


ServedModelNames = Annotated[
    list[str] | None, typer.Option(help="Model name in the API. Can be repeated. Default: the value of --model.")
]
ShutdownTimeout = Annotated[
    float, typer.Option(help="Seconds to let running requests finish after SIGINT or SIGTERM.", min=0, hidden=True)
]
StepTimeout = Annotated[
    float, typer.Option(help="Exit if a step hangs for this many seconds. 0: never.", min=0, hidden=True)
]
ApiKey = Annotated[
    list[str] | None, typer.Option(help="API key that clients must send. Can be repeated.", envvar=KEY_VARIABLE)
]
ApiKeyFile = Annotated[list[Path] | None, typer.Option(help="File with one API key per line. Can be repeated.")]


@options_of(title=lambda kind: "Requests and answers", args=EngineArgs, http=HttpOptions)
def serve(
    args: EngineArgs,
    http: HttpOptions,
    host: Annotated[str, typer.Option(help="Host to listen on.")] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            help="Port to listen on; 0: any. Default: 8000, or 0 in processes without clients.",
            min=0,
            max=65535,
            show_default=False,
        ),
    ] = None,
    served_model_name: ServedModelNames = None,
    shutdown_timeout: ShutdownTimeout = 10.0,
    api_server_count: Annotated[
        int,
        typer.Option(
            help="Number of API server processes for HTTP and tokenisation, on one port.", min=1, max=64, hidden=True
        ),
    ] = 1,
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
    admin_api_key: Annotated[
        str | None,
        typer.Option(
            help="API key for the admin endpoints. Default: they are disabled.", envvar=ADMIN_KEY_VARIABLE, hidden=True
        ),
    ] = None,
    allow_unauthenticated: Annotated[
        bool, typer.Option("--allow-unauthenticated", help="Let other machines connect without an API key.")
    ] = False,
    step_timeout: StepTimeout = 300.0,
    log_level: Annotated[str, typer.Option(help="Log level: critical, error, warning, info, debug or trace.")] = "info",
    log_json: Annotated[bool, typer.Option("--log-json", help="Write logs as JSON lines.", hidden=True)] = False,
) -> None:
    """Serve a model with an OpenAI-compatible API."""
    from dsjax.serve.logs import configure_logging
    from dsjax.serve.server import bind, bind_shared

    if args.disaggregation_mode != "agg":
        raise UserError(
            f"--disaggregation-mode {args.disaggregation_mode} is one side of two behind an orchestrator that tells each of the other; "
            "dsjax serve alone has both with --prefill-mesh and --decode-mesh"
        )
    check_key_variables()
    keys = read_keys(api_key or (), api_key_file or ())
    options = ServeOptions(**vars(http), api_keys=keys, admin_api_key=admin_api_key, step_timeout=step_timeout)
    configure_logging(log_level, as_json=log_json)
    check_descriptors(api_server_count if api_server_count > 1 else 0)
    group_options = host_options(args)
    leads = group_options is None or group_options.is_leader
    if port is None:
        port = 8000 if leads and args.afd_role != "expert" else 0
    if leads and api_server_count > 1:
        from dsjax.serve.front_ends.engine_server import check_private_listener

        check_private_listener()
    listeners = bind_shared(host, port, api_server_count) if leads and api_server_count > 1 else [bind(host, port)]
    listener = listeners[0]
    check_listener(listener, keys, allow_unauthenticated)
    console = Console()
    if args.afd_role == "expert":
        from dsjax.serve.headless import HeadlessExperts

        HeadlessExperts(options, args.afd_server_rank or 0).serve(args, listener, console)
        return
    if group_options is not None and not group_options.is_leader:
        from dsjax.serve.headless import Headless

        Headless(group_options, options).serve(args, listener, console)
        return
    from dsjax.llm import LLM

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
    """Serve a loaded model until shutdown and return the exit code. The server listens during warm-up.

    front_end_listeners: one for each front end process; empty: this process serves HTTP itself, on `listener`.
    """
    from dsjax.engine.engine_thread import AsyncEngine
    from dsjax.serve.front_ends.engine_server import EngineServer
    from dsjax.serve.front_ends.shared_engine import SharedEngine
    from dsjax.serve.server import Server
    from dsjax.serve.serving import Serving
    from dsjax.serve.startup_screen import show_facts, show_url, warm_up_bar

    def warm_up(raise_if_stopped: Callable[[], None]) -> "CompileRest | None":
        with warm_up_bar(console) as progress:

            def between_shapes(done: int, total: int, label: str) -> None:
                raise_if_stopped()
                progress(done, total, label)

            return model.parts.warm_up(between_shapes, lazily=True)

    facts = model.facts
    options = options or ServeOptions()
    show_facts(console, facts)
    metrics = metrics_of(model, names[0])
    engine = SharedEngine(model.parts) if front_end_listeners else AsyncEngine(model.parts)
    group = getattr(model, "group", None)
    serving = Serving(
        engine,
        names,
        facts.model,
        facts.max_model_len,
        options,
        facts=facts,
        metrics=metrics,
        orders_by_priority=orders_by_priority,
    )
    engine.on_change.append(serving.on_change)
    url = options.url(*listener.getsockname()[:2])

    def prepare_end() -> None:
        engine.wait_for_no_mesh()
        if group is not None:
            group.needs_all = True  # a change of the mesh would only delay the shutdown

    how = {
        "on_signal": prepare_end,
        "shutdown_timeout": shutdown_timeout,
        "log_level": log_level,
        "warm_up": warm_up,
        "on_ready": lambda: show_url(console, url, names),
        "before_exit": lambda code: group and group.leave("its engine has failed" if code else None),
    }
    if front_end_listeners:
        shared = EngineServer.create(serving, model.parts, front_end_listeners, log_json, **how)
        return shared.serve_privately()
    return Server(serving, **how).serve_on(listener)


def metrics_of(model: "LLM", name: str) -> "Metrics":
    """Create the metrics of a loaded model. name: the model name that clients use."""
    from dsjax.engine.afd.messages import ExpertLinks
    from dsjax.engine.device.process import device_memory
    from dsjax.serve.metrics import Metrics

    facts = model.facts
    group = getattr(model, "group", None)
    links = lambda: model.parts.core.executor.extension(ExpertLinks)  # noqa: E731
    return Metrics(
        name,
        facts.dp_ranks,
        facts.max_model_len,
        experts_per_device=facts.physical_experts_per_device,
        max_drafts=facts.speculation["num_speculative_tokens"] if facts.speculation else 0,
        page_bytes=facts.page_bytes,
        device_memory=device_memory,
        generations=model.parts.core.mesh_changer,
        parked=model.parts.core.parked,
        prefills=model.parts.prefill_engines,
        links=(lambda: group.links.states) if group is not None and group.options.link_monitor_interval else None,
        expert_links=None if links() is None else links,
    )
