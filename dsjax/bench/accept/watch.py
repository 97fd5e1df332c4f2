"""`ServerWatch`: polls a server under load every few seconds: whether it answers, its counters, its device memory."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from dsjax.bench.serve.server_facts import scrape
from dsjax.top.reading import Exposition

_TIMEOUT = aiohttp.ClientTimeout(total=10)
_TOKENS, _STARTED = "vllm:generation_tokens_total", "process_start_time_seconds"
OURS = "dsjax_compilations_after_warm_up_total"
"""A counter that every dsjax server exports from its start, and no other server does."""
_USED, _LIMIT = "dsjax_device_memory_used_bytes", "dsjax_device_memory_limit_bytes"
_DCGM_USED, _DCGM_FREE = "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_FREE"
_BALANCE = (
    "dsjax_step_seconds_count", "dsjax_expert_tokens_total", "dsjax_eplb_rank_tokens", "dsjax_eplb_rebalances_total",
    "dsjax_eplb_exchange_seconds_total", "dsjax_eplb_rebalance_seconds_total",
)  # fmt: skip
_NAMES = (_TOKENS, _STARTED, OURS, _USED, _LIMIT, *_BALANCE)


@dataclass
class ServerWatch:
    """Context manager that polls a server and keeps the observations.

    device_metrics: further URLs that export device memory: followers' `/metrics`, NVIDIA's dcgm-exporter. memory: of each poll, (seconds
    since the watch began, largest share of a device's memory in use, bytes in use on all devices).
    """

    session: aiohttp.ClientSession
    url: str
    device_metrics: Sequence[str]
    interval: float  # seconds between two polls
    counters: list[Exposition] = field(default_factory=list)  # the server's metrics, of each poll that got them
    memory: list[tuple[float, float, float]] = field(default_factory=list)
    outages: int = 0  # times that `/v1/models` stopped answering

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
        answered = await self._answers()
        self.outages += self._answered and not answered
        self._answered = answered
        own = await scrape(self.session, f"{self.url}/metrics", _NAMES)
        if own is not None:
            self.counters.append(own)
        others = [await scrape(self.session, url, ()) for url in self.device_metrics]
        self._read_memory([each for each in (own, *others) if each is not None])

    def _read_memory(self, seen: list[Exposition]) -> None:
        devices: list[tuple[float, float]] = []  # bytes in use, and share of the device
        for each in seen:
            limits, free = (each.by(_LIMIT, "device", "process", "instance"), each.by(_DCGM_FREE, "gpu", "Hostname"))
            used = each.by(_USED, "device", "process", "instance")
            devices += [(now, now / limits[key]) for key, now in used.items() if limits.get(key)]
            for key, now in each.by(_DCGM_USED, "gpu", "Hostname").items():
                if whole := now + free.get(key, 0.0):
                    devices.append((now * 2**20, now / whole))  # dcgm-exporter reports MiB
        if devices:
            used, shares = zip(*devices, strict=True)
            self.memory.append((time.perf_counter() - self._zero, max(shares), sum(used)))

    @property
    def restarts(self) -> int | None:
        """Number of counter resets; None if the server exports no such counters."""
        if len([each for each in self.counters if each.by(_TOKENS) or each.by(_STARTED)]) < 2:
            return None
        return sum(
            after.total(_TOKENS) < before.total(_TOKENS) or after.total(_STARTED) != before.total(_STARTED)
            for before, after in itertools.pairwise(self.counters)
        )

    async def _answers(self) -> bool:
        try:
            async with self.session.get(f"{self.url}/v1/models", timeout=_TIMEOUT) as response:
                await response.read()
                return response.status == 200
        except (TimeoutError, aiohttp.ClientError, OSError):
            return False
