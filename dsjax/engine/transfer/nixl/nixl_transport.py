"""`NixlTransport`: the receiving process reads a transfer chunk from a `RegisteredBuffer` of the owner process."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from dsjax.engine.transfer.messages import Chunk
from dsjax.engine.transfer.nixl.agent import DEVICE, HOST, Agent, MemoryRegions, Region
from dsjax.engine.transfer.transport import FLAG, Shapes, Transport, shapes_of
from dsjax.errors import UserError

PLATFORMS = ("cpu", "gpu", "cuda", "rocm")
"""Platforms whose memory NIXL reads and writes. Only `cpu` has been tested."""


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """Everything a process needs to read a chunk."""

    buffer: int  # number of the chunk's buffer
    descriptions: list[bytes]  # NIXL's descriptions of that buffer, needed once
    memory: MemoryRegions  # location of the arrays, sorted by name
    # location of the word that has the published chunk's number as long as the buffer holds that chunk
    mark: MemoryRegions


@jax.jit
def _copied(arrays: Chunk) -> Chunk:
    return jax.tree.map(jnp.copy, arrays)


@partial(jax.jit, donate_argnums=0)
def _overwrite(arrays: Chunk, chunk: Chunk) -> Chunk:
    """Copy a chunk into the donated arrays, in place."""
    return jax.tree.map(lambda array, new: array.at[...].set(new), arrays, chunk)


class RegisteredBuffer:
    """Arrays on one device with fixed addresses, registered once; chunks are copied into and out of them.

    JAX allocates each chunk at another address, so without this buffer each chunk would have to be registered and described to the peer.
    The arrays are written in place: by NIXL, or by a program that they are donated to. A mark (one word in host memory, also registered)
    holds the number of the chunk in them; 0: none.

    Attributes:
        number: unique in the process. key: device, shapes and dtypes; buffers with equal keys are interchangeable.
        arrays: by name. mark: the word. memory, mark_memory: their locations.
        descriptions: for other agents, to read both.
    """

    def __init__(self, agent: Agent, number: int, shapes: Shapes, device: jax.Device):
        self.number, self._agent, self._device, self.key = number, agent, device, _key(shapes, device)
        self.arrays: Chunk = jax.block_until_ready(
            {name: jnp.zeros(*shape, device=device) for name, shape in sorted(shapes.items())}
        )
        self.mark = np.zeros(1, np.uint64)
        self.memory = self._find()
        self.mark_memory = MemoryRegions(HOST, [Region(self.mark.ctypes.data, self.mark.nbytes)])
        self._registered: list[Any] = []
        try:
            for memory in (self.memory, self.mark_memory):
                self._registered.append(agent.register(memory))
            self.descriptions = [agent.describe(registered) for registered in self._registered]
        except BaseException:
            self.close()
            raise

    def write(self, chunk: Chunk, mark: int) -> None:
        """Copy a chunk into the arrays and set the mark."""
        self.arrays = jax.block_until_ready(_overwrite(self.arrays, {name: chunk[name] for name in self.arrays}))
        if self._find() != self.memory:
            raise RuntimeError(
                f"JAX has not written donated arrays in place on {self._device}, as NIXL's transport needs"
            )
        self.mark[0] = mark

    def copied(self) -> Chunk:
        """Return a complete copy of the arrays."""
        return jax.block_until_ready(_copied(self.arrays))

    def close(self) -> None:
        """Deregister the memory."""
        for registered in self._registered:
            self._agent.deregister(registered)

    def _find(self) -> MemoryRegions:
        kind = HOST if self._device.platform == "cpu" else DEVICE
        device = 0 if kind == HOST else self._device.local_hardware_id
        arrays = self.arrays.values()
        return MemoryRegions(kind, [Region(array.unsafe_buffer_pointer(), array.nbytes, device) for array in arrays])


class BufferPool:
    """Reusable registered buffers of this process: as many as were ever in use at the same time."""

    def __init__(self, agent: Agent):
        self._agent, self._numbers, self._lock = agent, itertools.count(), threading.Lock()
        self._free: defaultdict[Any, list[RegisteredBuffer]] = defaultdict(list)

    def acquire(self, shapes: Shapes, device: jax.Device) -> RegisteredBuffer:
        """Return a buffer for a chunk of these shapes on this device, for exclusive use until it is released."""
        with self._lock:
            if free := self._free[_key(shapes, device)]:
                return free.pop()
            number = next(self._numbers)
        return RegisteredBuffer(self._agent, number, shapes, device)

    def release(self, buffer: RegisteredBuffer) -> None:
        """Return a buffer to the pool."""
        with self._lock:
            self._free[buffer.key].append(buffer)


def _key(shapes: Shapes, device: jax.Device) -> Any:
    return device, tuple(sorted((name, tuple(shape), str(dtype)) for name, (shape, dtype) in shapes.items()))


class NixlTransport(Transport):
    """Publishing copies a chunk into a registered buffer; pulling reads that buffer into a local one and copies the chunk out.

    Reads are one-sided, so the owner cannot stop them when it withdraws the chunk. The reader therefore reads the buffer's mark after the
    arrays: if the mark still has the chunk's number, the arrays held that chunk.

    device: one of this process. host: unused, because NIXL agents exchange their addresses themselves.

    Raises:
        UserError: NIXL cannot run here or does not support this platform's memory.
    """

    def __init__(self, device: jax.Device, host: str):
        if device.platform not in PLATFORMS:
            raise UserError(f"{FLAG} nixl does not reach memory of the platform {device.platform!r}; use jax")
        self._agent = Agent()
        self.address = self._agent.name
        self._sends, self._receives = BufferPool(self._agent), BufferPool(self._agent)
        self._published: dict[int, RegisteredBuffer] = {}
        self._lock = threading.Lock()

    def publish(self, number: int, chunk: Chunk) -> bytes:
        """Copy a chunk into a buffer that other processes may read."""
        [device] = next(iter(chunk.values())).devices()
        buffer = self._sends.acquire(shapes_of(chunk), device)
        try:
            buffer.write(chunk, number)
        except BaseException:
            buffer.close()  # a failed program may have consumed its donated arrays
            raise
        with self._lock:
            self._published[number] = buffer
        return msgspec.msgpack.encode(Ticket(buffer.number, buffer.descriptions, buffer.memory, buffer.mark_memory))

    def withdraw(self, number: int, chunk: Chunk, *, pulled: bool) -> None:
        """Clear the mark and release the buffer."""
        with self._lock:
            buffer = self._published.pop(number)
        buffer.mark[0] = 0  # before anything else is written there
        self._sends.release(buffer)

    def pull(self, address: str, number: int, ticket: bytes, shapes: Shapes, device: jax.Device) -> Chunk:
        """Read a chunk and return it on this device. `ConnectionError` or NIXL's own errors: it was withdrawn, or its process is gone."""
        theirs = msgspec.msgpack.decode(ticket, type=Ticket)
        buffer = self._receives.acquire(shapes, device)
        try:
            with self._agent.reading(address, theirs.buffer, theirs.descriptions):
                self._agent.read(address, theirs.memory, buffer.memory)
                self._agent.read(address, theirs.mark, buffer.mark_memory)
        except BaseException:
            try:
                self.disconnect(address)  # before freeing memory that the read may still write to
            finally:
                buffer.close()
            raise
        try:
            if buffer.mark[0] != number:
                raise ConnectionError("the chunk was withdrawn while it was read")
            return buffer.copied()
        finally:
            self._receives.release(buffer)

    def disconnect(self, address: str) -> None:
        """Forget a process that is gone."""
        self._agent.disconnect(address)
