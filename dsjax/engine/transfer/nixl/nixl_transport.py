"""`NixlTransport`: the process that needs a transfer chunk reads it out of a registered buffer of the process that keeps it."""

from __future__ import annotations

import threading

import jax
import msgspec

from dsjax.engine.transfer.messages import Chunk
from dsjax.engine.transfer.nixl.agent import Agent, MemoryRegions
from dsjax.engine.transfer.nixl.registered_buffer import BufferPool, RegisteredBuffer
from dsjax.engine.transfer.transport import FLAG, Shapes, Transport, shapes_of
from dsjax.errors import UserError

PLATFORMS = ("cpu", "gpu", "cuda", "rocm")
"""Platforms whose memory NIXL reads and writes. Only `cpu` has been tried."""


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """What a process needs to read a chunk.

    Attributes:
        buffer: number of the buffer that it is in. descriptions: what NIXL must know of that buffer, once.
        memory: where the arrays are, in the order of their names. mark: where the number of the published chunk is, as long as the
            buffer has that chunk.
    """

    buffer: int
    descriptions: list[bytes]
    memory: MemoryRegions
    mark: MemoryRegions


_decoder = msgspec.msgpack.Decoder(Ticket)


class NixlTransport(Transport):
    """Publishing copies a chunk into a buffer that NIXL knows; pulling reads that into a buffer here, and copies it out.

    A reader takes nobody's time where the chunk is, so nothing stops it when the chunk is withdrawn. It therefore reads the buffer's mark
    after the arrays: when that is still the chunk's, the arrays were the chunk's.

    device: one of this process's. host: is not needed, for agents tell each other of all their ways.

    Raises:
        UserError: NIXL cannot run here, or not with this platform's memory.
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
        """Copy a chunk into a buffer that others may read."""
        [device] = next(iter(chunk.values())).devices()
        buffer = self._sends.acquire(shapes_of(chunk), device)
        try:
            buffer.write(chunk, number)
        except BaseException:
            buffer.close()  # its arrays may have been given up to a program that failed
            raise
        with self._lock:
            self._published[number] = buffer
        return msgspec.msgpack.encode(Ticket(buffer.number, buffer.descriptions, buffer.memory, buffer.mark_memory))

    def withdraw(self, number: int, chunk: Chunk, *, pulled: bool) -> None:
        """Let another chunk into the buffer."""
        with self._lock:
            buffer = self._published.pop(number)
        buffer.mark[0] = 0  # before anything else is written there
        self._sends.release(buffer)

    def read(self, address: str, number: int, ticket: bytes, shapes: Shapes, device: jax.Device) -> Chunk | None:
        """Read a chunk, and return it on this device.

        Raises:
            ConnectionError: its process has gone. NIXL's own errors likewise.
        """
        theirs = _decoder.decode(ticket)
        buffer = self._receives.acquire(shapes, device)
        try:
            with self._agent.reading(address, theirs.buffer, theirs.descriptions):
                self._agent.read(address, theirs.memory, buffer.memory)
                self._agent.read(address, theirs.mark, buffer.mark_memory)
        except BaseException:
            try:
                self.disconnect(address)  # before the memory is given back that its process's data may still come to
            finally:
                buffer.close()
            raise
        try:
            return buffer.copied() if buffer.mark[0] == number else None
        finally:
            self._receives.release(buffer)

    def disconnect(self, address: str) -> None:
        """Know nothing of a process any more that has gone."""
        self._agent.disconnect(address)
