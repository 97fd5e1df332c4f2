"""Emulated devices appear if asked for in time, and too late is said clearly. Each case in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sharding.scheduler_flags import start_exchanges_early

ROOT = Path(__file__).parents[2]


def run(code: str, **environment: str) -> str:
    """Standard output of a fresh Python on the CPU platform, with nothing of this process's JAX settings."""
    clean = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PJRT_NPROC")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=clean | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# The collective would hang if the thread pool were smaller than the mesh.
SUM = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from sharding import MeshSpec
mesh = MeshSpec.parse("dp=6").build()
x = jax.device_put(np.arange(6.0), NamedSharding(mesh, P(("dp", "ep"))))
print(jax.device_count(), float(jax.jit(jnp.sum)(x)))
"""


def test_asked_before_jax_is_imported_the_devices_exist_and_compute():
    assert run(f"from sharding.emulation import emulate_devices; emulate_devices(6)\n{SUM}") == "6 15.0"


def test_asked_after_the_import_but_before_the_backend_the_devices_exist_too():
    assert run(f"import jax; from sharding.emulation import emulate_devices; emulate_devices(6)\n{SUM}") == "6 15.0"


def test_asked_after_the_backend_has_started_the_mesh_says_what_to_do():
    code = """
import jax
jax.devices()
from sharding.emulation import emulate_devices
from sharding.jax_internals import backend_is_running
assert backend_is_running()
emulate_devices(6)
from sharding import MeshError, MeshSpec
try:
    MeshSpec.parse("dp=6").build()
except MeshError as error:
    print(error)
"""
    message = run(code)
    assert "mesh dp=6 wants 6 devices, found 1 of platform 'cpu'" in message
    assert "start a fresh process" in message


# Importing JAX would add a variable or two of its own, so these look at the environment alone.
def environment_after(count: int, **given: str) -> list[str]:
    code = f"""
import os, sys
from sharding.emulation import emulate_devices
emulate_devices({count})
print(os.environ["XLA_FLAGS"]); print(os.environ["PJRT_NPROC"])
"""
    return run(code, **given).splitlines()


@pytest.mark.parametrize("count", [6, 32])
def test_the_users_other_flags_stay(count):
    flags, threads = environment_after(count, XLA_FLAGS="--xla_cpu_enable_fast_math=false")
    assert flags.split() == ["--xla_cpu_enable_fast_math=false", f"--xla_force_host_platform_device_count={count}"]
    assert int(threads) >= 2 * count


def test_a_smaller_count_of_the_users_is_raised_and_a_larger_one_kept():
    small, large = "--xla_force_host_platform_device_count=2", "--xla_force_host_platform_device_count=16"
    assert environment_after(6, XLA_FLAGS=small)[0] == "--xla_force_host_platform_device_count=6"
    assert environment_after(6, XLA_FLAGS=large)[0] == large
    # XLA takes the last of several.
    assert environment_after(6, XLA_FLAGS=f"{large} {small}")[0] == "--xla_force_host_platform_device_count=6"


def test_a_larger_thread_pool_of_the_users_is_kept():
    assert environment_after(2, PJRT_NPROC="100", XLA_FLAGS="")[1] == "100"


def test_devices_that_the_user_asked_jax_for_are_not_taken_away():
    code = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
from sharding.emulation import emulate_devices
emulate_devices(6)
print(jax.device_count())
"""
    assert run(code) == "8"


def test_no_device_at_all_cannot_be_emulated():
    from sharding.emulation import emulate_devices

    with pytest.raises(ValueError, match="found 0 devices"):
        emulate_devices(0)


BUILD = """
from sharding.emulation import emulate_devices
emulate_devices({count})
from sharding import MeshError, MeshSpec
try:
    MeshSpec.parse("dp={count}").build()
except MeshError as error:
    print(error)
"""


def test_more_devices_than_can_be_emulated_are_refused_and_not_begun():
    message = run(BUILD.format(count=100_000))
    assert "mesh dp=100000 wants 100000 devices, found 1 of platform 'cpu'" in message
    assert "can emulate at most 4,096 CPU devices, because more take minutes to start; use a smaller mesh" in message


def test_a_limit_of_address_space_bounds_the_emulation_instead_of_aborting_it():
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))"
    message = run(limit + BUILD.format(count=2000))
    assert "can emulate at most 341 CPU devices, because this process may have 8.6 GB of address space" in message


@pytest.mark.parametrize("platforms", ["cuda", "nonsense"])
def test_a_platform_that_is_not_there_is_said(platforms):
    message = run(BUILD.format(count=2), JAX_PLATFORMS=platforms)
    assert f"JAX_PLATFORMS is '{platforms}', and JAX found no device of that platform" in message
    assert "set it to cpu" in message


def test_flags_for_early_exchanges_are_of_installed_compilers_and_leave_the_users(monkeypatch):
    for variable, value in (("XLA_FLAGS", "--xla_dump_to=/x"), ("LIBTPU_INIT_ARGS", "")):
        monkeypatch.setenv(variable, value)
    installed = set()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in installed else None)
    start_exchanges_early()
    assert (os.environ["XLA_FLAGS"], os.environ["LIBTPU_INIT_ARGS"]) == ("--xla_dump_to=/x", "")
    installed |= {"jax_cuda13_plugin", "libtpu"}
    start_exchanges_early()
    start_exchanges_early()
    flag = "--xla_gpu_analytical_latency_estimator_options"
    assert os.environ["XLA_FLAGS"] == f"--xla_dump_to=/x {flag}=nccl_op_launch_us=1000000,rtt_us=1000000"
    assert os.environ["LIBTPU_INIT_ARGS"] == "--xla_tpu_enable_async_all_to_all=true"
    monkeypatch.setenv("XLA_FLAGS", f"{flag}=rtt_us=5")
    start_exchanges_early()
    assert os.environ["XLA_FLAGS"] == f"{flag}=rtt_us=5"
