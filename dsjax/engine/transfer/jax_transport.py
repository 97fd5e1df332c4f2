"""`JaxTransport`: chunk transport over JAX's transfer server."""

from __future__ import annotations

import secrets
import threading
from typing import Any

import jax

from dsjax.background import start_thread
from dsjax.engine.transfer.messages import Chunk
from dsjax.engine.transfer.transport import Shapes, Transport, shapes_of

_TICKET_BYTES = 8
"""JAX's transfer server identifies a transfer by an unsigned 64-bit number."""


class JaxTransport(Transport):
    """Transport over `jax.experimental.transfer`, where pulling an unknown number hangs and a chunk stays pinned until it is pulled.

    JAX's server does not authenticate clients, so it gets a random number for each chunk, the ticket. device, host: of this process.
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
        """Make a chunk available for one pull. Return its ticket."""
        ticket = secrets.token_bytes(_TICKET_BYTES)
        self._server.await_pull(int.from_bytes(ticket, "little"), chunk)
        self._tickets[number] = ticket
        return ticket

    def withdraw(self, number: int, chunk: Chunk, *, pulled: bool) -> None:
        """End a publication. Drain a chunk that was not pulled: pull it here, in a thread, which hangs if another process pulls it too."""
        ticket = self._tickets.pop(number)
        if pulled:
            return
        arguments = self.address, number, ticket, shapes_of(chunk), self._device
        start_thread("chunk drain", self.pull, *arguments, name="dsjax-drain")

    def pull(self, address: str, number: int, ticket: bytes, shapes: Shapes, device: Any) -> Chunk:
        """Pull a published chunk from the server at `address`. `number` is unused: the ticket identifies the chunk."""
        sharding = jax.sharding.SingleDeviceSharding(device)
        expected = {name: jax.ShapeDtypeStruct(*shape, sharding=sharding) for name, shape in shapes.items()}
        try:
            with self._lock:
                if address not in self._connections:
                    self._connections[address] = self._server.connect(address)
                connection = self._connections[address]
            return jax.block_until_ready(connection.pull(int.from_bytes(ticket, "little"), expected))
        except BaseException:
            self.disconnect(address)
            raise

    def disconnect(self, address: str) -> None:
        """Drop the connection to a process."""
        with self._lock:
            self._connections.pop(address, None)
