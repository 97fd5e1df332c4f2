"""All that reaches into JAX's private modules, tried with JAX 0.10.2 and 0.11: pyproject.toml says up to which version.

JAX is imported by the functions that need it, none of which starts a backend: a process joins others before JAX sees a device.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any


def backend_is_running() -> bool:
    """Whether JAX has started a backend in this process, after which the number of devices is fixed."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bool(bridge and bridge.backends_are_initialized())


def detect_cluster(timeout: int) -> tuple[str | None, int | None, int | None]:
    """Coordinator's address, number of processes and this one's id, where JAX knows who started it."""
    from jax._src import clusters

    return clusters.ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, timeout)[:3]


def distributed_state() -> Any:
    """JAX's client of the coordination service and, in process 0, the service, as attributes that may be set to None."""
    from jax._src import distributed

    return distributed.global_state


def start_coordination_service(address: str, num_processes: int, heartbeat_seconds: int) -> Any:
    """Start JAX's coordination service at `HOST:PORT`.

    Raises:
        JaxRuntimeError: it cannot listen there.
    """
    from jax._src.lib import _jax

    return _jax.get_distributed_runtime_service(
        address,
        num_processes,
        heartbeat_timeout=heartbeat_seconds,
        shutdown_timeout=heartbeat_seconds,
        recoverable=True,
    )


@contextlib.contextmanager
def using_coordination_service(service: Any) -> Iterator[None]:
    """Have `jax.distributed.initialize` take a service that was started already; None: it starts one where it needs one."""
    from jax._src.lib import _jax

    make = _jax.get_distributed_runtime_service
    if service is not None:
        _jax.get_distributed_runtime_service = lambda *args, **options: service
    try:
        yield
    finally:
        _jax.get_distributed_runtime_service = make


def make_cpu_clients_with(make_collectives: Callable[[], Any]) -> None:
    """Have JAX's CPU backend, once it starts, carry collectives over what this function makes."""
    from jax._src import xla_bridge

    def make_client() -> Any:
        return xla_bridge.make_cpu_client(collectives=make_collectives())

    xla_bridge.register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)


def make_gloo_collectives(address: str | None) -> Any:
    """Gloo's collectives, which listen at this address; None: at what the host's name resolves to."""
    from jax._src.lib import _jax

    return _jax.make_gloo_tcp_collectives(distributed_client=distributed_state().client, hostname=address)


def compilation_cache() -> Any:
    """JAX's module of the cache of compiled programs."""
    from jax._src import compilation_cache

    return compilation_cache


def keep_programs_of_every_process() -> None:
    """Have every process write the programs that it compiles to JAX's cache, and each entry appear whole or not at all.

    JAX has process 0 alone write, so that the other hosts of a mesh find nothing when they are started again; and it writes in place,
    where a process that is killed leaves half an entry, which no later one replaces.
    """
    from jax._src import compiler, lru_cache

    write = compiler._cache_write
    if getattr(write, "of_every_process", False):
        return

    def write_of_every_process(key: str, seconds: float, name: str, backend: Any, executable: Any, *rest: Any) -> None:
        if distributed_state().process_id == 0:
            write(key, seconds, name, backend, executable, *rest)
        elif seconds >= jax_setting("persistent_cache_min_compile_time_secs") and not any(rest):
            try:
                compilation_cache().put_executable_and_time(key, name, executable, backend, int(seconds))
            except Exception as error:  # as JAX does: what cannot be kept is compiled again
                warnings.warn(f"a compiled program cannot be kept: {error}", stacklevel=1 << 20)

    write_of_every_process.of_every_process = True
    compiler._cache_write = write_of_every_process
    put = lru_cache.LRUCache.put

    def put_whole(cache: Any, key: str, value: bytes) -> None:
        folder = str(cache.path)
        if cache.eviction_enabled or "://" in folder:  # under a lock, or in a store whose writes are whole
            return put(cache, key, value)
        path = os.path.join(folder, f"{key}{lru_cache._CACHE_SUFFIX}")
        if os.path.exists(path):
            return None
        unfinished = os.path.join(folder, f"writing-{uuid.uuid4().hex}")
        try:
            with open(unfinished, "xb") as file:
                file.write(value)
            os.replace(unfinished, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            raise

    lru_cache.LRUCache.put = put_whole


def jax_setting(name: str) -> Any:
    """The value that a setting of JAX has in this thread."""
    from jax._src import config

    return getattr(config, name).value


def all_settings() -> dict[str, Any]:
    """The values of all of JAX's settings by name, as its command-line flags, environment and ``jax.config.update`` have made them."""
    import jax

    return dict(jax.config.values)


def topology_fingerprint(devices: Iterable[Any]) -> int:
    """A number for the kind of these chips, their drivers and how they are connected, as JAX's own cache has it in its keys."""
    from jax._src.lib import xla_client

    return xla_client.get_topology_for_devices(list(devices)).fingerprint()


def compile_options(device_ids: Sequence[int], backend: Any) -> Any:
    """The options with which JAX would compile a program for these devices."""
    import numpy as np
    from jax._src.compiler import get_compile_options

    return get_compile_options(
        num_replicas=1, num_partitions=len(device_ids), device_assignment=np.array([device_ids]), backend=backend
    )


def batched_device_put() -> Callable[..., Any]:
    """``(aval, sharding, shards, devices) -> array``: what ``jax.device_put`` ends with, after it has looked at shape and dtype."""
    from jax._src.interpreters import pxla

    return pxla.batched_device_put


def computed_by_host(function: Callable) -> Callable:
    """Inside ``jit``: a function of arrays in host memory that the device's host computes, with its result there too."""
    import jax
    from jax.experimental.compute_on import compute_on

    if "out_memory_spaces" in inspect.signature(compute_on).parameters:  # from JAX 0.11 on
        return compute_on(function, compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)
    return compute_on("device_host")(jax.jit(function))


def equations_as_function(jaxpr: Any, equations: list, takes: list, gives: list, constants: dict) -> Callable:
    """Make a function, to be traced, of some equations of a traced one: it takes and gives the values of these variables.

    constants: the values of the variables that ``jaxpr`` has from elsewhere.
    """
    from jax._src import core

    read = {id(value) for equation in equations for value in equation.invars}
    used = [variable for variable in constants if id(variable) in read]
    info = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    part = jaxpr.replace(constvars=used, invars=takes, outvars=gives, eqns=equations, debug_info=info)
    return lambda *values: core.eval_jaxpr(part, [constants[variable] for variable in used], *values)
