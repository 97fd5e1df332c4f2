"""A process's memory: what it may have, and what is said when a device has none left."""

import os

import jax
import pytest

from dsjax.engine.device import process
from dsjax.engine.device.process import OutOfDeviceMemoryError, available_bytes, explained_out_of_memory


def test_a_container_s_limit_counts_where_it_is_less_than_the_machine_s_memory(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 4000 kB\n")
    assert available_bytes(tmp_path, tmp_path) == 4_096_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path, tmp_path) == 4_096_000
    (tmp_path / "memory.max").write_text("1000000\n")
    assert available_bytes(tmp_path, tmp_path) == 1_000_000
    assert available_bytes(tmp_path / "none", tmp_path / "none") is None


def test_the_pool_is_sized_before_jax_starts_and_not_after(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    jax.devices()  # the backend runs
    process.size_memory_pool(0.8)
    assert os.environ.get("XLA_CLIENT_MEM_FRACTION") is None
    monkeypatch.setattr(process, "backend_is_running", lambda: False)
    process.size_memory_pool(0.8)
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.8"
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ  # JAX refuses both


def test_running_out_of_memory_says_while_doing_what_and_what_to_do():
    says = r"no memory left for 1234 bytes while a step was launched.*; give less"
    with pytest.raises(OutOfDeviceMemoryError, match=says), explained_out_of_memory("a step was launched", "give less"):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1234 bytes.")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), explained_out_of_memory("a step", "give less"):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")


def test_what_fails_while_a_program_is_started_is_the_same_error_as_what_fails_later():
    # JAX's fast way to call a program raises a ValueError with XLA's text: a lost collective would end the group as a wrong command does.
    with pytest.raises(jax.errors.JaxRuntimeError, match="Gloo"), explained_out_of_memory("a step", "give less"):
        raise ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer")
    with pytest.raises(OutOfDeviceMemoryError), explained_out_of_memory("a step", "give less"):
        raise ValueError("RESOURCE_EXHAUSTED: Out of memory allocating 12 bytes")
    for error in (ValueError("a wrong shape"), OutOfDeviceMemoryError("RESOURCE_EXHAUSTED: told before")):
        with pytest.raises(ValueError, match=r"shape|told") as found, explained_out_of_memory("a step", "give less"):
            raise error
        assert found.value is error
