"""All uses of JAX's private modules, tested with JAX 0.10.2 and 0.11. pyproject.toml sets the upper version bound.

Functions import JAX lazily and start no backend, because a process must join the others before JAX initialises its devices.
"""

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
    """Return the coordinator's address, the number of processes and this process's id, if JAX detects the cluster's launcher."""
    from jax._src import clusters

    return clusters.ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, timeout)[:3]


def distributed_state() -> Any:
    """Return JAX's state with the coordination client and, in process 0, the service. Both attributes may be set to None."""
    from jax._src import distributed

    return distributed.global_state


def start_coordination_service(address: str, num_processes: int, heartbeat_seconds: int) -> Any:
    """Start JAX's coordination service at `HOST:PORT`.

    Raises:
        JaxRuntimeError: the service cannot listen at the address.
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
    """Make `jax.distributed.initialize` use a running service. None: it starts one if needed."""
    from jax._src.lib import _jax

    make = _jax.get_distributed_runtime_service
    if service is not None:
        _jax.get_distributed_runtime_service = lambda *args, **options: service
    try:
        yield
    finally:
        _jax.get_distributed_runtime_service = make


def make_cpu_clients_with(make_collectives: Callable[[], Any]) -> None:
    """Make JAX's CPU backend use the collectives that this function returns. Call it before the backend starts."""
    from jax._src import xla_bridge

    def make_client() -> Any:
        return xla_bridge.make_cpu_client(collectives=make_collectives())

    xla_bridge.register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)


def make_gloo_collectives(address: str | None) -> Any:
    """Return Gloo collectives that listen at this address. None: the address that the host name resolves to."""
    from jax._src.lib import _jax

    return _jax.make_gloo_tcp_collectives(distributed_client=distributed_state().client, hostname=address)


def compilation_cache() -> Any:
    """Return JAX's compilation cache module."""
    from jax._src import compilation_cache

    return compilation_cache


def keep_programs_of_every_process() -> None:
    """Make every process write its compiled programs to JAX's compilation cache, and make each write atomic.

    By default only process 0 writes, so the other hosts of a mesh find nothing after a restart. JAX also writes in place: a killed process
    leaves a partial entry that is never replaced.
    """
    import jax
    from jax._src import compiler, lru_cache

    write = compiler._cache_write
    if getattr(write, "of_every_process", False):
        return

    def write_of_every_process(key: str, seconds: float, name: str, backend: Any, executable: Any, *rest: Any) -> None:
        if distributed_state().process_id == 0:
            write(key, seconds, name, backend, executable, *rest)
        elif seconds >= jax.config.jax_persistent_cache_min_compile_time_secs and not any(rest):
            try:
                compilation_cache().put_executable_and_time(key, name, executable, backend, int(seconds))
            except Exception as error:  # as in JAX: a program that cannot be cached is compiled again
                warnings.warn(f"a compiled program cannot be kept: {error}", stacklevel=1 << 20)

    write_of_every_process.of_every_process = True
    compiler._cache_write = write_of_every_process
    put = lru_cache.LRUCache.put

    def put_whole(cache: Any, key: str, value: bytes) -> None:
        folder = str(cache.path)
        if cache.eviction_enabled or "://" in folder:  # under a lock, or in a store with atomic writes
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


def topology_fingerprint(devices: Iterable[Any]) -> int:
    """Return a fingerprint of the chips' kind, drivers and topology, as in the keys of JAX's own cache."""
    from jax._src.lib import xla_client

    return xla_client.get_topology_for_devices(list(devices)).fingerprint()


def compile_options(device_ids: Sequence[int], backend: Any) -> Any:
    """Return JAX's compile options for a program on these devices."""
    import numpy as np
    from jax._src.compiler import get_compile_options

    return get_compile_options(
        num_replicas=1, num_partitions=len(device_ids), device_assignment=np.array([device_ids]), backend=backend
    )


def batched_device_put() -> Callable[..., Any]:
    """Return ``(aval, sharding, shards, devices) -> array``: the last step of ``jax.device_put``, without its shape and dtype checks."""
    from jax._src.interpreters import pxla

    return pxla.batched_device_put


def computed_by_host(function: Callable) -> Callable:
    """Make a function run on the device's host inside ``jit``, with arguments and result in host memory."""
    import jax
    from jax.experimental.compute_on import compute_on

    if "out_memory_spaces" in inspect.signature(compute_on).parameters:  # from JAX 0.11 on
        return compute_on(function, compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)
    return compute_on("device_host")(jax.jit(function))


def equations_as_function(jaxpr: Any, equations: list, takes: list, gives: list, constants: dict) -> Callable:
    """Make a traceable function from some equations of a jaxpr. It takes the values of ``takes`` and returns those of ``gives``.

    constants: values of the jaxpr's constant variables.
    """
    from jax._src import core

    read = {id(value) for equation in equations for value in equation.invars}
    used = [variable for variable in constants if id(variable) in read]
    info = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    part = jaxpr.replace(constvars=used, invars=takes, outvars=gives, eqns=equations, debug_info=info)
    return lambda *values: core.eval_jaxpr(part, [constants[variable] for variable in used], *values)


def multiply_e4m3_on_tensor_cores() -> None:
    """Make products of e4m3 with e4m3 in Pallas's kernels for GPUs use Hopper's FP8 ``wgmma``, which sums with fewer bits than float32.

    Pallas does not set ``maxNumImpreciseAcc`` of Triton's ``tt.dot``: the number of terms that may be summed so. By default it is 0, and
    Triton widens both operands to float16. No precision of ``jax.lax`` changes it.
    """
    from jax import lax
    from jax._src.lib.mlir import ir
    from jax._src.pallas.triton import lowering

    rules = lowering.triton_lowering_rules
    lower = rules[lax.dot_general_p]
    if getattr(lower, "on_tensor_cores", False):
        return

    def lower_on_tensor_cores(context: Any, a: Any, b: Any, **options: Any) -> Any:
        product = lower(context, a, b, **options)
        if all(operand.dtype.name == "float8_e4m3fn" for operand in context.avals_in):
            # More terms than any tile has: the kernel itself adds its tiles' sums in float32.
            product.owner.attributes["maxNumImpreciseAcc"] = ir.IntegerAttr.get(
                ir.IntegerType.get_signless(32), 1 << 30
            )
        return product

    lower_on_tensor_cores.on_tensor_cores = True
    rules[lax.dot_general_p] = lower_on_tensor_cores
