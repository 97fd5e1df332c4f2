"""JAX's coordination service: start, join and leave it, and handle its loss.

Nothing here may start a backend, because `join` must run before JAX sees a device.
"""

import atexit
import ctypes
import socket
import threading
from typing import Any

import jax

from dsjax.addresses import join_address, split_address
from dsjax.hosts.gloo.collectives import Collectives
from dsjax.hosts.options import HostOptions
from sharding.jax_internals import (
    distributed_state,
    make_cpu_clients_with,
    make_gloo_collectives,
    start_coordination_service,
    using_coordination_service,
)

_ABORT_SIGNAL = 6
_TRIES = 8
_asking = threading.Lock()


def start_service(options: HostOptions) -> tuple[Any, str]:
    """Start the service in process 0, before its address is announced. Return the service and `HOST:PORT`."""
    _configure()
    for attempt in range(_TRIES):
        with socket.socket(socket.AF_INET6 if ":" in options.address else socket.AF_INET) as reserved:
            # gRPC sets SO_REUSEPORT and can share this port. While this socket is bound to it, the kernel assigns it to no other process.
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            reserved.bind((options.address, 0))
            address = join_address(options.address, reserved.getsockname()[1])
            try:
                return start_coordination_service(address, options.num_processes, options.heartbeat_timeout), address
            except jax.errors.JaxRuntimeError:  # another process took the port
                if attempt == _TRIES - 1:
                    raise
    raise AssertionError


def join(options: HostOptions, service_address: str, collectives: Collectives, service: Any = None) -> None:
    """Join the group while all other processes join too, or join a formed group under the id of a process that is gone.

    Only the death of process 0 ends this process (`jax_enable_recoverability`). service: the one that process 0 started. collectives:
    records gloo's listening address once JAX sees its devices.
    """
    _configure()
    host, port = options.coordinator[0], split_address(service_address)[1]
    with using_coordination_service(service):
        jax.distributed.initialize(
            join_address(host, port),
            options.num_processes,
            options.process_id,
            initialization_timeout=options.start_timeout,
            heartbeat_timeout_seconds=options.heartbeat_timeout,
            shutdown_timeout_seconds=options.heartbeat_timeout,
            coordinator_bind_address=join_address(options.address, port),
        )
    # By default gloo listens on the address that the hostname resolves to, which on many machines is the loopback interface.
    make_cpu_clients_with(lambda: collectives.made_by(lambda: make_gloo_collectives(options.address or None)))


def _configure() -> None:
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_enable_preemption_service", False)  # it would handle SIGTERM, on which the server drains
    jax.config.update("jax_check_proxy_envs", False)


def wait_until_forgotten(process_id: int) -> None:
    """Wait in process 0 until the service has forgotten a process that is gone, so that another one can join under its id.

    The call returns when each of the two processes has made the same call or has sent no heartbeat within the timeout.

    Raises:
        ConnectionError: the service is gone.
    """
    with _asking:
        client = distributed_state().client
        if client is None:
            raise ConnectionError("this process has left its group")
        try:
            client.get_live_nodes([0, process_id])
        except jax.errors.JaxRuntimeError as error:
            raise ConnectionError(str(error).splitlines()[0]) from error


def leave() -> None:
    """Leave the service. Process 0 must leave last, because the service ends with it."""
    state = distributed_state()
    client, service = state.client, state.service
    state.client = state.service = None
    if client is not None:
        client.shutdown()
    if service is not None:
        service.shutdown()


def delay_aborts() -> None:
    """Delay aborts by six seconds, so that this process can log why it ends.

    JAX's client aborts the process as soon as the service is gone. The signal handler is libc's `sleep`, which is async-signal-safe; its
    argument is the signal's number, 6. During Python's own shutdown an abort ends the process at once.
    """
    library = ctypes.CDLL(None)
    signal = library.signal
    signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    signal.restype = ctypes.c_void_p
    signal(_ABORT_SIGNAL, ctypes.cast(library.sleep, ctypes.c_void_p))
    atexit.register(signal, _ABORT_SIGNAL, ctypes.cast(library._exit, ctypes.c_void_p))
