"""`ServerWatch`: looks at a server every few seconds while it is under load: whether it answers, its counters, its devices' memory."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from dsjax.top.reading import Exposition

_TIMEOUT = aiohttp.ClientTimeout(total=10)
_TOKENS = "vllm:generation_tokens_total"
_STARTED = "process_start_time_seconds"
BALANCE_NAMES = (
    "dsjax_step_seconds_count", "dsjax_expert_tokens_total", "dsjax_expert_balancedness", "dsjax_eplb_rank_tokens",
    "dsjax_eplb_balancedness", "dsjax_eplb_rebalances_total", "dsjax_eplb_exchange_seconds_total", "dsjax_eplb_rebalance_seconds_total",
    "dsjax_eplb_windows_total",
)  # fmt: skip
OURS = "dsjax_compilations_after_warm_up_total"
"""A counter that every server of dsjax shows from its start, and no other server."""
_USED, _LIMIT = "dsjax_device_memory_used_bytes", "dsjax_device_memory_limit_bytes"
_DCGM_USED, _DCGM_FREE = "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_FREE"
_NAMES = (_TOKENS, _STARTED, OURS, _USED, _LIMIT, *BALANCE_NAMES)


@dataclass
class ServerWatch:
    """What was seen of a server, as a context in which it is watched.

    Attributes:
        session, url: of the server.
        device_metrics: further addresses that show devices' memory: followers' `/metrics`, NVIDIA's dcgm-exporter.
        interval: seconds between two looks.
        counters: the server's metrics at each look that had an answer.
        memory: (seconds since the watch began, largest share of a device's memory in use, bytes in use of all devices) of each look.
        outages: times that `/v1/models` stopped answering.
    """

    session: aiohttp.ClientSession
    url: str
    device_metrics: Sequence[str]
    interval: float
    counters: list[Exposition] = field(default_factory=list)
    memory: list[tuple[float, float, float]] = field(default_factory=list)
    outages: int = 0

    async def __aenter__(self) -> "ServerWatch":
        self._zero, self._answered = time.perf_counter(), True
        await self._look()
        self._task = asyncio.create_task(self._go_on())
        return self

    async def __aexit__(self, *raised) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        if raised[0] is None:
            await self._look()

    async def _go_on(self) -> None:
        while True:
            await asyncio.sleep(self.interval)
            await self._look()

    async def _look(self) -> None:
        answered = await self._get(f"{self.url}/v1/models") is not None
        self.outages += self._answered and not answered
        self._answered = answered
        # Asked for by name, since a large server of ours has thousands of samples; other servers give all.
        own = await self._exposition(f"{self.url}/metrics", [("name[]", name) for name in _NAMES])
        if own is not None:
            self.counters.append(own)
        others = [await self._exposition(url, []) for url in self.device_metrics]
        self._read_memory([each for each in (own, *others) if each is not None])

    def _read_memory(self, seen: list[Exposition]) -> None:
        shares, used_bytes = [], 0.0
        for each in seen:
            limits = each.by(_LIMIT, "device", "process", "instance")
            for key, used in each.by(_USED, "device", "process", "instance").items():
                if limits.get(key):
                    shares.append(used / limits[key])
                    used_bytes += used
            free = each.by(_DCGM_FREE, "gpu", "Hostname")
            for key, used in each.by(_DCGM_USED, "gpu", "Hostname").items():
                if used + free.get(key, 0.0) > 0:
                    shares.append(used / (used + free.get(key, 0.0)))
                    used_bytes += used * 2**20  # dcgm-exporter's are MiB
        if shares:
            self.memory.append((time.perf_counter() - self._zero, max(shares), used_bytes))

    @property
    def restarts(self) -> int | None:
        """Times that the counters began anew; None where the server shows none."""
        if len([each for each in self.counters if each.by(_TOKENS) or each.by(_STARTED)]) < 2:
            return None
        begun = 0
        for before, after in zip(self.counters, self.counters[1:], strict=False):
            fell = after.total(_TOKENS) < before.total(_TOKENS)
            begun += fell or after.total(_STARTED) != before.total(_STARTED)
        return begun

    async def _exposition(self, url: str, names: list[tuple[str, str]]) -> Exposition | None:
        text = await self._get(url, names)
        try:
            return None if text is None else Exposition(text)
        except ValueError:
            return None

    async def _get(self, url: str, params: Sequence[tuple[str, str]] = ()) -> str | None:
        """The answer's text; None for no answer, or one that is an error."""
        try:
            async with self.session.get(url, params=params, timeout=_TIMEOUT) as response:
                text = await response.text()
                return text if response.status == 200 else None
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            return None
