"""`Transport`: moves transfer chunks between processes; and the table of transports (`--disaggregation-transfer-backend`)."""

from __future__ import annotations

import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from dsjax.engine.transfer.messages import Chunk
from dsjax.errors import UserError

FLAG = "--disaggregation-transfer-backend"

Shapes = Mapping[str, tuple[tuple[int, ...], Any]]
"""Shape and dtype of a transfer chunk's arrays, by name."""


def shapes_of(chunk: Chunk) -> Shapes:
    """Return shape and dtype of a chunk's arrays."""
    return {name: (array.shape, array.dtype) for name, array in chunk.items()}


class Transport(ABC):
    """Moves chunks from the owner process to the receiving one. Thread-safe. address: under which other processes reach this one."""

    address: str

    @abstractmethod
    def publish(self, number: int, chunk: Chunk) -> bytes:
        """Let another process pull a complete chunk once. Return the ticket for the pull. number: positive."""

    @abstractmethod
    def withdraw(self, number: int, chunk: Chunk, *, pulled: bool) -> None:
        """End the publication of a chunk, and free its resources."""

    @abstractmethod
    def pull(self, address: str, number: int, ticket: bytes, shapes: Shapes, device: Any) -> Chunk:
        """Return a published chunk, complete, on this device. It may hang.

        Raises:
            ConnectionError: the chunk was withdrawn. Others: errors of the transport, which then forgets the process.
        """

    @abstractmethod
    def disconnect(self, address: str) -> None:
        """Forget the process at this address, which is gone."""


class Backend(NamedTuple):
    """Row of the table."""

    implementation: str  # `module:class`, called with a device of this process and this host's address
    package: str = "jax"  # required package
    extra: str = ""  # the extra that installs it


BACKENDS = {
    "jax": Backend("dsjax.engine.transfer.jax_transport:JaxTransport"),
    "nixl": Backend("dsjax.engine.transfer.nixl.nixl_transport:NixlTransport", "nixl_cu13", "nixl"),
}
"""Transports by the option's value. Prefill and decode must use the same one."""


def check_installed(name: str) -> None:
    """Raise `UserError` if a transport's package is not installed."""
    backend = BACKENDS[name]
    if importlib.util.find_spec(backend.package) is None:
        raise UserError(
            f"{FLAG} {name} needs the package {backend.package}, which is not installed: pip install 'dsjax[{backend.extra}]'"
        )


def open_transport(name: str, device: Any, host: str) -> Transport:
    """Start a transport of the table in this process; raise `UserError` if it cannot run here."""
    module, _, implementation = BACKENDS[name].implementation.partition(":")
    return getattr(importlib.import_module(module), implementation)(device, host)
