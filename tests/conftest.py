"""Environment of every test: 32 emulated CPU devices, set before anything imports JAX."""

import itertools
import os
import sys

# The number of emulated devices; a stuck collective that aborts in a minute instead of hanging the suite; and compilation
# without LLVM's optimisations, which on these tiny models cost more than they save (XLA's own passes all run).
_XLA_FLAGS = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_force_host_platform_device_count=32",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=20",
    "--xla_cpu_collective_call_terminate_timeout_seconds=40",
)


def _wants_gpu(arguments: list[str]) -> bool:
    """Whether the run is `pytest -m gpu`: then JAX chooses the platform, and XLA's own settings hold."""
    return ("-m", "gpu") in itertools.pairwise(arguments) or "-mgpu" in arguments


def _set_environment() -> None:
    if "jax" in sys.modules:
        raise RuntimeError("jax was imported before tests/conftest.py could set its environment")
    if _wants_gpu(sys.argv):
        return
    os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *_XLA_FLAGS)).strip()
    os.environ.setdefault("PJRT_NPROC", "64")
    os.environ["JAX_PLATFORMS"] = "cpu"


_set_environment()
