"""`FrontEnd`: one front end's process and the channel to it, seen from the engine's; `Links`: all of them."""

from __future__ import annotations

import asyncio
import logging
import subprocess
from typing import Any, Protocol

from dsjax.engine.schedule.request import Request
from dsjax.serve.front_ends.messages import MOST_UNSENT_BYTES, Channel

logger = logging.getLogger(__name__)


class FrontEnd:
    """One front end, from its start to its end; `FrontEnds` makes another in its place.

    Attributes:
        requests: its completions that have not ended, by their handles.
        samples: its counters and histograms, as it last told them.
    """

    def __init__(self, index: int, process: subprocess.Popen, channel: Channel):
        self.index, self.process, self.channel = index, process, channel
        self.requests: dict[int, Request] = {}
        self.samples: list = []
        self.listens = asyncio.Event()
        self.preparing: set[int] = set()
        """Handles whose rules are being made, unless they were aborted meanwhile."""

    def send(self, message: Any) -> None:
        """Send it a message. One that has not read for long hangs, and is killed: its end is then noticed as any other."""
        self.channel.send(message)
        if self.channel.unsent > MOST_UNSENT_BYTES:
            logger.error("front end %d does not read what it is told; it is ended", self.index)
            self.process.kill()


class Links(Protocol):
    """All front ends, as the engine that they share and its server know them."""

    links: list[FrontEnd]

    def send_all(self, message: Any) -> None:
        """Send every front end a message."""

    def fail(self) -> None:
        """Tell all that the engine has failed: each tells its clients, and ends."""

    async def abort(self, request_id: str | None) -> int:
        """End the requests of an id, or all, wherever they are; give how many there were."""

    async def gather(self) -> None:
        """Ask all for their counters."""

    async def end(self) -> None:
        """Have all close their doors and end; whoever takes too long is killed."""
