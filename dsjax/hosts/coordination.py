"""JAX's coordination service: joining it, its store, who lives, and what happens when it is gone.

Nothing here may start a backend: `join` must come before JAX sees a device.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from collections.abc import Callable, Sequence

import jax

from dsjax.hosts.gloo.collectives import Collectives
from dsjax.hosts.options import HostOptions, joined, split
from sharding.jax_internals import distributed_state, make_cpu_clients_with, make_gloo_collectives

_ABORT_SIGNAL = 6
_kept: list[object] = []  # what C code calls must not be collected


def join(options: HostOptions, service: str, collectives: Collectives) -> None:
    """Join this process to the others, which must all be joining now; or to a group that has formed, under the id of one that is gone.

    Another process's death does not end this one (`jax_enable_recoverability`): whoever asks `live` sees it. Process 0's death does,
    as it has the service.

    service: `HOST:PORT` where process 0 starts it. collectives: learns where gloo listens, once JAX sees its devices.
    """
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM, which the server drains on
    jax.config.update("jax_check_proxy_envs", False)
    port = split(service)[1]
    jax.distributed.initialize(
        service,
        options.num_processes,
        options.process_id,
        initialization_timeout=options.start_timeout,
        heartbeat_timeout_seconds=options.heartbeat_timeout,
        shutdown_timeout_seconds=options.heartbeat_timeout,
        coordinator_bind_address=joined(options.address, port),
    )
    _bind_collectives(options.address, collectives)


def _bind_collectives(address: str, collectives: Collectives) -> None:
    """Have gloo listen at this address; by itself it takes what the host's name resolves to, on many machines the loopback interface."""
    make_cpu_clients_with(lambda: collectives.made_by(lambda: make_gloo_collectives(address or None)))


class Store:
    """The coordination service's key-value store."""

    def set(self, key: str, value: bytes) -> None:
        """Enter a value. Keys are entered once."""
        _client().key_value_set_bytes(key, value)

    def get(self, key: str, seconds: float) -> bytes | None:
        """Wait for a key; None where it does not come."""
        try:
            return _client().blocking_key_value_get_bytes(key, int(seconds * 1000))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise ConnectionError(str(error).splitlines()[0]) from error

    def list(self, folder: str) -> list[tuple[str, bytes]]:
        """Give what is entered under a folder, which ends with a slash, without waiting: keys from the folder on, and values."""
        try:
            entries = _client().key_value_dir_get_bytes(folder)
        except jax.errors.JaxRuntimeError as error:
            raise ConnectionError(str(error).splitlines()[0]) from error
        return [(key[key.index(folder) :], value) for key, value in entries]

    def delete(self, folder: str) -> None:
        """Delete a key, or with a final slash all that begin with it."""
        _client().key_value_delete(folder)


def live(process_ids: Sequence[int]) -> set[int]:
    """Which of these processes live.

    Every live one must be asking: the call returns when all have that have given a sign of life within the heartbeat's timeout.

    Raises:
        ConnectionError: there is no service any more.
    """
    try:
        return set(_client().get_live_nodes(list(process_ids)))
    except jax.errors.JaxRuntimeError as error:
        raise ConnectionError(str(error).splitlines()[0]) from error


def leave() -> None:
    """Leave the group: process 0 when the others have, for the service ends with it."""
    state = distributed_state()
    client, service = state.client, state.service
    state.client = state.service = None
    if client is not None:
        client.shutdown()
    if service is not None:
        service.shutdown()


def on_abort(call: Callable[[], None]) -> None:
    """Have a function, which ends the process, called when C++ code aborts it, as JAX's client does when the coordination service is gone.

    When Python itself is ending no Python can be called any more: a thread of C++ that tries is ended, which aborts again, and so on for
    ever. An abort then only ends the process.
    """
    library, first = ctypes.CDLL(None), threading.Lock()

    def handle(_: int) -> None:
        while not first.acquire(blocking=False):
            time.sleep(1)  # several threads may abort; the first one ends the process
        call()

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(handle)
    _kept.append(handler)
    signal = library.signal
    signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    signal.restype = ctypes.c_void_p
    signal(_ABORT_SIGNAL, ctypes.cast(handler, ctypes.c_void_p))
    atexit.register(signal, _ABORT_SIGNAL, ctypes.cast(library._exit, ctypes.c_void_p))


def _client():
    client = distributed_state().client
    if client is None:
        raise ConnectionError("this process has left its group")
    return client
