"""Command line of an NVIDIA Dynamo worker: its own options, the engine's options, and the options of Dynamo's runtime."""

import argparse
import math
import os
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

import typer

from dsjax.cli.help import PLAIN, PanelledCommand
from dsjax.cli.options import engine_options
from dsjax.engine.elastic.joining import host_options
from dsjax.engine.setup.args import EngineArgs
from dsjax.errors import UserError
from dsjax.serve.command import ApiKey, ApiKeyFile, ServedModelNames, ShutdownTimeout, StepTimeout
from dsjax.serve.options import ServeOptions, check_key_variables, check_listener, read_keys

if TYPE_CHECKING:
    from dynamo.common.backend import WorkerConfig

    from dsjax.dynamo.worker import Options
    from dsjax.engine.text.tokenizer import Tokenizer
    from dsjax.hosts import HostOptions

TOOL_CALL_PARSERS = {
    "deepseek_v3": "deepseek_v3",
    "deepseek_v31": "deepseek_v3_1",
    "deepseek_v32": "deepseek_v3_2",
    "deepseek_v4": "deepseek_v4",
    "kimi_k2": "kimi_k2",
}
"""dsjax's name of a tool-call format → Dynamo's."""
REASONING_PARSER = "deepseek_r1"
COMPONENT, PREFILL, ENDPOINT = "backend", "prefill", "generate"
"""Default component names of workers and of prefill workers, and default endpoint name; `--endpoint` overrides them."""
DEADLINE, DRAIN = "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT", "DYN_PREFILL_DRAIN_TIMEOUT_S"
"""Dynamo's variables: seconds until it ends a process that shuts down, and seconds that a prefill worker keeps unfetched pages."""
CLEANUP_SECONDS = 20
"""Time for the engine's shutdown after its last request; a group's other processes have 10 s to follow."""


class DynamoCommand(PanelledCommand):
    """A command that passes unknown options on to Dynamo, and lists Dynamo's options in a section of their own."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the help's sections."""
        super().format_options(ctx, formatter)
        with formatter.section("Dynamo"):
            try:
                options = [action for action in runtime_parser()._actions if action.help != argparse.SUPPRESS]
            except UserError:
                formatter.write_text("Dynamo's own options are listed here where it is installed.")
                return
            formatter.write_dl([_described(action) for action in options])


def _described(option: argparse.Action) -> tuple[str, str]:
    """Return an option's help row. Aliases go into the text, because two long names do not fit into 80 columns."""
    name, *others = option.option_strings
    aliases = [f"(or {other})" for other in others]
    return name, " ".join([*(option.help or "").split(), *aliases])


class Prepared(NamedTuple):
    """A worker's options, and Dynamo's configuration of the worker."""

    options: "Options"
    worker: "WorkerConfig"


def make_app(then: Callable[[Prepared], None]) -> typer.Typer:
    """Return the command. It calls `then` with the parsed options, or runs to the end itself in a group's process other than the leader."""
    app = typer.Typer(
        **PLAIN
        | {"context_settings": PLAIN["context_settings"] | {"ignore_unknown_options": True, "allow_extra_args": True}}
    )

    @app.command("dynamo", cls=DynamoCommand)
    @engine_options
    def dynamo(
        args: EngineArgs,
        context: typer.Context,
        served_model_name: ServedModelNames = None,
        shutdown_timeout: ShutdownTimeout = 10.0,
        step_timeout: StepTimeout = 300.0,
        bootstrap: Annotated[
            bool,
            typer.Option(
                "--bootstrap",
                help="For a prefill worker: let the frontend send each request to the prefill and the decode worker at the same time.",
            ),
        ] = False,
        api_key: ApiKey = None,
        api_key_file: ApiKeyFile = None,
        allow_unauthenticated: Annotated[
            bool,
            typer.Option(
                "--allow-unauthenticated",
                help="Allow requests without an API key to /metrics at DYN_SYSTEM_PORT of a group's other processes.",
            ),
        ] = False,
    ) -> None:
        """Run a worker of NVIDIA Dynamo, whose frontend and router serve the clients."""
        check_key_variables()
        http = ServeOptions(api_keys=read_keys(api_key or (), api_key_file or ()))
        runtime = runtime_config(context.args, PREFILL if args.disaggregation_mode == "prefill" else COMPONENT)
        group = host_options(args)
        if group is not None and not group.is_leader:
            _follow(args, group, http, allow_unauthenticated)
            return
        if bootstrap and args.disaggregation_mode != "prefill":
            raise UserError(
                "--bootstrap is a prefill worker's; give --disaggregation-mode prefill too, or leave it out"
            )
        names = tuple(served_model_name or (args.model,))
        allow_shutdown(os.environ, shutdown_timeout)
        then(_prepare(args, runtime, names, shutdown_timeout, step_timeout, bootstrap))

    return app


