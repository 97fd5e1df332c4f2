"""`ParcelCarrier`: what moves parcels between processes. `JaxCarrier`: by JAX's transfer server."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from dsjax.engine.transfer.page_transfer import Parcel

Shapes = Mapping[str, tuple[tuple[int, ...], np.dtype]]
"""Of a parcel's arrays: shape and dtype by name."""


class ParcelCarrier(Protocol):
    """Moves arrays between processes: the one thing that NIXL, say, would have to do in place of JAX.

    Attributes:
        address: where others pull from.
    """

    address: str

    def grant(self, number: int, parcel: Parcel) -> None:
        """Let a parcel be pulled, once."""

    def revoke(self, number: int, parcel: Parcel) -> None:
        """Nobody will pull a parcel that was granted: let it go."""

    def pull(self, address: str, number: int, shapes: Shapes, device: Any) -> Parcel:
        """A parcel that the process at this address has granted, complete, on this device. May raise anything, and may hang."""

    def forget(self, address: str) -> None:
        """The process at this address has gone: keep no connection to it."""


class JaxCarrier:
    """`jax.experimental.transfer`. An id that nobody has granted hangs, and what nobody pulls stays pinned: hence grants, and drains."""

    def __init__(self, device: Any, host: str):
        from jax.experimental.transfer import start_transfer_server

        bind = f"[{host}]:0" if ":" in host else f"{host}:0"
        self._server = start_transfer_server(device.client, bind, [bind])
        self.address = self._server.address()
        self._device = device
        self._connections: dict[str, Any] = {}
        self._lock = threading.Lock()

    def grant(self, number: int, parcel: Parcel) -> None:
        """Let a parcel be pulled, once."""
        self._server.await_pull(number, parcel)

    def revoke(self, number: int, parcel: Parcel) -> None:
        """Pull it at home, in a thread: should it be pulled elsewhere at this moment after all, one of the two hangs."""
        shapes = {name: (array.shape, array.dtype) for name, array in parcel.items()}
        pull = lambda: self.pull(self.address, number, shapes, self._device)  # noqa: E731
        threading.Thread(target=pull, name="dsjax-drain", daemon=True).start()

    def pull(self, address: str, number: int, shapes: Shapes, device: Any) -> Parcel:
        """A parcel that was granted."""
        import jax

        with self._lock:
            if address not in self._connections:
                self._connections[address] = self._server.connect(address)
            connection = self._connections[address]
        sharding = jax.sharding.SingleDeviceSharding(device)
        wanted = {name: jax.ShapeDtypeStruct(*own, sharding=sharding) for name, own in shapes.items()}
        try:
            return jax.block_until_ready(connection.pull(number, wanted))
        except BaseException:
            self.forget(address)
            raise

    def forget(self, address: str) -> None:
        """Keep no connection to a process that has gone."""
        with self._lock:
            self._connections.pop(address, None)
