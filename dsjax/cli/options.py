"""Dataclasses as command-line options: `EngineArgs`, so that `serve` and `generate` have the same ones, and any command's own."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_type_hints

import typer

from dsjax.engine.setup.args import EngineArgs
from dsjax.options import flag_of


def options_of(
    title: Callable[[type], str | None] = lambda kind: (kind.__doc__ or "").partition("\n")[0].rstrip("."),
    /,
    **kinds: type,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option for each field of dataclasses; it gets the dataclasses, under the names given here.

    typer reads a function's signature; the decorated one has the fields in place of those parameters.

    title: of a dataclass's panel in `--help`, its docstring's first line unless another is given; None for the panel of a command's own
        options.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        others = [p.replace(kind=p.KEYWORD_ONLY) for name, p in signature.parameters.items() if name not in kinds]
        options = [
            _parameter(field, hint, title(kind))
            for kind in kinds.values()
            for field, hint in zip(dataclasses.fields(kind), _hints(kind), strict=True)
            if "choices" in field.metadata or "classes" not in field.metadata  # a class alone has no name to type
        ]

        @functools.wraps(command)
        def with_options(**given: Any) -> None:
            made = {
                name: kind(**{f.name: given.pop(f.name) for f in dataclasses.fields(kind) if f.name in given})
                for name, kind in kinds.items()
            }
            command(**made, **given)

        with_options.__signature__ = inspect.Signature([*options, *others])
        with_options.__annotations__ = {p.name: p.annotation for p in (*options, *others)}
        return with_options

    return decorate


engine_options = options_of(lambda kind: "Engine", args=EngineArgs)
"""Give a command, which takes an `EngineArgs` as `args`, one option for each of its fields."""


def _hints(kind: type) -> list[Any]:
    """The fields' types on the command line, where what Python gives as a dictionary is JSON text."""
    hints = get_type_hints(kind)
    types = [hints[field.name] for field in dataclasses.fields(kind)]
    return [str | None if dict[str, Any] in get_args(hint) else hint for hint in types]


def _parameter(field: dataclasses.Field, hint: Any, panel: str | None) -> inspect.Parameter:
    facts, flag = field.metadata, flag_of(field)
    names = [f"{flag}/--no-{flag[2:]}" if hint is bool and not facts.get("switch") else flag]
    option = typer.Option(
        *names,
        *([facts["alias"]] if facts.get("alias") else []),
        help=facts["help"] + (f" ({', '.join(facts['choices'])})" if facts.get("choices") else ""),
        envvar=facts.get("envvar"),
        show_envvar=True,
        min=facts.get("min"),
        show_default=facts.get("show_default", True),
        rich_help_panel=panel,
    )
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=Annotated[hint, option]
    )


def prepare_devices(mesh: str) -> None:
    """Have enough CPU devices for a mesh emulated, before JAX starts. Without effect where accelerators are used."""
    from sharding.emulation import emulate_devices
    from sharding.mesh import MeshSpec

    emulate_devices(MeshSpec.parse(mesh).num_devices)
