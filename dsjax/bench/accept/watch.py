"""`ServerWatch`: polls a server under load every few seconds: whether it answers, its counters, its device memory."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import aiohttp

from dsjax.bench.serve.server_facts import scrape
from dsjax.top.reading import Exposition

_TIMEOUT = aiohttp.ClientTimeout(total=10)
_TOKENS, _STARTED = "vllm:generation_tokens_total", "process_start_time_seconds"
COMPILED = "dsjax_compilations_after_warm_up_total"
"""A counter that every dsjax server exports from its start, and no other server does."""
_USED, _LIMIT = "dsjax_device_memory_used_bytes", "dsjax_device_memory_limit_bytes"
_DCGM_USED, _DCGM_FREE = "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_FREE"  # in MiB
_MIB = 2**20
_BALANCE = (
    "dsjax_step_seconds_count", "dsjax_expert_tokens_total", "dsjax_eplb_rank_tokens", "dsjax_eplb_rebalances_total",
    "dsjax_eplb_exchange_seconds_total", "dsjax_eplb_rebalance_seconds_total",
)  # fmt: skip
_NAMES = (_TOKENS, _STARTED, COMPILED, _USED, _LIMIT, *_BALANCE)


class MemorySample(NamedTuple):
    """Device memory in use at one poll."""

    seconds: float  # since the watch began
    max_share: float  # of a device's memory, largest over the devices
    bytes: float  # on all devices


@dataclass
class ServerWatch:
    """Context manager that polls a server and keeps the observations."""

    session: aiohttp.ClientSession
    url: str
    # further URLs that export device memory: followers' `/metrics`, NVIDIA's dcgm-exporter
    device_metrics: Sequence[str]
    interval: float  # seconds between two polls
    counters: list[Exposition] = field(default_factory=list)  # the server's metrics, of each poll that got them
    memory: list[MemorySample] = field(default_factory=list)  # of each poll that got device memory
    outages: int = 0  # times that `/v1/models` stopped answering

    async def __aenter__(self) -> "ServerWatch":
        self._start = time.perf_counter()
        self._is_answering = True
        await self._poll()
        self._task = asyncio.create_task(self._poll_forever())
        return self

    async def __aexit__(self, *raised) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        if raised[0] is None:
            await self._poll()

    async def _poll_forever(self) -> None:
        while True:
            await asyncio.sleep(self.interval)
            await self._poll()

    async def _poll(self) -> None:
        was_answering = self._is_answering
        self._is_answering = await self._get_models()
        if was_answering and not self._is_answering:
            self.outages += 1
        server_metrics = await scrape(self.session, f"{self.url}/metrics", _NAMES)
        if server_metrics is not None:
            self.counters.append(server_metrics)
        device_metrics = [await scrape(self.session, url, ()) for url in self.device_metrics]
        self._record_memory([metrics for metrics in (server_metrics, *device_metrics) if metrics is not None])

    def _record_memory(self, expositions: list[Exposition]) -> None:
        devices: list[tuple[float, float]] = []  # bytes in use, and limit
        for metrics in expositions:
            limits = metrics.by(_LIMIT, "device", "process", "instance")
            for device, used in metrics.by(_USED, "device", "process", "instance").items():
                devices.append((used, limits.get(device, 0.0)))
            free = metrics.by(_DCGM_FREE, "gpu", "Hostname")
            for device, used in metrics.by(_DCGM_USED, "gpu", "Hostname").items():
                devices.append((used * _MIB, (used + free.get(device, 0.0)) * _MIB))
        if devices := [(used, limit) for used, limit in devices if limit]:
            share = max(used / limit for used, limit in devices)
            used_bytes = sum(used for used, _ in devices)
            self.memory.append(MemorySample(time.perf_counter() - self._start, share, used_bytes))

    @property
    def restarts(self) -> int | None:
        """Number of counter resets; None if the server exports no such counters."""
        if len([metrics for metrics in self.counters if metrics.by(_TOKENS) or metrics.by(_STARTED)]) < 2:
            return None
        return sum(
            after.total(_TOKENS) < before.total(_TOKENS) or after.total(_STARTED) != before.total(_STARTED)
            for before, after in itertools.pairwise(self.counters)
        )

    async def _get_models(self) -> bool:
        try:
            async with self.session.get(f"{self.url}/v1/models", timeout=_TIMEOUT) as response:
                await response.read()
                return response.status == 200
        except (TimeoutError, aiohttp.ClientError, OSError):
            return False