def parse(argv: list[str] | None) -> Prepared:
    """Parse a command line (None: this process's own) as `python -m dsjax.dynamo` does; for Dynamo's launchers.

    Raises:
        SystemExit: there is no engine to create: `--help` was given, or this process has followed its group's leader to the end.
    """
    prepared: list[Prepared] = []
    typer.main.get_command(make_app(prepared.append)).main(argv, "dsjax dynamo", standalone_mode=False)
    if not prepared:
        raise SystemExit(0)
    return prepared[0]


def allow_shutdown(variables: MutableMapping[str, str], shutdown_timeout: float) -> None:
    """Set Dynamo's variables so that it waits for a worker's shutdown as long as `--shutdown-timeout` needs; by default it waits 30 s.

    Raises:
        UserError: the variables allow less time, or the timeout is not finite.
    """
    if not math.isfinite(shutdown_timeout):
        raise UserError(
            f"--shutdown-timeout is {shutdown_timeout:g}, and Dynamo ends a process after a finite time; give seconds"
        )
    needed = math.ceil(shutdown_timeout) + CLEANUP_SECONDS
    deadline = variables.get(DEADLINE) or str(max(needed, 30))
    if not deadline.isdecimal() or int(deadline) < needed:
        raise UserError(
            f"{DEADLINE} is {deadline}, and --shutdown-timeout {shutdown_timeout:g} needs {needed} whole seconds at least, of which "
            f"{CLEANUP_SECONDS} are the engine's own; leave the variable out, or give a smaller --shutdown-timeout"
        )
    variables[DEADLINE] = deadline
    variables.setdefault(DRAIN, f"{shutdown_timeout:g}")


def runtime_parser() -> argparse.ArgumentParser:
    """Return Dynamo's own parser for its runtime options, which environment variables can also set.

    Raises:
        UserError: Dynamo is not installed.
    """
    try:
        import dynamo.common.backend  # the worker interface, which older releases lack
        from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeArgGroup
    except ImportError as error:
        raise UserError(
            f"dsjax dynamo needs NVIDIA Dynamo 1.6, which cannot be imported here ({error}): pip install 'dsjax[dynamo]' "
            "(docs/dynamo.md has what to do where that fails)"
        ) from error
    del dynamo
    parser = _Parser(prog="dsjax dynamo", add_help=False, allow_abbrev=False)
    DynamoRuntimeArgGroup().add_arguments(parser)
    return parser


