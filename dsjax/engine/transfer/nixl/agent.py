"""`Agent`: this process's NIXL agent, which registers local memory and reads memory of other processes."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dsjax.engine.transfer.transport import FLAG
from dsjax.errors import UserError

HOST, DEVICE = "DRAM", "VRAM"
"""Kinds of memory, as NIXL names them."""

_PLUGIN = "UCX"
_PROGRESS_MICROSECONDS = 10_000
"""Longest sleep of NIXL's progress thread, unless an event arrives that this process must handle."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 20e-6, 1e-3
"""First and longest pause between two polls of a read, in seconds; the pauses grow."""


class Region(NamedTuple):
    """A piece of memory."""

    address: int
    size: int
    device: int = 0  # its number among the GPUs of its process; 0 in host memory


class MemoryRegions(NamedTuple):
    """Pieces of memory of one kind."""

    kind: str
    regions: list[Region]


@dataclass
class _Peer:
    """Another process's agent: numbers of its known memory, and threads that are reading from it."""

    known: set[int] = field(default_factory=set)
    readers: int = 0
    has_gone: bool = False


class Agent:
    """An agent with the UCX plugin, which uses shared memory, TCP, InfiniBand or NVLink, as `UCX_TLS` and `UCX_NET_DEVICES` allow.

    Raises:
        UserError: NIXL cannot run here.

    name: unique among all processes.
    """

    def __init__(self):
        try:
            self._nixl = nixl = _load_bindings()
            config = nixl.nixlAgentConfig()
            config.useProgThread, config.pthrDelay = True, _PROGRESS_MICROSECONDS
            config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
            self.name = uuid.uuid4().hex
            self._agent = nixl.nixlAgent(self.name, config)
            parameters, _ = self._agent.getPluginParams(_PLUGIN)
            self._plugins = [self._agent.createBackend(_PLUGIN, parameters)]
        except Exception as error:  # a missing library, or any exception of NIXL itself
            raise UserError(f"{FLAG} nixl cannot start NIXL's agent here: {type(error).__name__}: {error}") from error
        self._peers: dict[str, _Peer] = {}
        self._lock = threading.Lock()

    def register(self, memory: MemoryRegions) -> Any:
        """Register memory, which must not move until `deregister` is called with the returned value."""
        registered = self._nixl.nixlRegDList(self._kind(memory), [(*region, b"") for region in memory.regions])
        self._agent.registerMem(registered, self._plugins)
        return registered

    def deregister(self, registered: Any) -> None:
        """End a registration."""
        self._agent.deregisterMem(registered, self._plugins)

    def describe(self, registered: Any) -> bytes:
        """Return the description that another agent needs to read registered memory, with this agent's address."""
        return self._agent.getLocalPartialMD(registered, True, self._plugins)

    @contextlib.contextmanager
    def reading(self, name: str, memory: int, descriptions: Sequence[bytes]):
        """Stay connected to another agent while the body reads its memory.

        memory: number of the memory at the other agent. descriptions: what `describe` returned there.

        Raises:
            ConnectionError: the other agent is being disconnected. NIXL's own errors: it cannot be reached.
        """
        with self._lock:
            peer = self._peers.setdefault(name, _Peer())
            if peer.has_gone:
                raise ConnectionError(f"the agent {name} is being disconnected")
            if memory not in peer.known:
                for description in descriptions:
                    self._agent.loadRemoteMD(description)
                peer.known.add(memory)
            peer.readers += 1
        try:
            yield
        finally:
            with self._lock:
                peer.readers -= 1
                self._end(name, peer)

    def read(self, name: str, theirs: MemoryRegions, ours: MemoryRegions) -> None:
        """Read regions of another agent into registered memory here, and wait until they have arrived.

        If the other process is gone, this waits until UCX notices, because until then it may write to the memory here.

        Raises:
            ConnectionError: the memory could not be read. NIXL's own errors: for example, the other process is gone.
        """
        nixl, agent = self._nixl, self._agent
        local, remote = (nixl.nixlXferDList(self._kind(one), list(map(tuple, one.regions))) for one in (ours, theirs))
        handle = agent.createXferReq(nixl.NIXL_READ, local, remote, name, b"", self._plugins)
        try:
            state, pause = agent.postXferReq(handle, b""), _SHORTEST_PAUSE
            while state == nixl.NIXL_IN_PROG:
                time.sleep(pause)
                pause = min(1.5 * pause, _LONGEST_PAUSE)
                state = agent.getXferStatus(handle)
        finally:
            agent.releaseXferReq(handle)
        if state != nixl.NIXL_SUCCESS:
            raise ConnectionError(f"NIXL could not read memory of the agent {name}")

    def disconnect(self, name: str) -> None:
        """Forget another agent as soon as no thread reads from it."""
        with self._lock:
            peer = self._peers.get(name)
            if peer is not None:
                peer.has_gone = True
                self._end(name, peer)

    def _kind(self, memory: MemoryRegions) -> Any:
        return self._nixl.DRAM_SEG if memory.kind == HOST else self._nixl.VRAM_SEG

    def _end(self, name: str, peer: _Peer) -> None:
        if peer.has_gone and not peer.readers and self._peers.get(name) is peer:
            del self._peers[name]
            with contextlib.suppress(Exception):  # NIXL itself has dropped an agent whose process has ended
                self._agent.invalidateRemoteMD(name)


def _load_bindings() -> Any:
    """Load NIXL.

    These are the bindings that its class `nixl_agent` wraps. That class has its progress thread poll without a pause, which costs a core.
    The package `nixl` would choose the bindings by PyTorch's CUDA version; `nixl_cu13` matches JAX's (`dsjax[cuda]`).
    """
    from nixl_cu13 import _bindings

    return _bindings
