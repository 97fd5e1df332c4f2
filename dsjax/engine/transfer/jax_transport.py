"""`JaxTransport`: transfer chunks by JAX's transfer server."""

from __future__ import annotations

import secrets
import threading
from typing import Any

import jax

from dsjax.background import start_thread
from dsjax.engine.transfer.messages import Chunk
from dsjax.engine.transfer.transport import Shapes, Transport, shapes_of

_TICKET_BYTES = 8
"""JAX's numbers are unsigned and have 64 bits."""


class JaxTransport(Transport):
    """`jax.experimental.transfer`. An unpublished number hangs there, and what nobody pulls stays pinned.

    JAX's server authenticates nobody: a chunk has a random number there, its ticket. device: of the client that sends. host: its address.
    """

    def __init__(self, device: Any, host: str):
        from jax.experimental.transfer import start_transfer_server

        bind = f"[{host}]:0" if ":" in host else f"{host}:0"
        self._server = start_transfer_server(device.client, bind, [bind])
        self.address = self._server.address()
        self._device = device
        self._connections: dict[str, Any] = {}
        self._tickets: dict[int, bytes] = {}
        self._lock = threading.Lock()

    def publish(self, number: int, chunk: Chunk) -> bytes:
        """Let a chunk be pulled, once."""
        ticket = secrets.token_bytes(_TICKET_BYTES)
        self._server.await_pull(int.from_bytes(ticket, "little"), chunk)
        self._tickets[number] = ticket
        return ticket

    def withdraw(self, number: int, chunk: Chunk, *, pulled: bool) -> None:
        """Pull a chunk here that nobody has pulled, in a thread: if another process pulls it now too, one of the two hangs."""
        ticket = self._tickets.pop(number)
        if pulled:
            return
        arguments = self.address, number, ticket, shapes_of(chunk), self._device
        start_thread("chunk drain", self.pull, *arguments, name="dsjax-drain")

    def pull(self, address: str, number: int, ticket: bytes, shapes: Shapes, device: Any) -> Chunk:
        """Return a published chunk."""
        sharding = jax.sharding.SingleDeviceSharding(device)
        described = {name: jax.ShapeDtypeStruct(*shape, sharding=sharding) for name, shape in shapes.items()}
        try:
            with self._lock:
                if address not in self._connections:
                    self._connections[address] = self._server.connect(address)
                connection = self._connections[address]
            return jax.block_until_ready(connection.pull(int.from_bytes(ticket, "little"), described))
        except BaseException:
            self.disconnect(address)
            raise

    def disconnect(self, address: str) -> None:
        """Drop the connection to a process."""
        with self._lock:
            self._connections.pop(address, None)
