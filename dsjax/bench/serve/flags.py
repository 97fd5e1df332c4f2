"""Option dataclasses as command-line options."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from dsjax.bench.serve.options import flag_of


def options_of(**kinds: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option for each field of dataclasses; it gets the dataclasses, under the names given here.

    typer reads a function's signature; the decorated one has the fields in place of those parameters. Each dataclass's
    docstring is the title of its panel in `--help`.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [p.replace(kind=p.KEYWORD_ONLY) for name, p in signature.parameters.items() if name not in kinds]
        options = [_parameter(kind, field) for kind in kinds.values() for field in dataclasses.fields(kind)]

        @functools.wraps(command)
        def with_options(**given: Any) -> None:
            made = {
                name: kind(**{field.name: given.pop(field.name) for field in dataclasses.fields(kind)})
                for name, kind in kinds.items()
            }
            command(**made, **given)

        with_options.__signature__ = inspect.Signature([*options, *own])
        with_options.__annotations__ = {p.name: p.annotation for p in (*options, *own)}
        return with_options

    return decorate


def _parameter(kind: type, field: dataclasses.Field) -> inspect.Parameter:
    facts = field.metadata
    hint = get_type_hints(kind)[field.name]
    names = [flag_of(field)]
    if hint is bool:
        names = [f"{flag_of(field)}/--no-{flag_of(field)[2:]}"]
    help = facts["help"] + (f" ({', '.join(facts['choices'])})" if "choices" in facts else "")
    found = typer.Option(
        *names,
        help=help,
        envvar=facts.get("envvar"),
        show_envvar=True,
        rich_help_panel=(kind.__doc__ or "").rstrip("."),
    )
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=Annotated[hint, found]
    )
