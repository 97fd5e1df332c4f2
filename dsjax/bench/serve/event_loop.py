"""`run`: the event loop of whoever puts load on a server, which shares the machine with what it measures."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

try:
    import uvloop
except ImportError:  # there is none for Windows
    uvloop = None

Result = TypeVar("Result")


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run`, on uvloop where there is one."""
    return asyncio.run(main) if uvloop is None else uvloop.run(main)
