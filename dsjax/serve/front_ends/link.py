"""`FrontEnd`: a front end's process and its channel, as the engine's process sees them; `Links`: all front ends."""

import asyncio
import logging
import subprocess
from typing import Any, Protocol

from dsjax.engine.schedule.request import Request
from dsjax.serve.front_ends.messages import MAX_UNSENT_BYTES, Channel

logger = logging.getLogger(__name__)


class FrontEnd:
    """One front end process. `FrontEnds` replaces it when it ends.

    Attributes:
        requests: its unfinished completions by handle.
        samples: its latest counters and histograms.
    """

    def __init__(self, index: int, process: subprocess.Popen, channel: Channel):
        self.index, self.process, self.channel = index, process, channel
        self.requests: dict[int, Request] = {}
        self.samples: list = []
        self.is_listening = asyncio.Event()
        self.compiling: set[int] = set()
        """Handles whose grammars are being compiled and that have not been aborted."""

    def send(self, message: Any) -> None:
        """Send a message. Kill the process if too many bytes are unread; `FrontEnds` then replaces it as after any exit."""
        self.channel.send(message)
        if self.channel.unsent > MAX_UNSENT_BYTES:
            logger.error("front end %d does not read its messages; killing it", self.index)
            self.process.kill()


class Links(Protocol):
    """All front ends, as `SharedEngine` and `EngineServer` use them."""

    links: list[FrontEnd]

    def send_all(self, message: Any) -> None:
        """Send a message to every front end."""

    def fail(self) -> None:
        """Report an engine failure; each front end fails its requests and exits."""

    async def abort(self, request_id: str | None) -> int:
        """Abort the requests with an id, or all, in every front end; return their number."""

    async def gather(self) -> None:
        """Collect the counters of all front ends."""

    async def end(self) -> None:
        """Make all front ends stop listening and exit; kill any that take too long."""
