"""XLA compiles an engine's programs on CPUs with less work, which changes no bit, and leaves what XLA_FLAGS says as it is."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsjax.engine.afd.layer_programs import Side
from dsjax.engine.device.compiler_options import compiler_options
from sharding import MeshSpec
from sharding.sums import add_by_halves


@pytest.fixture(autouse=True)
def devices():
    """XLA has read its flags, before a test changes them."""
    jax.devices()


def names(monkeypatch, flags: str) -> set[str]:
    monkeypatch.setenv("XLA_FLAGS", flags)
    return set(compiler_options("cpu", sums=False) or ())


def test_options_are_for_cpus_alone(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    assert compiler_options("gpu") is compiler_options("tpu") is None
    assert compiler_options("cpu")


def test_what_xla_flags_or_the_file_that_it_names_says_is_left_as_it_is(monkeypatch, tmp_path):
    every = names(monkeypatch, "--xla_force_host_platform_device_count=32")
    assert {"xla_backend_optimization_level", "xla_cpu_parallel_codegen_split_count"} <= every
    assert not names(monkeypatch, " ".join(f"--{name}=1" for name in every))
    (path := tmp_path / "flags").write_text("--xla_backend_optimization_level=2\n")
    for flags in ("--xla_backend_optimization_level=0", f" {path}"):
        assert names(monkeypatch, flags) == every - {"xla_backend_optimization_level"}
    assert names(monkeypatch, str(tmp_path / "missing")) == every


@pytest.mark.parametrize("is_exact", [True, False])
def test_layers_with_experts_apart_are_compiled_like_a_whole_step(monkeypatch, is_exact):
    """With XLA's defaults, DeepSeek-V4's compressed entries had other bits than in a whole step."""
    monkeypatch.setenv("XLA_FLAGS", "")
    step = SimpleNamespace(mesh=MeshSpec.parse("dp=1").build(), is_exact=is_exact)
    lowered = SimpleNamespace(compile=lambda compiler_options=None: compiler_options)
    options = Side(MeshSpec.parse("dp=1"), waits=True).build(lowered, step)
    assert ("xla_backend_optimization_level" in options) == is_exact


@pytest.mark.slow
@pytest.mark.parametrize("sums", [True, False])
def test_xla_knows_the_options_and_they_change_no_bit(monkeypatch, sums):
    def function(x, y):  # what LLVM could contract or vectorise otherwise; with sums along rows too
        z = jnp.exp(x) * y + jnp.sin(y) * x
        results = jnp.cos(z) * jax.nn.sigmoid(x) - z * y, add_by_halves(z), jax.lax.top_k(z, 5), z.max(axis=-1)
        return (*results, jax.nn.softmax(z, axis=-1), jnp.cumsum(z, axis=-1), z.sum(axis=-1)) if sums else results

    # As serving has it: with the tests' own flags there would be nothing to leave out.
    everything = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
    monkeypatch.setenv("XLA_FLAGS", "")
    if "xla_cpu_use_fusion_emitters" in (compiler_options("cpu", sums=False) or ()):
        everything["xla_cpu_use_fusion_emitters"] = True
    x, y = np.random.default_rng(0).normal(size=(2, 7, 301)).astype(np.float32)
    lowered = jax.jit(function).lower(x, y)
    quick = lowered.compile(compiler_options=everything | compiler_options("cpu", sums=sums))(x, y)
    jax.tree.map(np.testing.assert_array_equal, quick, lowered.compile(compiler_options=everything)(x, y))