def runtime_config(arguments: Sequence[str], component: str = "backend") -> Any:
    """Return Dynamo's `DynamoRuntimeConfig` from the arguments that dsjax does not know. component: default without `--endpoint`.

    Raises:
        UserError: Dynamo is not installed, or an option is unknown or has an invalid value.
    """
    parser = runtime_parser()
    from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeConfig
    from dynamo.common.utils.runtime import parse_endpoint

    config = DynamoRuntimeConfig.from_cli_args(parser.parse_args(list(arguments)))
    try:
        config.validate()
        endpoint = config.endpoint or f"{config.namespace}.{component}.{ENDPOINT}"
        config.namespace, config.component, config.endpoint = parse_endpoint(endpoint)
    except ValueError as error:
        raise UserError(str(error)) from error
    template = config.custom_jinja_template
    if template is not None:
        config.custom_jinja_template = str(Path(os.path.expanduser(os.path.expandvars(template))))
        if not Path(config.custom_jinja_template).is_file():
            raise UserError(f"--custom-jinja-template {template} is no file; give the file of a chat template")
    return config


def _prepare(
    args: EngineArgs,
    runtime: Any,
    names: tuple[str, ...],
    shutdown_timeout: float,
    step_timeout: float,
    bootstrap: bool,
) -> Prepared:
    """Resolve the model first, so that a wrong model fails at once; then make the worker's options and configuration."""
    from dynamo.common.backend import WorkerConfig
    from dynamo.common.constants import DisaggregationMode

    from dsjax.checkpoint.hub import resolve
    from dsjax.config import bundled_models
    from dsjax.dynamo.worker import Options
    from dsjax.engine.text.tokenizer import Tokenizer

    for name in ("tokenizer", "tokenizer_mode", "chat_template"):
        if getattr(args, name) != getattr(EngineArgs, name):
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} is for dsjax serve; Dynamo's frontend has the tokenizer, and writes the prompts")
    directory = resolve(args.model, revision=args.revision)
    choose_parsers(runtime, Tokenizer.from_directory(directory))
    # Frontends load tokenizer and chat template themselves: by the hub's name, or from this directory if the name does not lead to it.
    is_local = (
        args.model in bundled_models() or Path(os.path.expanduser(args.model)).is_dir() or args.revision is not None
    )
    model = str(directory.resolve()) if is_local else args.model
    options = Options(args, names, model, step_timeout, shutdown_timeout, bootstrap)
    mode = DisaggregationMode(args.disaggregation_mode)
    worker = WorkerConfig.from_runtime_config(
        runtime, model_name=model, served_model_name=names[0], disaggregation_mode=mode
    )
    return Prepared(options, worker)


def choose_parsers(runtime: Any, tokenizer: "Tokenizer") -> None:
    """Choose the frontend's parsers by the model's template, as `dsjax serve` does, unless options set them."""
    from dsjax.serve.message_parser import ReasoningParser
    from dsjax.serve.tool_formats import choose_tool_format

    tool_format = choose_tool_format("auto", tokenizer)
    if runtime.dyn_tool_call_parser is None and tool_format is not None:
        runtime.dyn_tool_call_parser = TOOL_CALL_PARSERS[tool_format.name]
    if runtime.dyn_reasoning_parser is None and ReasoningParser.choose("auto", tokenizer) is not None:
        runtime.dyn_reasoning_parser = REASONING_PARSER


def _follow(args: EngineArgs, group: "HostOptions", http: ServeOptions, allow_unauthenticated: bool) -> None:
    """Run a process of a group other than its leader; it receives no requests.

    It answers probes at Dynamo's system port. If that is not set, there are no probes, and the process listens on loopback.

    Raises:
        UserError: the system port is open to other machines, and `/metrics` has no key.
    """
    from rich.console import Console

    from dsjax.serve.headless import Headless
    from dsjax.serve.server import bind

    port = os.environ.get("DYN_SYSTEM_PORT", "")
    number = int(port) if port.isdecimal() else 0
    listener = bind(os.environ.get("DYN_SYSTEM_HOST", "0.0.0.0" if number else "127.0.0.1"), number)
    check_listener(listener, http.api_keys, allow_unauthenticated)
    Headless(group, http).serve(args, listener, Console())


class _Parser(argparse.ArgumentParser):
    """A parser that reports a wrong option like the rest of the command line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; dsjax dynamo --help-all lists all options")
