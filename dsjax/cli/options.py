"""Command-line options from dataclasses: `EngineArgs`, which `serve` and `generate` share, and each command's own dataclass."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from dsjax.cli.help import ALL
from dsjax.engine.setup.args import EngineArgs
from dsjax.options import flag_of


def _show_all(context: typer.Context, is_given: bool) -> None:
    if is_given:
        context.meta[ALL] = True
        typer.echo(context.get_help())
        raise typer.Exit


def _engine_command(
    help_all: Annotated[
        bool,
        typer.Option(
            "--help-all", help="Show all options and other engines' names.", callback=_show_all, is_eager=True
        ),
    ] = False,
    config: Annotated[Path | None, typer.Option(help="YAML file with defaults for the other options.")] = None,
) -> None:
    """Declare the options that every command with engine options has. Both take effect before the command runs."""


def options_of(
    title: Callable[[type], str | None] = lambda kind: (kind.__doc__ or "").partition("\n")[0].rstrip("."),
    only: Container[str] | None = None,
    **kinds: type,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option per dataclass field. The command receives the dataclasses as the keyword arguments named in `kinds`.

    typer reads the signature of the decorated function. It has a parameter for each field, and `--config` if there are engine options.

    title: returns the `--help` heading of a dataclass, for fields without one; default: first line of its docstring; None: the heading of
        the command's own options. only: names of the engine options that the command takes; None: all.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [p.replace(kind=p.KEYWORD_ONLY) for name, p in signature.parameters.items() if name not in kinds]
        parameters = [parameter for kind in kinds.values() for parameter in _parameters(kind, title(kind), only)]
        if EngineArgs in kinds.values():
            shared = inspect.signature(_engine_command, eval_str=True).parameters.values()
            parameters += [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in shared]
        parameters += own

        @functools.wraps(command)
        def with_options(**values: Any) -> None:
            arguments = {parameter.name: values[parameter.name] for parameter in own}
            for argument, kind in kinds.items():
                names = [field.name for field in dataclasses.fields(kind) if field.name in values]
                arguments[argument] = kind(**{name: values[name] for name in names})
            command(**arguments)

        with_options.__signature__ = inspect.Signature(parameters)
        with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return with_options

    return decorate


engine_options = options_of(args=EngineArgs)
"""Give a command that takes `args: EngineArgs` one option per field."""


def _parameters(kind: type, panel: str | None, only: Container[str] | None) -> Iterator[inspect.Parameter]:
    """Yield a parameter for each field of a dataclass that has a command-line form. only: see `options_of`."""
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        takes_only_classes = "classes" in field.metadata and "choices" not in field.metadata
        is_left_out = kind is EngineArgs and only is not None and field.name not in only
        if not takes_only_classes and not is_left_out:
            yield _parameter(field, hints[field.name], panel)


def _parameter(field: dataclasses.Field, hint: Any, panel: str | None) -> inspect.Parameter:
    metadata, flag = field.metadata, flag_of(field)
    metavar = metadata.get("metavar")
    if dict[str, Any] in get_args(hint):  # a dictionary in Python, JSON on the command line
        hint, metavar = str | None, "JSON"
    flags = [f"{flag}/--no-{flag[2:]}" if hint is bool and not metadata.get("switch") else flag]
    if metadata.get("alias"):
        flags.append(metadata["alias"])
    choices = f" ({', '.join(metadata['choices'])})" if metadata.get("choices") else ""
    default_text = "on" if field.default is True else field.default is not False  # False: shows no default
    option = typer.Option(
        *flags,
        help=metadata["help"] + choices,
        envvar=metadata.get("envvar"),
        show_envvar=True,
        min=metadata.get("min"),
        show_default=metadata.get("show_default", default_text),
        hidden=metadata.get("advanced", False),
        metavar=metavar,
        rich_help_panel=metadata.get("group") or panel,
    )
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=Annotated[hint, option]
    )


def prepare_devices(mesh: str) -> None:
    """Emulate enough CPU devices for a mesh. Call before JAX starts. No effect on accelerators."""
    from sharding.emulation import emulate_devices
    from sharding.mesh import MeshSpec

    emulate_devices(MeshSpec.parse(mesh).num_devices)
