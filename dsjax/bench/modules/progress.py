"""A progress bar over cases, with the name of the one that is being timed."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dsjax.bench.modules.case import Case
from dsjax.progress import Tenths


@contextlib.contextmanager
def case_progress(console: Console, shown: bool, total: int) -> Iterator[Callable[[Case], None]]:
    """A function to call when a case begins. The bar goes away at the end; where the console is no terminal, a line at each tenth."""
    tenths = None
    if shown and not console.is_terminal:
        tenths = Tenths("timing cases", total, lambda line: console.print(line, highlight=False))
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task("", total=total)
        begun = [0]

        def on_start(case: Case) -> None:
            if tenths is not None:
                tenths.reach(begun[0])
            bar.update(task, completed=begun[0], description=case.title)
            begun[0] += 1

        yield on_start
