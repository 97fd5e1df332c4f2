"""How the engine process sees its front ends (API server processes): `FrontEnd` is one of them, `Links` the interface to all."""

import asyncio
import logging
import subprocess
from typing import Any, Protocol

from dsjax.engine.schedule.request import Request
from dsjax.serve.front_ends.messages import MAX_UNSENT_BYTES, Channel

logger = logging.getLogger(__name__)


class FrontEnd:
    """One front end process and the channel to it. `FrontEnds`, which implements `Links`, starts a new process when it exits.

    Attributes:
        requests: unfinished engine requests, one per completion, by handle.
        samples: metric samples of its latest snapshot (counters and histograms).
    """

    def __init__(self, index: int, process: subprocess.Popen, channel: Channel):
        self.index, self.process, self.channel = index, process, channel
        self.requests: dict[int, Request] = {}
        self.samples: list = []
        self.is_listening = asyncio.Event()
        self.compiling: set[int] = set()
        """Handles of completions that wait for a grammar to compile. An abort removes the handle, so the request is dropped afterwards."""

    def send(self, message: Any) -> None:
        """Send a message. If too many bytes stay unread, kill the process, which `FrontEnds` then replaces."""
        self.channel.send(message)
        if self.channel.unsent > MAX_UNSENT_BYTES:
            logger.error("front end %d does not read its messages; killing it", self.index)
            self.process.kill()


class Links(Protocol):
    """Interface to all front ends, as `SharedEngine` and `EngineServer` use it. links: the running ones."""

    links: list[FrontEnd]

    def send_all(self, message: Any) -> None:
        """Send a message to every front end."""

    def fail(self) -> None:
        """Report an engine failure; each front end fails its requests and exits."""

    async def abort(self, request_id: str | None) -> int:
        """Abort the requests with this id in every front end, or all requests if it is None; return how many were aborted."""

    async def gather(self) -> None:
        """Refresh `FrontEnd.samples` of all front ends."""

    async def end(self) -> None:
        """Make all front ends stop listening and exit; kill any that take too long."""
