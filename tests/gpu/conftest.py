"""Tests that need one GPU: run by ``pytest -m gpu``, and skipped without starting a GPU backend in any other run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="session", autouse=True)
def gpu():
    """The first GPU, with exact float32 products for the whole session."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        pytest.skip("needs a GPU: run `pytest -m gpu` (here JAX_PLATFORMS is cpu)")
    import jax

    try:
        device = jax.devices("gpu")[0]
    except RuntimeError as error:
        pytest.skip(f"needs a GPU, and JAX finds none ({str(error).splitlines()[0]}); install dsjax[cuda]")
    # XLA's default on GPUs rounds float32 operands to TF32's 10 bits.
    with jax.default_matmul_precision("highest"):
        yield device


@pytest.fixture(scope="session")
def on_cpu():
    """``on_cpu(code, *arguments)``: run Python on the CPU platform in a process of its own; what it prints, as JSON."""

    def run(code: str, *arguments: str):
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"}
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run
