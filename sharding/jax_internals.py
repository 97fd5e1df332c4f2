"""All that reaches into JAX's private modules, tried with JAX 0.10.2 and 0.11: pyproject.toml says up to which version.

JAX is imported by the functions that need it, none of which starts a backend: a process joins others before JAX sees a device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
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


def compile_options(device_ids: Sequence[int], backend: Any) -> Any:
    """The options with which JAX would compile a program for these devices."""
    import numpy as np
    from jax._src.compiler import get_compile_options

    return get_compile_options(
        num_replicas=1, num_partitions=len(device_ids), device_assignment=np.array([device_ids]), backend=backend
    )


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
