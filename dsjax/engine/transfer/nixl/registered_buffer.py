"""`RegisteredBuffer`: arrays of one transfer chunk at an address that NIXL knows; `BufferPool`: those of a process."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsjax.engine.transfer.messages import Chunk
from dsjax.engine.transfer.nixl.agent import DEVICE, HOST, Agent, MemoryRegions, Region
from dsjax.engine.transfer.transport import Shapes


@jax.jit
def _copied(arrays: Chunk) -> Chunk:
    return jax.tree.map(jnp.copy, arrays)


def _overwritten(arrays: Chunk, chunk: Chunk) -> Chunk:
    return jax.tree.map(lambda array, new: array.at[...].set(new), arrays, chunk)


_overwrite = jax.jit(_overwritten, donate_argnums=0)
"""Copies a chunk to where the donated arrays are."""


class RegisteredBuffer:
    """Arrays on one device that stay where they are, registered once: chunks are copied into them and out of them.

    JAX gives each chunk another address, and memory would have to be registered, and told of to the other side, for each chunk anew. The
    arrays are written in place: by NIXL, or by a program that they are donated to. A mark in host memory, one word, says which chunk is in
    them; 0: none. It is registered too.

    Attributes:
        number: unique in the process. key: what buffers have alike of which each can stand for the others.
        arrays: by name. mark: the word. memory, mark_memory: where both are.
        descriptions: what other agents must know to read them.
    """

    def __init__(self, agent: Agent, number: int, shapes: Shapes, device: jax.Device):
        self.number, self._agent, self._device, self.key = number, agent, device, _key(shapes, device)
        self.arrays: Chunk = jax.block_until_ready(
            {name: jnp.zeros(*shape, device=device) for name, shape in sorted(shapes.items())}
        )
        self.mark = np.zeros(1, np.uint64)
        self.memory, self.mark_memory = (
            self._find(),
            MemoryRegions(HOST, [Region(self.mark.ctypes.data, self.mark.nbytes)]),
        )
        self._registered: list[Any] = []
        try:
            for memory in (self.memory, self.mark_memory):
                self._registered.append(agent.register(memory))
            self.descriptions = [agent.describe(registered) for registered in self._registered]
        except BaseException:
            self.close()
            raise

    def write(self, chunk: Chunk, mark: int) -> None:
        """Copy a chunk into the arrays, and mark them as that chunk's."""
        self.arrays = jax.block_until_ready(_overwrite(self.arrays, {name: chunk[name] for name in self.arrays}))
        if self._find() != self.memory:
            raise RuntimeError(
                f"JAX has not written donated arrays in place on {self._device}, as NIXL's transport needs"
            )
        self.mark[0] = mark

    def copied(self) -> Chunk:
        """Copy the arrays; complete when this returns."""
        return jax.block_until_ready(_copied(self.arrays))

    def close(self) -> None:
        """End the registration."""
        for registered in self._registered:
            self._agent.deregister(registered)

    def _find(self) -> MemoryRegions:
        kind = HOST if self._device.platform == "cpu" else DEVICE
        device = 0 if kind == HOST else self._device.local_hardware_id
        arrays = self.arrays.values()
        return MemoryRegions(kind, [Region(array.unsafe_buffer_pointer(), array.nbytes, device) for array in arrays])


class BufferPool:
    """Registered buffers of this process, used again and again: as many as were ever needed at the same time."""

    def __init__(self, agent: Agent):
        self._agent, self._numbers, self._lock = agent, itertools.count(), threading.Lock()
        self._free: defaultdict[Any, list[RegisteredBuffer]] = defaultdict(list)

    def acquire(self, shapes: Shapes, device: jax.Device) -> RegisteredBuffer:
        """Return a buffer for a chunk of these shapes on this device, for nobody else until it is released."""
        with self._lock:
            if free := self._free[_key(shapes, device)]:
                return free.pop()
            number = next(self._numbers)
        return RegisteredBuffer(self._agent, number, shapes, device)

    def release(self, buffer: RegisteredBuffer) -> None:
        """Let others use a buffer."""
        with self._lock:
            self._free[buffer.key].append(buffer)


def _key(shapes: Shapes, device: jax.Device) -> Any:
    return device, tuple(sorted((name, tuple(shape), str(dtype)) for name, (shape, dtype) in shapes.items()))
