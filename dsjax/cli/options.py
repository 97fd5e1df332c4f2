"""`EngineArgs` as command-line options, so that `serve` and `generate` have the same ones."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_type_hints

import typer

from dsjax.engine.setup.args import EngineArgs


def engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command, whose first parameter is an `EngineArgs`, one option for each of its fields.

    typer reads a function's signature; this one has the fields in place of the first parameter.
    """
    fields = dataclasses.fields(EngineArgs)
    hints = get_type_hints(EngineArgs)
    options = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=Annotated[
                _as_typed(hints[field.name]), typer.Option(*_flags(field), help=_help(field), rich_help_panel="Engine")
            ],
        )
        for field in fields
    ]
    own = [p.replace(kind=p.KEYWORD_ONLY) for p in list(inspect.signature(command).parameters.values())[1:]]

    @functools.wraps(command)
    def with_options(**given: Any) -> None:
        engine = {field.name: given.pop(field.name) for field in fields}
        command(EngineArgs(**engine), **given)

    with_options.__signature__ = inspect.Signature([*options, *own])
    with_options.__annotations__ = {p.name: p.annotation for p in (*options, *own)}
    return with_options


def _as_typed(hint: Any) -> Any:
    """A field's type on the command line, where what Python gives as a dictionary is JSON text."""
    return str | None if dict[str, Any] in get_args(hint) else hint


def _flags(field: dataclasses.Field) -> tuple[str, ...]:
    """A field's flags, where it has more than the one that typer makes of its name."""
    alias = field.metadata["alias"]
    return (f"--{field.name.replace('_', '-')}", alias) if alias else ()


def _help(field: dataclasses.Field) -> str:
    choices = field.metadata["choices"]
    text = field.metadata["help"]
    return f"{text} ({', '.join(choices)})" if choices else text


def prepare_devices(mesh: str) -> None:
    """Have enough CPU devices for a mesh emulated, before JAX starts. Without effect where accelerators are used."""
    from sharding.emulation import emulate_devices
    from sharding.mesh import MeshSpec

    emulate_devices(MeshSpec.parse(mesh).num_devices)
