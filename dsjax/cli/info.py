"""`dsjax info`: what a model is: its directory, its configuration, its parameters by component."""

import importlib.resources
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dsjax.cli.output import report_console, write_json


def info(
    model: Annotated[str, typer.Option(help="Bundled name, or a directory with config.json.")] = "demo",
    json_file: Annotated[
        str | None, typer.Option("--json", help="Write JSON to this file instead; - for standard output.")
    ] = None,
) -> None:
    """Show a model's path, configuration and parameters by component."""
    facts = describe(model)
    if json_file is None:
        _show(report_console(), facts)
        return
    write_json(json_file, facts)


def describe(model: str) -> dict[str, Any]:
    """`{"model", "path", "config", "parameters"}`: Hugging Face's field names, and the keys of `parameter_counts`.

    Raises:
        ConfigError: no such model, or a configuration that cannot be.
    """
    from dsjax.config import load_config
    from dsjax.model.parameter_counts import parameter_counts

    config = load_config(model)
    return {
        "model": model,
        "path": str(_path(model)),
        "config": config.to_dict(),
        "parameters": parameter_counts(config),
    }


def _path(model: str) -> Path:
    """The directory that `load_config` read."""
    from dsjax.config import bundled_models

    if model in bundled_models():
        return Path(str(importlib.resources.files("configs") / "models" / model))
    path = Path(model).expanduser().resolve()
    return path if path.is_dir() else path.parent


def _show(console: Console, facts: dict[str, Any]) -> None:
    console.print(f"[bold]{facts['model']}[/bold]  {facts['path']}", highlight=False)
    for title, key in (("parameters", "parameters"), ("configuration", "config")):
        table = Table(title=title, title_justify="left", show_header=False)
        table.add_column("name")
        table.add_column("value", justify="right" if key == "parameters" else "left")
        for name, value in facts[key].items():
            table.add_row(name, f"{value:,}" if key == "parameters" else str(value))
        console.print(table)
