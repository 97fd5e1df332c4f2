"""Emulated devices appear if asked for in time, and asking too late is an error that says what to do."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from sharding import MeshError, MeshSpec
from sharding.emulation import emulate_devices
from sharding.scheduler_flags import start_exchanges_early

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def run(code: str, **environment: str) -> str:
    """Standard output of a fresh Python on the CPU platform, with nothing of this process's JAX settings."""
    clean = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PJRT_NPROC")}
    environment = clean | {"JAX_PLATFORMS": "cpu"} | environment
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def refusal(before: str, **environment: str) -> str:
    """What a mesh of two devices says that is built after these lines."""
    build = "MeshSpec.parse('dp=2').build()"
    mesh = f"from sharding import MeshError, MeshSpec\ntry:\n    {build}\nexcept MeshError as error:\n    print(error)"
    return run(f"from sharding.emulation import emulate_devices\n{before}\n{mesh}", **environment)


# The collective would hang if the thread pool were smaller than the mesh.
SUM = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from sharding import MeshSpec
mesh = MeshSpec.parse("dp=6").build()
x = jax.device_put(np.arange(6.0), NamedSharding(mesh, P(("dp", "ep"))))
print(jax.device_count(), float(jax.jit(jnp.sum)(x)))
"""


@pytest.mark.parametrize("before", ["", "import jax; "], ids=["before JAX is imported", "before its backend starts"])
def test_asked_in_time_the_devices_exist_and_compute(before):
    assert run(f"{before}from sharding.emulation import emulate_devices; emulate_devices(6)\n{SUM}") == "6 15.0"


def test_asked_after_the_backend_has_started_the_mesh_says_what_to_do():
    message = refusal("import jax; jax.devices(); emulate_devices(2)")
    assert "mesh dp=2 wants 2 devices, found 1 of platform 'cpu'" in message
    assert "start a fresh process" in message


@pytest.fixture
def environment_after(monkeypatch):
    """``environment_after(count, flags, threads)``: what ``XLA_FLAGS`` and ``PJRT_NPROC`` are once devices were emulated."""
    jax.devices()  # from here on the environment is all that changes

    def after(count: int, flags: str = "", threads: str = "0") -> tuple[str, int]:
        monkeypatch.setenv("XLA_FLAGS", flags)
        monkeypatch.setenv("PJRT_NPROC", threads)
        emulate_devices(count)
        return os.environ["XLA_FLAGS"], int(os.environ["PJRT_NPROC"])

    return after


SMALL, LARGE = (f"--xla_force_host_platform_device_count={count}" for count in (2, 16))


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("--xla_cpu_enable_fast_math=false", ["--xla_cpu_enable_fast_math=false", SMALL.replace("2", "6")]),
        (SMALL, [SMALL.replace("2", "6")]),
        (LARGE, [LARGE]),
        (f"{LARGE} {SMALL}", [SMALL.replace("2", "6")]),  # XLA takes the last of several
    ],
    ids=["other flags stay", "a smaller count is raised", "a larger count stays", "the last count holds"],
)
def test_the_users_flags_stay_unless_they_ask_for_fewer_devices(environment_after, given, found):
    flags, threads = environment_after(6, given)
    assert flags.split() == found
    assert threads >= 2 * 6
    assert environment_after(2, threads="100")[1] == 100, "a larger thread pool of the user's stays"


def test_devices_that_the_user_asked_jax_for_are_not_taken_away():
    code = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
from sharding.emulation import emulate_devices
emulate_devices(6)
print(jax.device_count())
"""
    assert run(code) == "8"
    with pytest.raises(ValueError, match="found 0 devices"):
        emulate_devices(0)


@pytest.mark.parametrize(
    ("count", "space", "reason"),
    [
        (100_000, resource.RLIM_INFINITY, "at most 4,096 CPU devices, because more take minutes to start"),
        (2000, 8 << 30, "at most 341 CPU devices, because this process may have 8.6 GB of address space"),
    ],
)
def test_more_devices_than_can_be_emulated_are_refused_unbegun(environment_after, monkeypatch, count, space, reason):
    limits = {resource.RLIMIT_AS: (space, space)}
    infinite = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda what: limits.get(what, infinite))
    assert environment_after(count) == ("", 0)
    with pytest.raises(MeshError, match=rf"dp={count} wants {count} devices, found .* of platform 'cpu'.*{reason}"):
        MeshSpec.parse(f"dp={count}").build()


def test_a_platform_that_is_not_there_is_said():
    message = refusal("emulate_devices(2)", JAX_PLATFORMS="cuda")
    assert "JAX_PLATFORMS is 'cuda', and JAX found no device of that platform" in message
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
