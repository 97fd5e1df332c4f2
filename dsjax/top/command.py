"""`dsjax top`: watch a running server."""

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from dsjax.cli.output import writing
from dsjax.top.reading import NoAnswerError, StatusClient, StatusReading
from dsjax.top.screen import Screen
from dsjax.top.view import view


def top(
    url: Annotated[str, typer.Option(help="URL of the server.")] = "http://127.0.0.1:8000",
    interval: Annotated[float, typer.Option(help="Interval between readings, in seconds.", min=0.1, max=86400)] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show one interval and exit.")] = False,
    json_file: Annotated[
        str | None,
        typer.Option("--json", help="Write one JSON line per interval instead; -: standard output."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="API key of the server.", show_default=False)
    ] = None,
) -> None:
    """Watch a running server: ranks, pages, tokens per second, latencies, hottest experts. Ctrl-C exits."""
    client = StatusClient(url, api_key)
    try:
        before = client.read()  # a missing server is an error; one that goes away later is waited for
        if json_file is not None:
            _write_json(client, before, interval, once, json_file)
        elif once:
            time.sleep(interval)
            Console().print(Screen(client.url, view(before, client.read())))
        else:
            _watch(client, before, interval)
    except KeyboardInterrupt:
        pass
    finally:
        client.close()


def _watch(client: StatusClient, before: StatusReading, interval: float) -> None:
    console = Console()
    last_view: dict[str, Any] | None = None
    with Live(Screen(client.url, None), console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            problem = ""
            try:
                after = client.read()
                last_view, before = view(before, after), after
            except NoAnswerError as error:
                problem = str(error)
            screen = Screen(client.url, last_view, problem)
            if console.is_terminal:
                live.update(screen, refresh=True)
            else:  # a file or a pipe: one screen after the other
                console.print(screen)


def _write_json(client: StatusClient, before: StatusReading, interval: float, once: bool, json_file: str) -> None:
    with contextlib.ExitStack() as opened:
        file = sys.stdout
        if json_file != "-":
            opened.enter_context(writing(json_file))
            file = opened.enter_context(Path(json_file).open("w", encoding="utf-8"))
        while True:
            time.sleep(interval)
            try:
                after = client.read()
                line = json.dumps(view(before, after))
            except NoAnswerError as error:
                if once:
                    raise
                print(error, file=sys.stderr, flush=True)
                continue
            print(line, file=file, flush=True)
            before = after
            if once:
                return
